"""Real servers of SGLang 0.5.23 over NIXL and TCP: talks of three turns.

An aggregated stock server says what the answers are. Pairs of stock servers, pairs with the group
``lead``, and the latter on two ranks each or with a draft model have to give the same tokens, and
to be idle and balanced afterwards: ``Pair.check`` waits for SGLang's own memory check.
"""

from __future__ import annotations

from pathlib import Path

from current.e2e.support import LEAD, Talks, play, turns
from e2e.drafts import drafting


def carries_on(
    talks: Talks, logs: Path, *, ranks: int = 1, arguments: tuple[str, ...] = (), lead: bool
) -> None:
    """A pair gives the same answers, turn by turn, and ends balanced. ``arguments``: of both."""
    settings = LEAD if lead else {}
    found = turns(play(talks, logs, settings, ranks=ranks, arguments=arguments))
    # Of the first ones some are asked of prefill, while it is asked what it can do.
    assert (found.get(("local", "always"), 0) >= 2 * len(talks.prompts[0])) == lead, found


def test_stock(talks: Talks, tmp_path: Path) -> None:
    """The baseline: where it differs, nothing else of this file says anything."""
    carries_on(talks, tmp_path, lead=False)


def test_lead(talks: Talks, tmp_path: Path) -> None:
    """Guards against a turn of wrong KV, and against pages or rows that a part leaves behind."""
    carries_on(talks, tmp_path, lead=True)


def test_lead_on_two_ranks(talks: Talks, tmp_path: Path) -> None:
    """Guards against ranks that decide differently: they would hang, or attend to other KV."""
    carries_on(talks, tmp_path, ranks=2, lead=True)


def test_lead_with_a_draft_model(talks: Talks, tmp_path: Path) -> None:
    """Guards against a local turn that joins without what its first draft starts from. The model is
    its own draft, of which nearly all drafts are rejected: wrong KV would change the text."""
    carries_on(talks, tmp_path, arguments=drafting(talks.model, 3), lead=True)

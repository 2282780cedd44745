"""Real servers of SGLang 0.5.23 over NIXL and TCP: talks of three turns.

An aggregated stock server gives the right answers. Pairs of stock servers, pairs with the group
``lead``, and the latter with two ranks each or with a draft model must give the same tokens, and be
idle and balanced afterwards: ``Pair.check`` waits for SGLang's own memory check.
"""

from __future__ import annotations

from pathlib import Path

from current.e2e.support import LEAD, Talks, play, turns
from e2e.drafts import drafting


def check_talks(
    talks: Talks,
    logs: Path,
    *,
    ranks: int = 1,
    arguments: tuple[str, ...] = (),
    lead: bool,
) -> None:
    """Check that a pair gives the same answers in each turn and ends balanced."""
    settings = LEAD if lead else {}
    page = play(talks, logs, settings, ranks=ranks, arguments=arguments)
    counts = turns(page)
    # Some first turns are remote, because prefill's capabilities are not yet known.
    assert (counts.get(("local", "short"), 0) >= 2 * len(talks.prompts[0])) == lead, counts


def test_stock(talks: Talks, tmp_path: Path) -> None:
    """The baseline: if it fails, the other tests of this file mean nothing."""
    check_talks(talks, tmp_path, lead=False)


def test_lead_on_two_ranks(talks: Talks, tmp_path: Path) -> None:
    """Guards against ranks that decide differently: they would hang, or attend to other KV."""
    check_talks(talks, tmp_path, ranks=2, lead=True)


def test_lead_with_a_draft_model(talks: Talks, tmp_path: Path) -> None:
    """Guards against a local turn that joins without the input of its first draft. The model is its
    own draft and rejects nearly all drafts, so that wrong KV would change the text."""
    check_talks(talks, tmp_path, arguments=drafting(talks.model, 3), lead=True)

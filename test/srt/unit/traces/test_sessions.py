"""Sessions are recognized from hash ids, and only those."""

from __future__ import annotations

import pytest

from benchmark.traces.record import Record
from benchmark.traces.sessions import annotate

NEW = [(number, 0) for number in range(4)]
#: A prompt's blocks, the last of which is partial, and how many tokens that has; then for each
#: prompt the number of its session and its turn.
PROMPTS = {
    # Were the last id compared, no conversation would be seen to go on.
    "a partial last block changes its id": (
        [(1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 6, 7)],
        256,
        [(0, 0), (0, 1), (0, 2)],
    ),
    # Else all who share an instruction would stick to one worker as one endless session. The third
    # prompt ends within what the first two have shown to be shared, so does the fourth.
    "a common instruction is no conversation": (
        [(1, 2, 3), (1, 4, 5), (1, 6), (1, 7, 8)],
        256,
        NEW[:4],
    ),
    "turns of others in between change nothing": (
        [(1, 2, 3), (1, 4, 5), (1, 2, 6, 7), (1, 4, 8, 9), (1, 2, 6, 10, 11)],
        256,
        [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)],
    ),
    # A fork from an earlier turn is a new session, and what it shares no longer tells who goes on.
    "the latest prompt counts": (
        [(1, 2, 9), (1, 2, 3, 9), (1, 2, 4, 8), (1, 2, 3, 5, 9)],
        256,
        [(0, 0), (0, 1), (1, 0), (0, 2)],
    ),
    # Nothing can continue it, and it must not continue everything.
    "a prompt without a full block": ([(1,), (1,)], 100, NEW[:2]),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_sessions_of_prompts(case: str) -> None:
    """Guards against conversations that are not seen to go on, and against requests taken for
    turns of one that they are not of."""
    prompts, partial, expected = PROMPTS[case]
    records = [Record(at, (len(ids) - 1) * 512 + partial, 1, ids) for at, ids in enumerate(prompts)]
    names = [(f"derived-{number}", turn) for number, turn in expected]
    assert [(r.session_id, r.turn) for r in annotate(records)] == names


def test_what_names_its_session_keeps_it() -> None:
    """A trace that says what its sessions are is right; only missing turns are counted."""
    records = [
        Record(0, 600, 1, (1, 2), "a"),
        Record(1, 600, 1, (1, 2)),
        Record(2, 1300, 1, (1, 3, 4), "a"),
        Record(3, 1300, 1, (1, 3, 4), "b", 7),
    ]
    assert [(r.session_id, r.turn) for r in annotate(records)] == [
        ("a", 0),
        ("derived-0", 0),
        ("a", 1),
        ("b", 7),
    ]

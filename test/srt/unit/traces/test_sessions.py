"""Sessions recognized from hash ids, without false ones."""

from __future__ import annotations

import pytest

from benchmark.traces.record import Record
from benchmark.traces.sessions import annotate

NEW = [(number, 0) for number in range(4)]
#: A prompt's blocks, of which the last is partial, and the tokens of that block; then for each
#: prompt the number of its session and its turn.
PROMPTS = {
    # If the last id were compared, no conversation would be seen to continue.
    "a partial last block changes its id": (
        [(1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 6, 7)],
        256,
        [(0, 0), (0, 1), (0, 2)],
    ),
    # Otherwise all requests with one instruction would go to one worker as one endless session. The
    # third prompt ends within the prefix that the first two share; so does the fourth.
    "a common instruction is no conversation": (
        [(1, 2, 3), (1, 4, 5), (1, 6), (1, 7, 8)],
        256,
        NEW[:4],
    ),
    "interleaved turns of other sessions": (
        [(1, 2, 3), (1, 4, 5), (1, 2, 6, 7), (1, 4, 8, 9), (1, 2, 6, 10, 11)],
        256,
        [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)],
    ),
    # A fork from an earlier turn is a new session, and its shared prefix no longer identifies the
    # continuation.
    "the latest prompt counts": (
        [(1, 2, 9), (1, 2, 3, 9), (1, 2, 4, 8), (1, 2, 3, 5, 9)],
        256,
        [(0, 0), (0, 1), (1, 0), (0, 2)],
    ),
    # No prompt can continue it, and it must not continue every prompt.
    "a prompt without a full block": ([(1,), (1,)], 100, NEW[:2]),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_sessions_of_prompts(case: str) -> None:
    """Guards against conversations that are not recognized as continued, and against requests
    counted as turns of another conversation."""
    prompts, partial, expected = PROMPTS[case]
    records = [
        Record(time_s, (len(ids) - 1) * 512 + partial, 1, ids) for time_s, ids in enumerate(prompts)
    ]
    names = [(f"derived-{number}", turn) for number, turn in expected]
    assert [(r.session_id, r.turn) for r in annotate(records)] == names


def test_recorded_sessions_are_kept() -> None:
    """Session names in a trace are kept; only missing turns are counted."""
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

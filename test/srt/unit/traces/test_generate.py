"""Generated conversations look like a trace."""

from __future__ import annotations

from itertools import pairwise

from benchmark.traces.generate import Shape, conversations
from benchmark.traces.record import check
from benchmark.traces.sharing import endless_hit_rate


def test_a_valid_trace_in_order_of_time() -> None:
    """What the reader refuses in a file must not be generated either."""
    records = list(conversations(500, seed=1))
    assert len(records) == 500
    for record in records:
        check(record)
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(records))


def test_seeded() -> None:
    """Both arms get the same load, and a shorter run is the start of a longer one."""
    assert list(conversations(200, seed=3)) == list(conversations(300, seed=3))[:200]
    assert list(conversations(50, seed=3)) != list(conversations(50, seed=4))


def test_equal_ids_have_equal_ids_before_them() -> None:
    """An id stands for a block and its whole prefix: were one reached in two ways, a cache would
    not find what the trace says."""
    before: dict[int, int | None] = {}
    for record in conversations(500, seed=2):
        previous: int | None = None
        for block in record.hash_ids:
            assert before.setdefault(block, previous) == previous
            previous = block


def test_turns_repeat_what_was_said() -> None:
    """Without conversations and shared instructions there is nothing to cache; a third to a half
    of all blocks is seen again, as in the published trace."""
    assert 0.3 < endless_hit_rate(list(conversations(1000))) < 0.5
    alone = Shape(mean_turns=1.0, system_prompts=0, system_blocks=0)
    assert endless_hit_rate(list(conversations(200, shape=alone))) == 0

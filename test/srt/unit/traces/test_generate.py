"""Generated traffic looks like a trace."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmark.traces.generate import AGENTIC, CONVERSATION, TOOLS, Shape, generate
from benchmark.traces.record import check

SHAPES = {"agentic": AGENTIC, "conversation": CONVERSATION, "tools": TOOLS}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_valid_trace_in_order_of_time(shape: Shape) -> None:
    """What the reader refuses in a file must not be generated either; and an id stands for a block
    and its whole prefix: were one reached in two ways, a cache would not find what it says."""
    records = list(generate(500, 1, shape))
    assert len(records) == 500
    before: dict[int, int | None] = {}
    for record in records:
        check(record)
        previous: int | None = None
        for block in record.hash_ids:
            assert before.setdefault(block, previous) == previous
            previous = block
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(records))


def test_seeded() -> None:
    """Both arms get the same load, and a shorter run is the start of a longer one."""
    assert list(generate(200, seed=3)) == list(generate(300, seed=3))[:200]
    assert list(generate(50, seed=3)) != list(generate(50, seed=4))

"""Generated traffic looks like a trace."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmark.traces.generate import AGENTIC, CONVERSATION, TOOLS, UNSHARED, Shape, generate
from benchmark.traces.record import check
from benchmark.traces.sharing import endless_hit_rate

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


def test_unshared() -> None:
    """A load that measures what a miss costs has no hit."""
    records = list(generate(500, 0, UNSHARED))
    assert endless_hit_rate(records) == 0
    assert all(record.turn == 0 for record in records)


def test_seeded() -> None:
    """Both arms get the same load, and a shorter run is the start of a longer one."""
    assert list(generate(200, seed=3)) == list(generate(300, seed=3))[:200]
    assert list(generate(50, seed=3)) != list(generate(50, seed=4))


@pytest.mark.parametrize(
    ("shape", "tokens", "answers", "hit"),
    [
        (CONVERSATION, (8000, 14000), (280, 420), (0.3, 0.5)),
        (TOOLS, (7500, 9500), (150, 240), (0.5, 0.68)),
    ],
    ids=["conversation", "tools"],
)
def test_shapes_resemble_what_they_are_named_after(
    shape: Shape,
    tokens: tuple[float, float],
    answers: tuple[float, float],
    hit: tuple[float, float],
) -> None:
    """A load that has nothing to cache, or other lengths than the published traces."""
    records = list(generate(2000, 0, shape))
    mean = sum(r.input_length for r in records) / len(records)
    assert tokens[0] < mean < tokens[1]
    assert answers[0] < sum(r.output_length for r in records) / len(records) < answers[1]
    assert hit[0] < endless_hit_rate(records) < hit[1]

"""Generated traffic is a valid trace, and has the published shape."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from benchmark.traces.describe import Description, describe
from benchmark.traces.generate import generate
from benchmark.traces.record import Record, check
from benchmark.traces.sample import survey


def test_a_valid_trace_in_order_of_time() -> None:
    """Guards against generated records that the reader refuses. Each prompt contains the previous
    one, and an id stands for a block and its whole prefix: an id with two prefixes would make a
    cache miss where the trace reports a hit."""
    records = list(generate(2000, 1))
    before: dict[int, int | None] = {}
    sessions: defaultdict[str | None, list[Record]] = defaultdict(list)
    for record in records:
        check(record)
        sessions[record.session_id].append(record)
        previous: int | None = None
        for block in record.hash_ids:
            assert before.setdefault(block, previous) == previous
            previous = block
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(records))
    for turns in sessions.values():
        assert [r.turn for r in turns] == list(range(len(turns)))
        for a, b in pairwise(turns):
            full = a.input_length // 512
            assert a.hash_ids[:full] == b.hash_ids[:full]
            assert b.input_length > a.input_length + a.output_length


def test_seeded() -> None:
    """Both arms get the same load, and a shorter run is the start of a longer one."""
    assert list(generate(200, seed=3)) == list(generate(300, seed=3))[:200]
    assert list(generate(50, seed=3)) != list(generate(50, seed=4))


@pytest.fixture(scope="module")
def description() -> Description:
    return describe(survey(generate(30_000, seed=3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "published", "rel", "off"),
    [
        # The tail makes the means of 30,000 requests vary by some percent from seed to seed.
        ("input_tokens.mean", 33_600, 0.1, 0),
        ("input_tokens.p50", 20_000, 0.1, 0),
        ("input_tokens.p90", 88_000, 0.15, 0),
        ("output_tokens.mean", 445, 0.1, 0),
        ("output_tokens.p50", 80, 0.05, 0),
        ("growth_per_turn", 2000, 0.1, 0),
        ("prefill_share", 0.98, 0, 0.01),
        # In 20 minutes later turns are missing, so that less is reused within sessions.
        ("hit", 0.67, 0, 0.05),
        ("within_share_of_hits", 0.62, 0, 0.08),
        ("cross_session_share", 0.52, 0, 0.05),
        ("inconsistent_blocks", 0, 0, 0),
    ],
)
def test_the_published_figures(
    description: Description, field: str, published: float, rel: float, off: float
) -> None:
    """Guards the figures that decide a server's work and a cache's gain; wrong ones would change
    the load of every study."""
    name, _, part = field.partition(".")
    value = getattr(description[name], part) if part else description[name]
    assert value == pytest.approx(published, rel=rel, abs=off)

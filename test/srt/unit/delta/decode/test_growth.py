"""The sum of what running requests may still need: equal to a walk of them after every event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.decode.growth import (
    CeilSum,
    Claim,
    GrowthSum,
    Track,
    growth,
)

COMES = st.tuples(st.integers(0, 300), st.integers(0, 500))
EVENTS = st.lists(st.one_of(COMES, st.integers(0, 40)), max_size=60)


@given(events=EVENTS, cap=st.integers(0, 100), page=st.sampled_from([1, 4, 16, 64]))
def test_it_is_what_a_walk_finds(events: list[object], cap: int, page: int) -> None:
    """Guards against a sum that drifts from its requests: they come, grow by a token a step, fill
    pages, reach the end of their answers, overrun it, and leave in any order."""
    total, running = GrowthSum(cap, page), list[tuple[Claim, Track, int]]()
    for event in events:
        if isinstance(event, tuple):
            claim = Claim(*event)
            running.append((claim, total.add(*event), total.steps))
        elif event % 3 == 0 and running:
            total.remove(running.pop(event % len(running))[1])
        else:
            for _ in range(int(str(event))):
                total.step()
        now = [Claim(c.allocated + total.steps - since, c.final) for c, _, since in running]
        assert total.total == sum(growth(claim, cap, page) for claim in now)


def test_a_step_looks_at_nobody() -> None:
    """Guards against a cost that grows with the number of running requests."""
    total = GrowthSum(512, 16)
    for number in range(1000):
        total.add(100 + number, 10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang.srt.disaggregation.delta.decode.claims.page_ceil", None)
        for _ in range(100):
            total.step()
        assert total.total == 1000 * 512


def test_what_was_counted_leaves_no_entry() -> None:
    """Guards against memory that grows with each step of speculation: lengths grow unevenly, so
    each request is taken out and counted anew, and no step drops the empty entries."""
    total = CeilSum(16)
    for length in range(1000):
        track = Track(length, 10_000)
        total.add(track)
        total.remove(track)
    assert total.total == 0 and not total._ending

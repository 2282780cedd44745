"""What requests take of the pool: never negative, never more than they can become; and summed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.decode.admission import (
    CeilSum,
    Claim,
    GrowthSum,
    Track,
    entering,
    entry_cost,
    growth,
)
from sglang.srt.disaggregation.delta.pages import page_ceil, page_floor

PAGES = st.sampled_from([1, 4, 16, 64])
CLAIMS = st.builds(Claim, allocated=st.integers(0, 500), final=st.integers(0, 900))


@pytest.mark.parametrize(
    ("allocated", "final", "cap", "page", "tokens"),
    [
        (100, 130, 512, 1, 30),  # what it can still generate, not the cap
        (100, 5000, 512, 1, 512),  # at most the cap
        (100, 130, 512, 16, 32),  # 112 -> 144: whole pages
        (100, 112, 512, 16, 0),  # the rest fits into its last page
        (112, 113, 512, 16, 16),  # one token, one page
        (112, 200, 0, 16, 0),
        (130, 100, 512, 16, 0),  # generated more than asked (a stop token is checked late)
    ],
)
def test_growth(allocated: int, final: int, cap: int, page: int, tokens: int) -> None:
    """Guards against reserving the cap for every request, which decides how many run."""
    assert growth(Claim(allocated, final), cap, page) == tokens


@given(claim=CLAIMS, cap=st.integers(0, 600), page=PAGES)
def test_growth_is_what_may_be_allocated(claim: Claim, cap: int, page: int) -> None:
    """Guards against a negative reserve, which would count other requests' memory as free, and
    against one larger than what is left to generate."""
    reserve = growth(claim, cap, page)
    left = max(claim.final - claim.allocated, 0)
    assert reserve >= 0 and reserve % page == 0
    assert reserve <= page_ceil(min(cap, left), page)
    assert page_ceil(claim.allocated, page) + reserve >= claim.allocated + min(cap, left)


@given(claim=CLAIMS, cap=st.integers(0, 600), more=st.integers(0, 100), page=PAGES)
def test_growth_is_monotone(claim: Claim, cap: int, more: int, page: int) -> None:
    """Guards against a reserve that shrinks when a request may generate more."""
    assert growth(claim, cap, page) <= growth(claim, cap + more, page)
    assert growth(claim, cap, page) <= growth(replace(claim, final=claim.final + more), cap, page)


@given(claim=CLAIMS, steps=st.integers(0, 700), cap=st.integers(0, 600), page=PAGES)
def test_reserve_follows_a_request_to_its_end(
    claim: Claim, steps: int, cap: int, page: int
) -> None:
    """Guards against a sum of allocated and reserved pages that exceeds the final length, or that
    falls while the request runs: admission would hand out what it is about to use."""
    grown = min(claim.allocated + steps, max(claim.final, claim.allocated))
    later = replace(claim, allocated=grown)
    total = page_ceil(later.allocated, page) + growth(later, cap, page)
    assert total <= page_ceil(max(claim.final, claim.allocated), page)
    assert total >= page_ceil(claim.allocated, page) + growth(claim, cap, page)


@given(
    length=st.integers(1, 500), new=st.integers(0, 300), cap=st.integers(0, 400), page=PAGES,
    data=st.data(),
)  # fmt: skip
def test_entry_cost(length: int, new: int, cap: int, page: int, data: st.DataObject) -> None:
    """Guards against a delta that is not rounded up to whole pages, and a prefix counted twice."""
    prefix = page_floor(data.draw(st.integers(0, length)), page)
    cost = entry_cost(prefix, Claim(length, length + new), cap, page)
    assert cost >= 0 and cost % page == 0
    assert cost + prefix == entry_cost(0, Claim(length, length + new), cap, page)
    assert cost <= page_ceil(length + new, page) - prefix
    assert cost == page_ceil(length, page) - prefix + growth(Claim(length, length + new), cap, page)


@pytest.mark.parametrize(("new", "half"), [(0, 0), (1, 1), (7, 4), (160, 80)])
def test_an_entering_request_claims_half_of_its_answer(new: int, half: int) -> None:
    """Guards against memory that stands empty until answers have grown into it, and against a
    request that is let in without room for its first token."""
    assert entering(Claim(100, 100 + new)) == Claim(100, 100 + half)


@pytest.mark.parametrize(("new", "step", "claimed"), [(2, 16, 16), (40, 16, 28), (0, 4, 4)])
def test_an_entering_request_claims_all_of_its_first_step(
    new: int, step: int, claimed: int
) -> None:
    """Guards against a draft model's first step that finds half of the room that it wants."""
    assert entering(Claim(100, 100 + new + step), step) == Claim(100, 100 + claimed)
    assert entering(Claim(100, 102), 16) == Claim(100, 102)  # the pool ends there


# ---- summed over requests ----

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
        patch.setattr("sglang.srt.disaggregation.delta.decode.admission.page_ceil", None)
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

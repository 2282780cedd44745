"""Requests' claims on the pool: never negative, never more than the requests can become."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.policy.memory import (
    Claim,
    entering,
    entry_cost,
    growth,
    page_ceil,
    page_floor,
)

PAGES = st.sampled_from([1, 4, 16, 64])
CLAIMS = st.builds(Claim, allocated=st.integers(0, 500), final=st.integers(0, 900))
CAPS = st.integers(0, 600)


@given(tokens=st.integers(0, 10_000), page=PAGES)
def test_rounding(tokens: int, page: int) -> None:
    """Guards against page arithmetic that is off by one at a page border."""
    assert page_floor(tokens, page) <= tokens <= page_ceil(tokens, page)
    assert page_floor(tokens, page) % page == page_ceil(tokens, page) % page == 0
    assert page_ceil(tokens, page) - page_floor(tokens, page) == (page if tokens % page else 0)


@pytest.mark.parametrize(
    ("allocated", "final", "cap", "page", "tokens"),
    [
        (100, 130, 512, 1, 30),  # the rest that it can generate, not the cap
        (100, 5000, 512, 1, 512),  # at most the cap
        (100, 130, 512, 16, 32),  # 112 -> 144: whole pages
        (100, 112, 512, 16, 0),  # the rest fits into its last page
        (112, 113, 512, 16, 16),  # one token, one page
        (112, 200, 0, 16, 0),
        (130, 100, 512, 16, 0),  # generated more than requested (a stop token is checked late)
    ],
)
def test_growth(allocated: int, final: int, cap: int, page: int, tokens: int) -> None:
    """Guards against reserving the cap for every request, which decides how many run."""
    assert growth(Claim(allocated, final), cap, page) == tokens


@given(claim=CLAIMS, cap=CAPS, more=st.integers(0, 700), page=PAGES)
def test_a_reserve_is_what_may_be_allocated(claim: Claim, cap: int, more: int, page: int) -> None:
    """Guards against a negative reserve, which would count other requests' memory as free; one that
    is larger than the rest of the answer, or shrinks when a request may generate more; and a sum of
    allocated and reserved pages that falls while a request runs, or exceeds its final length:
    admission would allocate pages that the request is about to use."""
    reserve, end = growth(claim, cap, page), max(claim.final, claim.allocated)
    wanted, held = min(cap, end - claim.allocated), page_ceil(claim.allocated, page)
    assert 0 <= reserve <= page_ceil(wanted, page) and reserve % page == 0
    assert held + reserve >= claim.allocated + wanted
    assert reserve <= growth(claim, cap + more, page)
    assert reserve <= growth(replace(claim, final=claim.final + more), cap, page)
    later = replace(claim, allocated=min(claim.allocated + more, end))
    total = page_ceil(later.allocated, page) + growth(later, cap, page)
    assert held + reserve <= total <= page_ceil(end, page)


@given(length=st.integers(1, 500), new=st.integers(0, 300), cap=CAPS, page=PAGES, data=st.data())
def test_entry_cost(length: int, new: int, cap: int, page: int, data: st.DataObject) -> None:
    """Guards against a delta that is not rounded up to whole pages, and a prefix counted twice."""
    prefix, claim = page_floor(data.draw(st.integers(0, length)), page), Claim(length, length + new)
    cost = entry_cost(prefix, claim, cap, page)
    assert cost == page_ceil(length, page) - prefix + growth(claim, cap, page)
    assert 0 <= cost <= page_ceil(length + new, page) - prefix and cost % page == 0


@pytest.mark.parametrize(
    ("new", "step", "claimed"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (7, 0, 4),
        (160, 0, 80),
        # A draft model's first step must have all its slots,
        (18, 16, 16),
        (56, 16, 28),
        (4, 4, 4),
        (2, 16, 2),  # except at the end of the pool.
    ],
)
def test_an_entering_request_claims_half_of_its_answer(new: int, step: int, claimed: int) -> None:
    """Guards against memory that stays empty until answers have grown into it, and against a
    request that is admitted without room for its first token."""
    assert entering(Claim(100, 100 + new), step) == Claim(100, 100 + claimed)

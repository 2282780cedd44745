"""The token budget: never negative, never more than a request can still become."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.decode_radix.admission import (
    BlockedHead,
    Claim,
    PoolState,
    can_finish_alone,
    entering,
    entry_cost,
    growth,
    reserved,
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


@given(claims=st.lists(CLAIMS, max_size=6), cap=st.integers(0, 600), page=PAGES)
def test_reserved_is_the_sum(claims: list[Claim], cap: int, page: int) -> None:
    """Guards against rounding the sum, where each request rounds up on its own."""
    assert reserved(claims, cap, page) == sum(growth(claim, cap, page) for claim in claims)


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


@pytest.mark.parametrize(
    ("final", "shared", "pinned", "total", "alone"),
    [
        (100, 0, 0, 100, True),
        (101, 0, 0, 100, False),
        (100, 0, 1, 100, False),
        (100, 40, 40, 100, True),  # what is pinned is its own prefix
        (100, 40, 41, 100, False),
    ],
)
def test_can_finish_alone(final: int, shared: int, pinned: int, total: int, alone: bool) -> None:
    """Guards against transfers that fill the pool until the last running request is aborted."""
    assert can_finish_alone(final, shared, pinned, total, 1) is alone


def test_can_finish_alone_counts_whole_pages() -> None:
    """Guards against the one token that opens a new page."""
    assert can_finish_alone(96, 0, 0, 96, 16)
    assert not can_finish_alone(97, 0, 0, 111, 16)


POOL = PoolState(free=100, protected=50, reserved=40)


@pytest.mark.parametrize(
    ("rid", "pool", "inserts", "blocked"),
    [
        ("a", POOL, 3, True),
        ("b", POOL, 3, False),  # another head
        ("a", POOL, 4, False),  # the tree may hold more of it
        ("a", POOL._replace(free=129), 3, True),  # 89 of 90 tokens
        ("a", POOL._replace(free=130), 3, False),
        ("a", POOL._replace(reserved=9), 3, False),
        ("a", POOL._replace(protected=60), 3, True),  # still too little
    ],
    ids=[
        "unchanged",
        "other request",
        "insert",
        "too little freed",
        "freed",
        "reserve fell",
        "locked",
    ],
)
def test_blocked_head(rid: str, pool: PoolState, inserts: int, blocked: bool) -> None:
    """Guards against matching a blocked prompt on every step, and against a head that is never
    tried again although something changed."""
    assert BlockedHead("a", 90, POOL, 3).still_blocked(rid, pool, inserts) is blocked


def test_blocked_for_another_reason_than_tokens() -> None:
    """Guards against a head that had enough tokens, was refused to let running requests end, and is
    tried again and again while nothing changes."""
    head = BlockedHead("a", 10, POOL, 3)
    assert head.still_blocked("a", POOL, 3)
    assert not head.still_blocked("a", POOL._replace(protected=49), 3)


@pytest.mark.parametrize(("new", "half"), [(0, 0), (1, 1), (7, 4), (160, 80)])
def test_an_entering_request_claims_half_of_its_answer(new: int, half: int) -> None:
    """Guards against memory that stands empty until answers have grown into it, and against a
    request that is let in without room for its first token."""
    assert entering(Claim(100, 100 + new)) == Claim(100, 100 + half)

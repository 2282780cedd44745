"""Page patterns of the KV transfer benchmark: overlapping or merged pages would flatter an arm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.kv_transfer import patterns
from benchmark.kv_transfer.cases import Case

counts = st.integers(1, 60)


@given(count=counts, rooms=st.integers(1, 6), pattern=st.sampled_from(patterns.PATTERNS))
def test_rooms_share_no_page(count: int, rooms: int, pattern: str) -> None:
    """Two rooms under way that write one page, or page 0, which no request owns."""
    pages = np.concatenate(patterns.pages_for(pattern, count, rooms, seed=3))
    assert sorted(pages) == list(range(1, rooms * count + 1))


@given(data=st.data(), count=counts)
def test_merged_runs_cover_every_page(data: st.DataObject, count: int) -> None:
    """The bare arm moving less than the others do."""
    order = st.permutations(range(count))
    source = np.array(data.draw(order), np.int32)
    destination = np.array(data.draw(order), np.int32)
    pairs = [
        (first + i, to + i)
        for first, to, length in zip(*patterns.merged(source, destination), strict=True)
        for i in range(length)
    ]
    assert pairs == list(zip(source, destination, strict=True))


def test_rooms_are_dealt_to_the_peers_in_turn() -> None:
    """A peer with all the rooms, and slots or pages that two rooms of a peer share."""
    plans = Case(3, page_size=1, rooms=10, peers=4).plans(0)
    assert len({plan.room for plan in plans}) == 10
    shares = patterns.by_peer(plans, 4)
    assert [len(share) for share in shares] == [3, 3, 2, 2]
    for share in shares:
        assert len({plan.slot for plan in share}) == len(share)
        for side in ("source", "destination"):
            pages = np.concatenate([getattr(plan, side) for plan in share])
            assert len(set(pages)) == len(pages)


def test_chunks_are_the_whole_room_in_order() -> None:
    """A chunk that is left out, or one without pages."""
    (plan,) = Case(10, page_size=1, chunks=3).plans(0)
    parts = plan.parts()
    assert np.array_equal(np.concatenate(parts), plan.source) and all(len(p) for p in parts)
    with pytest.raises(ValueError, match="--chunks 11"):
        Case(10, page_size=1, chunks=11).plans(0)

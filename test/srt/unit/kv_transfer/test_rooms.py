"""Rooms of the KV transfer benchmark: overlapping pages would flatter an arm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.kv_transfer.records import by_peer
from benchmark.kv_transfer.runs import Case, pages_for


@given(count=st.integers(1, 60), rooms=st.integers(1, 6))
def test_rooms_share_no_page(count: int, rooms: int) -> None:
    """Two rooms under way that write one page, or page 0, which no request owns."""
    pages = np.concatenate(pages_for(count, rooms, seed=3))
    assert sorted(pages) == list(range(1, rooms * count + 1))


def test_rooms_are_dealt_to_the_peers_in_turn() -> None:
    """A peer with all the rooms, and slots or pages that two rooms of a peer share."""
    plans = Case(3, page_size=1, rooms=10, peers=4).plans(0)
    assert len({plan.room for plan in plans}) == 10
    shares = by_peer(plans, 4)
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

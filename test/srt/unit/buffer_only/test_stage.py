"""Staging pages: leases that end once, and shares that neither direction can take from the
other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.buffer_only.settings import Share, shares
from sglang.srt.mem_cache.buffer_only.stage import Direction, Stage


def stage(pages: int) -> Stage:
    return Stage(pages, *shares(pages))


@pytest.mark.hazard("staging-pages")
def test_a_lease_ends_once():
    """Returned twice, a page would be lent to two transfers at the same time."""
    pages = stage(8)
    first = pages.allocate(Direction.PREFETCH, 4)
    first.release()
    second = pages.allocate(Direction.PREFETCH, 4)
    first.release()
    assert pages.used() == 4 == len(second.pages) and pages.problems() == []


def test_floors_and_ceilings_bind_each_by_itself():
    """Shares that do not add up to the stage: what is promised to the other direction is kept, and
    nobody gets more than its own part."""
    assert Stage(10, Share(2, 5), Share(3, 10)).capacity(Direction.BACKUP) == 5
    pages = Stage(10, Share(2, 10), Share(3, 10))
    assert pages.capacity(Direction.BACKUP) == 7 and pages.capacity(Direction.PREFETCH) == 8
    pages.allocate(Direction.PREFETCH, 2)
    assert pages.capacity(Direction.BACKUP) == 7 and pages.capacity(Direction.PREFETCH) == 6


def test_what_is_stranded_cannot_be_waited_for():
    """All other leases end some time; those of calls that were given up perhaps never."""
    pages = stage(16)  # writes: 4 to 8, reads: 8 to 12
    hung, other = pages.allocate(Direction.PREFETCH, 6), pages.allocate(Direction.PREFETCH, 6)
    assert (
        pages.capacity(Direction.PREFETCH) == 0
        and pages.eventual_capacity(Direction.PREFETCH) == 12
    )
    hung.strand()
    assert pages.eventual_capacity(Direction.PREFETCH) == 6 and pages.stranded == 6
    assert pages.eventual_capacity(Direction.BACKUP) == 8
    other.strand()
    assert (
        pages.eventual_capacity(Direction.PREFETCH) == 0
        and pages.eventual_capacity(Direction.BACKUP) == 4
    )
    for lease in (hung, other):
        lease.release()
    assert pages.stranded == 0 and pages.eventual_capacity(Direction.PREFETCH) == 12


def test_refused():
    """An empty lease is a mistake of the caller; shares that do not fit promise too much."""
    pages = stage(8)
    with pytest.raises(ValueError, match="0 pages"):
        pages.allocate(Direction.BACKUP, 0)
    assert pages.allocate(Direction.BACKUP, 8) is None
    with pytest.raises(ValueError, match="do not fit"):
        Stage(4, Share(3, 4), Share(2, 4))
    with pytest.raises(ValueError, match="split off"):
        pages.allocate(Direction.PREFETCH, 2).split(2)


@given(
    st.integers(2, 40),
    st.lists(
        st.tuples(
            st.sampled_from(Direction),
            st.integers(1, 12),
            st.sampled_from(("allocate", "release", "strand", "split")),
        )
    ),
)
def test_every_page_is_free_or_lent_once(pages: int, events: list) -> None:
    """Room is what a lease gets, ceilings hold, and the books balance after any sequence."""
    found = stage(pages)
    leases = []
    for way, count, event in events:
        lease = leases[count % len(leases)] if leases else None
        if event == "allocate" or lease is None:
            room, lease = found.capacity(way), found.allocate(way, count)
            assert (lease is not None) == (count <= room)
            leases += [lease] if lease else []
        elif event == "release":
            leases.remove(lease)
            lease.release()
        elif event == "strand":
            lease.strand()
        elif len(lease.pages) > 1 and not lease.stranded:
            leases.append(lease.split(1))
        stranded = sum(len(lease.pages) for lease in leases if lease.stranded)
        assert found.stranded == stranded
        assert found.used() == sum(len(lease.pages) for lease in leases)
        for way, share in found.shares.items():  # neither starves the other
            assert found.used(way) <= share.ceiling
            assert found.capacity(way) >= share.floor - found.used(way)
        assert found.problems() == []

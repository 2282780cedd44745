"""How large the stage is when nobody says so, the smallest that is accepted, and its staging pages:
leases that end once, and shares that neither direction can take from the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from component.buffer_only.books import check_books
from sglang.srt.mem_cache.buffer_only import settings
from sglang.srt.mem_cache.buffer_only.settings import Share, shares
from sglang.srt.mem_cache.buffer_only.stage import Direction, Stage
from sglang.srt.patchset import stage_size
from sglang.srt.patchset.flags import PAGES

KB = 1024
READS, WRITES = Direction.PREFETCH, Direction.BACKUP


@pytest.mark.parametrize(
    ("token_bytes", "page", "device_tokens", "pages"),
    [
        (256 * KB, 64, 200_000, 298),  # 32B, 16 bits: 5 GB
        (128 * KB, 64, 400_000, 596),  # 32B, 8 bits: the pull request measured 512 pages
        (70 * KB, 64, 1_000_000, 1089),  # a latent of 671B
        (128 * KB, 1, 400_000, 38146),
        (2 * KB, 16, 32_768, 2048),  # a small model: the device pool is the most
        (256 * KB, 64, 256, 8),  # two minimal transfers, whatever the pool has
    ],
)
def test_default(token_bytes: int, page: int, device_tokens: int, pages: int):
    """As many bytes for every model, no more than the device pool and no less than the minimum."""
    found = settings.default_pages(token_bytes * page, device_tokens // page, page, 256)
    assert found == pages


@pytest.mark.parametrize(("page", "threshold", "least"), [(16, 256, 32), (64, 256, 8), (64, 1, 2)])
def test_minimum(page: int, threshold: int, least: int):
    """A stage in which a read and a write cannot be under way at the same time stands still."""
    stage_size.check_pages(least, page, threshold)
    with pytest.raises(ValueError, match=f"pages {least - 1} .*Use {PAGES}"):
        stage_size.check_pages(least - 1, page, threshold)


@given(st.integers(1, 128), st.integers(1, 4096), st.integers(0, 5000))
def test_shares_hold_a_minimal_transfer(page: int, threshold: int, more: int):
    """The smallest hit that is fetched fits into what reads are sure of, in any stage that is
    accepted; and the ceilings leave the other direction its floor."""
    pages = stage_size.minimum_pages(page, threshold) + more
    write, read = shares(pages)
    assert read.floor >= stage_size.minimal_transfer(page, threshold) and write.floor >= 1
    assert write.ceiling + read.floor == read.ceiling + write.floor == pages


@pytest.mark.parametrize(
    ("page_bytes", "pages"), [(32 * KB, 128), (256 * KB, 128), (16 << 20, 2), (64 << 20, 1)]
)
def test_calls_are_sized_in_bytes(page_bytes: int, pages: int):
    """128 pages of a large model are gigabytes, for which a call has ten seconds."""
    assert settings.call_pages(page_bytes) == pages


# ---- staging pages ----


def test_floors_and_ceilings_bind_each_by_itself():
    """Shares that do not add up to the stage: what is promised to the other direction is kept, and
    nobody gets more than its own part. What is stranded cannot be waited for."""
    assert Stage(10, Share(2, 5), Share(3, 10)).capacity(WRITES) == 5
    stage = Stage(10, Share(2, 10), Share(3, 10))
    assert [stage.capacity(way) for way in (WRITES, READS)] == [7, 8]
    stage.allocate(READS, 2).strand()
    for eventually in (False, True):
        assert [stage.capacity(way, eventually) for way in (WRITES, READS)] == [7, 6]


def test_refused():
    """An empty lease is a mistake of the caller; shares that do not fit promise too much."""
    with pytest.raises(ValueError, match="0 pages"):
        Stage(8, *shares(8)).allocate(WRITES, 0)
    for wrong in (
        (Share(3, 4), Share(2, 4)),
        (Share(1, 5), Share(1, 4)),
        (Share(1, 4), Share(1, 5)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            Stage(4, *wrong)


@pytest.mark.hazard("staging-pages")
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
    """Room is what a lease gets, ceilings hold, and the books balance after any sequence. Returned
    twice, a page would be lent to two transfers at the same time."""
    found = Stage(pages, *shares(pages))
    leases = []
    for way, count, event in events:
        lease = leases[count % len(leases)] if leases else None
        if event == "allocate" or lease is None:
            if count <= found.capacity(way):
                leases.append(found.allocate(way, count))
            else:
                with pytest.raises(ValueError, match="cannot be allocated"):
                    found.allocate(way, count)
        elif event == "release":
            leases.remove(lease)
            lease.release()
            lease.release()
        elif event == "strand":
            lease.strand()
        elif len(lease.pages) > 1 and not lease.stranded:
            leases.append(lease.split(1))
        stranded = [lease for lease in leases if lease.stranded]
        assert found.stranded == sum(len(lease.pages) for lease in stranded)
        lent = [page for lease in leases for page in lease.pages]
        assert found.used() == len(lent) == len(set(lent))
        for way, share in found.shares.items():  # neither starves the other
            assert found.used(way) <= share.ceiling
            assert found.capacity(way) >= share.floor - found.used(way)
            assert found.capacity(way) <= found.capacity(way, True) <= share.ceiling
        assert stranded or all(
            found.capacity(way, True) == share.ceiling for way, share in found.shares.items()
        )
        check_books(found)

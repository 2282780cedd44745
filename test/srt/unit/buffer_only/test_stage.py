"""The stage's default size and its minimum, and its pages: leases that end once, and shares that
the other direction cannot take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from component.buffer_only.books import check_books
from sglang.srt.mem_cache.buffer_only import settings
from sglang.srt.mem_cache.buffer_only.settings import Share, shares
from sglang.srt.mem_cache.buffer_only.staging import Direction, StagingPool
from sglang.srt.patchset import staging_size
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
    """As many bytes for every model, at most the device pool and at least the minimum."""
    default = settings.default_pages(token_bytes * page, device_tokens // page, page, 256)
    assert default == pages


@pytest.mark.parametrize(("page", "threshold", "least"), [(16, 256, 32), (64, 256, 8), (64, 1, 2)])
def test_minimum(page: int, threshold: int, least: int):
    """Guards against a stage that stalls because a read and a write do not fit at the same time."""
    staging_size.check_staging_pages(least, page, threshold)
    with pytest.raises(ValueError, match=f"pages {least - 1} .*Use {PAGES}"):
        staging_size.check_staging_pages(least - 1, page, threshold)


@given(st.integers(1, 128), st.integers(1, 4096), st.integers(0, 5000))
def test_shares_hold_a_minimal_transfer(page: int, threshold: int, more: int):
    """The smallest hit that is fetched fits into the reads' floor in any accepted stage, and the
    ceilings leave the other direction its floor."""
    pages = staging_size.minimum_pages(page, threshold) + more
    write, read = shares(pages)
    assert read.floor >= staging_size.minimal_transfer(page, threshold) and write.floor >= 1
    assert write.ceiling + read.floor == read.ceiling + write.floor == pages


@pytest.mark.parametrize(
    ("page_bytes", "pages"), [(32 * KB, 128), (256 * KB, 128), (16 << 20, 2), (64 << 20, 1)]
)
def test_calls_are_sized_in_bytes(page_bytes: int, pages: int):
    """128 pages of a large model are gigabytes, more than a call transfers in its ten seconds."""
    assert settings.call_pages(page_bytes) == pages


# ---- staging pages ----


def test_floors_and_ceilings_bind_each_by_itself():
    """Shares that do not add up to the stage: each direction keeps its floor, and gets no more than
    its ceiling. Stranded pages count as lost."""
    assert StagingPool(10, Share(2, 5), Share(3, 10)).capacity(WRITES) == 5
    stage = StagingPool(10, Share(2, 10), Share(3, 10))
    assert [stage.capacity(way) for way in (WRITES, READS)] == [7, 8]
    stage.allocate(READS, 2).strand()
    for eventually in (False, True):
        assert [stage.capacity(way, eventually) for way in (WRITES, READS)] == [7, 6]


def test_refused():
    """Guards against an empty lease, and against shares that promise more than the stage has."""
    with pytest.raises(ValueError, match="0 pages"):
        StagingPool(8, *shares(8)).allocate(WRITES, 0)
    for wrong in (
        (Share(3, 4), Share(2, 4)),
        (Share(1, 5), Share(1, 4)),
        (Share(1, 4), Share(1, 5)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            StagingPool(4, *wrong)


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
    """Guards the capacity, the ceilings and the books after any sequence of calls. A page returned
    twice would be lent to two transfers at the same time."""
    stage = StagingPool(pages, *shares(pages))
    leases = []
    for way, count, event in events:
        lease = leases[count % len(leases)] if leases else None
        if event == "allocate" or lease is None:
            if count <= stage.capacity(way):
                leases.append(stage.allocate(way, count))
            else:
                with pytest.raises(ValueError, match="cannot be allocated"):
                    stage.allocate(way, count)
        elif event == "release":
            leases.remove(lease)
            lease.release()
            lease.release()
        elif event == "strand":
            lease.strand()
        elif len(lease.pages) > 1 and not lease.stranded:
            leases.append(lease.split(1))
        stranded = [lease for lease in leases if lease.stranded]
        assert stage.stranded == sum(len(lease.pages) for lease in stranded)
        lent = [page for lease in leases for page in lease.pages]
        assert stage.used() == len(lent) == len(set(lent))
        for way, share in stage.shares.items():  # neither starves the other
            assert stage.used(way) <= share.ceiling
            assert stage.capacity(way) >= share.floor - stage.used(way)
            assert stage.capacity(way) <= stage.capacity(way, True) <= share.ceiling
        assert stranded or all(
            stage.capacity(way, True) == share.ceiling for way, share in stage.shares.items()
        )
        check_books(stage)

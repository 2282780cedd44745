"""How large the stage is when nobody says so, and the smallest that is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.buffer_only import settings

KB = 1024


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
    settings.check_pages(least, page, threshold)
    with pytest.raises(ValueError) as error:
        settings.check_pages(least - 1, page, threshold)
    message = str(error.value)
    assert (
        f"{settings.PAGES_FLAG} {least - 1}" in message and f"Use {settings.PAGES_FLAG}" in message
    )


@given(st.integers(1, 128), st.integers(1, 4096), st.integers(0, 5000))
def test_shares_hold_a_minimal_transfer(page: int, threshold: int, more: int):
    """The smallest hit that is fetched fits into what reads are sure of, in any stage that is
    accepted; and the ceilings leave the other direction its floor."""
    pages = settings.minimum_pages(page, threshold) + more
    write, read = settings.shares(pages)
    assert read.floor >= settings.minimal_transfer(page, threshold) and write.floor >= 1
    assert write.ceiling + read.floor == read.ceiling + write.floor == pages


def test_tensor_pages():
    """SGLang indexes the page axis of page-first pools by layer number."""
    assert settings.physical_pages(8, 36) == 36 and settings.physical_pages(64, 36) == 64


@pytest.mark.parametrize(
    ("page_bytes", "pages"), [(32 * KB, 128), (256 * KB, 128), (16 << 20, 2), (64 << 20, 1)]
)
def test_calls_are_sized_in_bytes(page_bytes: int, pages: int):
    """128 pages of a large model are gigabytes, for which a call has ten seconds."""
    assert settings.call_pages(page_bytes) == pages

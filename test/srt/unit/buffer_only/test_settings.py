"""How large the stage is when nobody says so, and the smallest that is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.buffer_only import settings


@pytest.mark.hazard("wrong-gauges")
@pytest.mark.parametrize(
    ("chunk", "page", "threshold", "pages"),
    [
        (4096, 64, 256, 512),  # what the pull request's own measurements used
        (8192, 64, 256, 1024),
        (8192, 1, 256, 65536),
        (2048, 16, 256, 1024),
        (-1, 64, 256, 2048),  # not chunked
        (None, 64, 256, 2048),
        (100, 64, 256, 16),  # two pages a chunk
        (64, 64, 4096, 128),  # two minimal transfers are more than eight chunks
    ],
)
def test_default(chunk: int | None, page: int, threshold: int, pages: int):
    """Room for eight chunks, and never less than the minimum."""
    assert settings.default_pages(chunk, page, threshold) == pages


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


def test_minimum_of_a_size_in_gigabytes():
    """The same for a size that is given in bytes, by the flag that was given."""
    settings.check_size(1, 36, 64, 36)
    with pytest.raises(ValueError, match=f"{settings.SIZE_FLAG} 1 .* 35 pages .* at least 36"):
        settings.check_size(1, 35, 64, 36)


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

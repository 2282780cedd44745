"""Smallest staging buffer of ``buffer_only``: checked with the flags, and at its allocation."""

from __future__ import annotations

from sglang.srt.patchset.flags import PAGES, SIZE


def pages_of(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``tokens``, rounded up."""
    return -(-tokens // page_size)


def minimal_transfer(page_size: int, prefetch_threshold: int) -> int:
    """Return the pages of the smallest hit that is fetched (``prefetch_threshold`` in tokens)."""
    return max(1, pages_of(prefetch_threshold, page_size))


def minimum_pages(page_size: int, prefetch_threshold: int) -> int:
    """Return the pages of the smallest staging buffer: one minimal transfer in each direction."""
    return 2 * minimal_transfer(page_size, prefetch_threshold)


def check_staging_pages(pages: int, page_size: int, prefetch_threshold: int) -> None:
    """Raise ``ValueError`` for a staging buffer too small for a fetch during a write."""
    needed = minimum_pages(page_size, prefetch_threshold)
    if pages < needed:
        raise ValueError(
            f"{PAGES} {pages} is too small: with --page-size {page_size} and a prefetch "
            f"threshold of {prefetch_threshold} tokens the staging buffer needs at least {needed} "
            f"pages, for two minimal transfers. Use {PAGES} {needed} or more, or lower "
            "prefetch_threshold in --hicache-storage-backend-extra-config."
        )


def check_size(gigabytes: float, pages: int, page_size: int, needed: int) -> None:
    """Raise ``ValueError`` if the ``pages`` that ``gigabytes`` hold are fewer than ``needed``."""
    if pages < needed:
        raise ValueError(
            f"{SIZE} {gigabytes} is too small: it holds {pages} pages of --page-size "
            f"{page_size}, and the staging buffer needs at least {needed}. Use a larger "
            f"{SIZE}, or {PAGES} {needed} instead."
        )

"""The smallest staging buffer of ``buffer_only``: checked with the flags, and when it is made."""

from __future__ import annotations

from sglang.srt.patchset.flags import PAGES, SIZE


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens``, the last one perhaps not full."""
    return -(-tokens // page_size)


def minimal_transfer(page_size: int, prefetch_threshold: int) -> int:
    """Pages of the smallest hit that is fetched at all (``prefetch_threshold`` in tokens)."""
    return max(1, pages_of(prefetch_threshold, page_size))


def minimum_pages(page_size: int, prefetch_threshold: int) -> int:
    """The smallest stage: one minimal transfer in each direction at the same time."""
    return 2 * minimal_transfer(page_size, prefetch_threshold)


def check_pages(pages: int, page_size: int, prefetch_threshold: int) -> None:
    """Raise ``ValueError`` for a staging buffer in which nothing could be fetched while something
    is written."""
    needed = minimum_pages(page_size, prefetch_threshold)
    if pages < needed:
        raise ValueError(
            f"{PAGES} {pages} is too small: with --page-size {page_size} and a prefetch "
            f"threshold of {prefetch_threshold} tokens the staging buffer needs at least {needed} "
            f"pages, for two minimal transfers. Use {PAGES} {needed} or more, or lower "
            "prefetch_threshold in --hicache-storage-backend-extra-config."
        )


def check_size(gigabytes: float, pages: int, page_size: int, needed: int) -> None:
    """Raise ``ValueError`` where ``gigabytes`` hold ``pages``, which are fewer than ``needed``."""
    if pages < needed:
        raise ValueError(
            f"{SIZE} {gigabytes} is too small: it holds {pages} pages of --page-size "
            f"{page_size}, and the staging buffer needs at least {needed}. Use a larger "
            f"{SIZE}, or {PAGES} {needed} instead."
        )

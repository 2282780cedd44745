"""Sizes and limits of the mode: the number of staging pages, the share of each direction, and
timeouts. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang.srt.patchset import environment

PAGES_FLAG = "--hicache-buffer-pages"
SIZE_FLAG = "--hicache-size"

RATIO_FLAG = "--hicache-ratio"

#: SGLang's default for ``--hicache-ratio``. Sized for a cache, so that it counts as not given.
CACHE_RATIO = 2.0
# The default staging buffer holds the store's rate times the stay of a page, in each direction.
#: Bytes per second and rank: 100 Gbit/s.
STORE_RATE = 12.5e9
#: Seconds of a store call and of the wait for a batch.
STAY_S = 0.2

#: Maximum bytes of a store call, because a larger one would delay later calls and miss its
#: deadline: 32 MiB meet it from 4 MB/s on.
CALL_BYTES = 32 << 20
#: Maximum pages of a store call, for the same reason, and of a query.
BATCH_PAGES = 128


def call_pages(page_bytes: int) -> int:
    """Return the number of pages of ``page_bytes`` that one store call moves."""
    return max(1, min(BATCH_PAGES, CALL_BYTES // page_bytes))


@dataclass(frozen=True)
class Share:
    """Guaranteed and maximum number of pages of one direction."""

    floor: int
    ceiling: int


def pages_of(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``tokens``, rounded up."""
    return -(-tokens // page_size)


def minimal_transfer(page_size: int, prefetch_threshold: int) -> int:
    """Return the pages of the smallest hit that is fetched (``prefetch_threshold`` in tokens)."""
    return max(1, pages_of(prefetch_threshold, page_size))


def minimum_pages(page_size: int, prefetch_threshold: int) -> int:
    """Return the pages of the smallest staging buffer: one minimal transfer in each direction."""
    return 2 * minimal_transfer(page_size, prefetch_threshold)


def default_pages(
    page_bytes: float, device_pages: int, page_size: int, prefetch_threshold: int
) -> int:
    """Return the default number of staging pages: rate times stay for both directions, capped at
    the device pool's pages and at least the minimum."""
    pages = int(2 * STORE_RATE * STAY_S / page_bytes)
    return max(min(pages, device_pages), minimum_pages(page_size, prefetch_threshold))


def check_staging_pages(pages: int, page_size: int, prefetch_threshold: int) -> None:
    """Raise ``ValueError`` for a staging buffer too small for a fetch during a write."""
    needed = minimum_pages(page_size, prefetch_threshold)
    if pages < needed:
        raise ValueError(
            f"{PAGES_FLAG} {pages} is too small: with --page-size {page_size} and a prefetch "
            f"threshold of {prefetch_threshold} tokens the staging buffer needs at least {needed} "
            f"pages, for two minimal transfers. Use {PAGES_FLAG} {needed} or more, or lower "
            "prefetch_threshold in --hicache-storage-backend-extra-config."
        )


def check_size(gigabytes: float, pages: int, page_size: int, needed: int) -> None:
    """Raise ``ValueError`` if the ``pages`` that ``gigabytes`` hold are fewer than ``needed``."""
    if pages < needed:
        raise ValueError(
            f"{SIZE_FLAG} {gigabytes} is too small: it holds {pages} pages of --page-size "
            f"{page_size}, and the staging buffer needs at least {needed}. Use a larger "
            f"{SIZE_FLAG}, or {PAGES_FLAG} {needed} instead."
        )


def shares(pages: int) -> tuple[Share, Share]:
    """Return the shares of backups and prefetches in a staging buffer of ``pages``.

    Prefetches get more, because requests wait for them. Each ceiling leaves the other direction its
    floor, so that backups to a slow store cannot stop all prefetches, nor the reverse.
    """
    backup, prefetch = max(1, pages // 4), max(1, pages // 2)  # floors
    return Share(backup, pages - prefetch), Share(prefetch, pages - backup)


@dataclass(frozen=True)
class BufferSettings:
    """Settings of the mode: times in milliseconds of the agreed clock, sizes in tokens."""

    page_size: int
    prefetch_threshold: int
    #: "best_effort", "timeout" or "wait_complete" (--hicache-storage-prefetch-policy).
    policy: str = "wait_complete"
    #: Longest wait of a request for its prefetch, from the scheduler's first check of it.
    prefetch_timeout_ms: int = 10_000
    #: Longest wait under the policy "timeout": base plus a time per page.
    timeout_base_ms: float = 1_000.0
    timeout_page_ms: float = 4.0
    pass_prefix_keys: bool = False
    #: True if every hit is fetched, however slow the store is.
    always_fetch: bool = False
    #: Interval at which a path in use is queried in the store, which keeps it there.
    touch_ms: int = 10_000

    def timeout_ms(self, tokens: int) -> float:
        """Return the longest wait of a request for a prefetch of ``tokens`` tokens."""
        limit_ms = self.timeout_base_ms + tokens // self.page_size * self.timeout_page_ms
        return min(self.prefetch_timeout_ms, limit_ms if self.policy == "timeout" else math.inf)


@dataclass(frozen=True)
class StoreClientSettings:
    """Bounds of the calls of one store, by default those of ``SGLANG_HICACHE_STORE_DEADLINE``,
    ``_FIRST_RETRY`` and ``_LONGEST_RETRY``; durations in seconds.

    Raises:
        ValueError: a variable is not a number in range; the message names it.
    """

    deadline: float = field(default_factory=environment.STORE_DEADLINE.read)
    #: Maximum calls in flight, including overdue ones. A store that answers has at most ten: two
    #: queries, four reads, a write, a touch, the statistics and a clear.
    max_calls: int = 16
    first_retry: float = field(default_factory=environment.STORE_FIRST_RETRY.read)
    longest_retry: float = field(default_factory=environment.STORE_LONGEST_RETRY.read)

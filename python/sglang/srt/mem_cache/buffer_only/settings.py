"""Sizes and limits of the mode: the number of staging pages, the share of each direction, and
timeouts. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang.srt.patchset import environment
from sglang.srt.patchset.staging_size import minimum_pages

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


def default_pages(
    page_bytes: float, device_pages: int, page_size: int, prefetch_threshold: int
) -> int:
    """Return the default number of staging pages: rate times stay for both directions, capped at
    the device pool's pages and at least the minimum."""
    pages = int(2 * STORE_RATE * STAY_S / page_bytes)
    return max(min(pages, device_pages), minimum_pages(page_size, prefetch_threshold))


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
    """Bounds of the calls of one store; durations in seconds.

    Raises:
        ValueError: ``SGLANG_HICACHE_STORE_DEADLINE`` is no number in range; the message names it.
    """

    deadline: float = field(default_factory=environment.STORE_DEADLINE.read)
    #: Maximum calls in flight, including overdue ones. A store that answers has at most ten: two
    #: queries, four reads, a write, a touch, the statistics and a clear.
    max_calls: int = 16
    #: A store that is down is probed after this time, then after twice that, and so on. A probe
    #: that hangs keeps a thread: without a pause each step of the scheduler would start one.
    first_retry: float = 1.0
    #: At most so long: a store that is well again is used within a minute.
    longest_retry: float = 60.0

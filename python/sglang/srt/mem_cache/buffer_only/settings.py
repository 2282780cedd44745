"""Sizes and limits of the mode: how many staging pages there are, how the two directions share them
(pure arithmetic), and how long anybody waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang.srt.patchset import environment
from sglang.srt.patchset.stage_size import minimum_pages

#: The default stage holds what a store delivers (bytes a second of a rank: 100 Gbit/s) while pages
#: stay in it (seconds: the call, and the wait for a batch), and as much on the way to the store.
STORE_RATE, STAY_S = 12.5e9, 0.2


#: Bytes and pages of one call of the store. A call that moves more takes longer than others can
#: wait, and in the end longer than its deadline: this much is in time from 4 MB/s on.
CALL_BYTES, BATCH_PAGES = 32 << 20, 128


def call_pages(page_bytes: int) -> int:
    """Pages of ``page_bytes`` that one call of the store moves."""
    return max(1, min(BATCH_PAGES, CALL_BYTES // page_bytes))


@dataclass(frozen=True)
class Share:
    """What one direction is sure of, and what it may take at most, in pages."""

    floor: int
    ceiling: int


def default_pages(
    page_bytes: float, device_pages: int, page_size: int, prefetch_threshold: int
) -> int:
    """The store's rate times how long a page stays, in both directions; no more than the device
    pool, which is all that the staging buffer could ever be asked for, and no less than the
    minimum."""
    wanted = int(2 * STORE_RATE * STAY_S / page_bytes)
    return max(min(wanted, device_pages), minimum_pages(page_size, prefetch_threshold))


def shares(pages: int) -> tuple[Share, Share]:
    """The shares of backups and of prefetches in a stage of ``pages``.

    Prefetches get more, because a request waits for them. Each direction's ceiling leaves the other
    its floor, so that neither starves: a slow store cannot fill the staging buffer with backups and
    stop all prefetches, nor the reverse.
    """
    backup, prefetch = max(1, pages // 4), max(1, pages // 2)  # floors
    return Share(backup, pages - prefetch), Share(prefetch, pages - backup)


@dataclass(frozen=True)
class Settings:
    """All times in milliseconds of the agreed clock; sizes in tokens and pages."""

    page_size: int
    prefetch_threshold: int
    #: "best_effort", "timeout" or "wait_complete" (--hicache-storage-prefetch-policy).
    policy: str = "wait_complete"
    #: Longest wait of a request for its prefetch, from when the scheduler first looked at it.
    prefetch_timeout_ms: int = 10_000
    #: Under the policy "timeout", this and so much for each page instead.
    timeout_base_ms: float = 1_000.0
    timeout_page_ms: float = 4.0
    pass_prefix_keys: bool = False
    #: Fetch every hit, however slow the store is.
    always_fetch: bool = False
    #: A path in use is looked up in the store once in so long, which keeps it there.
    touch_ms: int = 10_000

    def timeout_ms(self, tokens: int) -> float:
        """How long a request waits for a prefetch of ``tokens`` tokens."""
        limit_ms = self.timeout_base_ms + tokens // self.page_size * self.timeout_page_ms
        return min(self.prefetch_timeout_ms, limit_ms if self.policy == "timeout" else math.inf)


@dataclass(frozen=True)
class StoreClientSettings:
    """Bounds of the calls of one store; durations in seconds.

    Raises:
        ValueError: ``SGLANG_HICACHE_STORE_DEADLINE`` is no such number; the message names it.
    """

    deadline: float = field(default_factory=environment.STORE_DEADLINE.read)
    #: Largest number of calls under way, including those that were given up. A store that answers
    #: has at most ten: two queries, four reads, a write, a touch, the statistics and a clear.
    max_calls: int = 16
    #: A store that is down is probed after this time, then after twice that, and so on. A probe
    #: that hangs keeps a thread: without a pause each step of the scheduler would start one.
    first_retry: float = 1.0
    #: At most so long: a store that is well again is used within a minute.
    longest_retry: float = 60.0

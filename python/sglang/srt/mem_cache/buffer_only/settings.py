"""Limits of the buffer-only mode: where they come from, and what they are."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.disaggregation.delta.config import env_seconds

READ_ENV = "SGLANG_HICACHE_BUFFER_READ_TIMEOUT"

#: Part of the device pool that prefetches may keep from eviction, by anchors and fetched prefixes.
PINNED_SHARE = 0.5
#: A pending-write queue holds so many times the device pool, in tokens.
QUEUE_POOLS = 2


@dataclass(frozen=True)
class Settings:
    """All times in milliseconds of the agreed clock; sizes in tokens and pages."""

    page_size: int
    prefetch_threshold: int
    device_tokens: int
    #: "best_effort", "timeout" or "wait_complete" (--hicache-storage-prefetch-policy).
    policy: str = "wait_complete"
    #: Longest wait of a request for its prefetch, from when the scheduler first looked at it.
    read_ms: int = 10_000
    #: Under the policy "timeout", this and so much for each page instead.
    timeout_base_ms: float = 1_000.0
    timeout_page_ms: float = 4.0
    #: A fetched prefix is kept from eviction for its request so long, at most.
    claim_ms: int = 10_000
    pass_prefix_keys: bool = False

    @property
    def pinned_tokens(self) -> int:
        """Most tokens that prefetches may pin."""
        return int(self.device_tokens * PINNED_SHARE)

    @property
    def queue_tokens(self) -> int:
        """Most tokens that may wait to be written."""
        return self.device_tokens * QUEUE_POOLS

    def patience_ms(self, pages: int) -> float:
        """How long a request waits for the read of ``pages`` pages."""
        if self.policy == "timeout":
            return min(self.read_ms, self.timeout_base_ms + pages * self.timeout_page_ms)
        return self.read_ms


def read_timeout_ms() -> int:
    """The longest wait of a request for its prefetch, from the environment.

    Raises:
        ValueError: the variable is no duration; the message names it.
    """
    return int(env_seconds(READ_ENV, 10.0) * 1000)

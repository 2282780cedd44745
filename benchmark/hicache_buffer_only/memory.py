"""How the same host memory is split in both arms. Pure arithmetic, in pages of KV."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Host memory of one arm; each worker has its pool and gives its segment to the store."""

    pool_pages: int
    """Pages of a worker's host pool or staging buffer: pinned, of no use to another worker."""
    segment_pages: int
    """Pages of a worker's part of the store, which every worker reads."""
    page_bytes: int
    workers: int

    @property
    def segment_bytes(self) -> int:
        return self.segment_pages * self.page_bytes

    @property
    def pinned_bytes(self) -> int:
        """Of all workers' pools."""
        return self.workers * self.pool_pages * self.page_bytes

    @property
    def store_bytes(self) -> int:
        """Of the whole store."""
        return self.workers * self.segment_bytes

    @property
    def total_bytes(self) -> int:
        return self.pinned_bytes + self.store_bytes


@dataclass(frozen=True)
class Split:
    """Shares as in the comparison of sglang#20535: host pools of twice the device pool, and a store
    of 224 GB beside 856 GB of pools."""

    ratio: float = 2.0
    """Host pool over device pool in the cache arm (``--hicache-ratio``); more than 1."""
    store_share: float = 0.26
    """Store over host pools in the cache arm."""
    stage_share: float = 0.05
    """Stage over host pool."""
    small_ratio: float = 1.05
    """``ratio`` in the arm whose host pools are as small as SGLang lets them be."""

    def cache(self, device_tokens: int, page_size: int, page_bytes: int, workers: int) -> Memory:
        """SGLang's own mode."""
        pool = int(device_tokens * self.ratio) // page_size + 1  # SGLang always adds a page
        return Memory(pool, int(pool * self.store_share), page_bytes, workers)

    def small_cache(self, cache: Memory, device_tokens: int, page_size: int) -> Memory:
        """SGLang's own mode with the same memory, as much of it as possible in the store."""
        return self._moved(cache, int(device_tokens * self.small_ratio) // page_size + 1)

    def buffer_only(self, cache: Memory) -> Memory:
        """The same memory: what the staging buffer does not need goes to the store."""
        stage = int(cache.pool_pages * self.stage_share)
        if stage < 2:
            raise ValueError(
                f"a staging buffer of {self.stage_share:.0%} of {cache.pool_pages} pages is too "
                "small: use a larger --device-tokens or --stage-share"
            )
        return self._moved(cache, stage)

    @staticmethod
    def _moved(cache: Memory, pool_pages: int) -> Memory:
        segment = cache.segment_pages + cache.pool_pages - pool_pages
        return Memory(pool_pages, segment, cache.page_bytes, cache.workers)

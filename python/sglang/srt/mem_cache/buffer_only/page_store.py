"""Pages in and out of the store, on the lanes' threads: leading good pages, whatever happens.

The store is guarded (``store_client``): it neither raises nor hangs, and a call that was given
up says when it has let go of its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.lanes import Job
    from sglang.srt.mem_cache.buffer_only.store_client import Outcome, StoreGuard

#: Pages in one call of the store, as in SGLang's own controller.
BATCH_PAGES = 128


class PageStore:
    """One guarded store.

    ``prefix_keys``, where given, are the keys of all pages before the first one, for backends that
    place a page by them.
    """

    def __init__(self, guard: StoreGuard, page_size: int, batch_pages: int = BATCH_PAGES) -> None:
        self.guard = guard
        self._page_size, self._batch_pages = page_size, batch_pages

    def leading_hits(self, keys: Sequence[str], prefix_keys: Sequence[str] | None, job: Job) -> int:
        """How many of ``keys`` are in the store, up to the first that is not."""
        return self._by_batches(self.guard.query, keys, prefix_keys, job)

    def fetch(
        self, keys: Sequence[str], slots: torch.Tensor, prefix_keys: Sequence[str] | None, job: Job
    ) -> int:
        """Read pages into the host slots ``slots``, a page after the other; leading pages read."""
        return self._by_batches(self.guard.read, keys, prefix_keys, job, slots)

    def save(
        self, keys: Sequence[str], slots: torch.Tensor, prefix_keys: Sequence[str] | None, job: Job
    ) -> int:
        """Write pages from the host slots ``slots``; leading pages that are durable."""
        return self._by_batches(self.guard.write, keys, prefix_keys, job, slots)

    def _by_batches(
        self,
        call: Callable[..., Outcome],
        keys: Sequence[str],
        prefix_keys: Sequence[str] | None,
        job: Job,
        slots: torch.Tensor | None = None,
    ) -> int:
        """Call the store batch by batch, until one is not wholly good or nobody wants more."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        done = 0
        while done < len(keys) and not job.cancelled:
            batch = list(keys[done : done + self._batch_pages])
            # A list of its own for each call: backends are known to extend what they are given.
            before = None if prefix_keys is None else [*prefix_keys, *keys[:done]]
            arguments: list[Any] = [batch]
            if slots is not None:
                page = self._page_size
                arguments.append(slots[done * page : (done + len(batch)) * page])
            outcome = call(*arguments, HiCacheStorageExtraInfo(prefix_keys=before))
            done += outcome.pages
            if outcome.busy is not None:
                job.given_up.append(outcome.busy.returned)
            if outcome.pages < len(batch):
                job.fault = None if outcome.fault is None else outcome.fault.value
                break
        return done


class FlatStore:
    """The ``_v1`` calls on a backend that has only the older ones, which move flat pages."""

    def __init__(self, backend: Any, host_pool: Any) -> None:
        self._backend = backend
        self._pool = host_pool

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """As the backend's."""
        found: int = self._backend.batch_exists(keys, extra_info)
        return found

    def batch_get_v1(self, keys: list[str], slots: torch.Tensor, extra_info: Any) -> list[bool]:
        """Read a page after the other, up to the first that is not there."""
        good = [False] * len(keys)
        for at, key in enumerate(keys):
            room = self._pool.get_dummy_flat_data_page()
            pages = self._backend.batch_get([key], [room])
            if not pages or pages[0] is None:
                break
            self._pool.set_from_flat_data_page(self._slot(slots, at), pages[0])
            good[at] = True
        return good

    def batch_set_v1(self, keys: list[str], slots: torch.Tensor, extra_info: Any) -> list[bool]:
        """Write a page after the other, up to the first that fails."""
        good = [False] * len(keys)
        for at, key in enumerate(keys):
            if not self._backend.batch_set(
                [key], [self._pool.get_data_page(self._slot(slots, at))]
            ):
                break
            good[at] = True
        return good

    def get_stats(self) -> Any:
        """As the backend's."""
        return self._backend.get_stats()

    def clear(self) -> None:
        """As the backend's."""
        self._backend.clear()

    def close(self) -> None:
        """As the backend's, where it has one."""
        if hasattr(self._backend, "close"):
            self._backend.close()

    def _slot(self, slots: torch.Tensor, page: int) -> int:
        return int(slots[page * self._pool.page_size])

"""Mixins for SGLang's host pools and its ``HiCacheController``, which make a staging buffer of
them.

SGLang demands a host pool larger than the device pool, which is right for a cache and not for a
staging buffer. The size is given by :func:`staging_buffer` around the construction; elsewhere the
classes are the stock ones. Besides, a mixin for the device pool of sparse attention, which waits
for what is loaded of its index.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any  # Any: what SGLang's pools have and answer

from typing_extensions import override

from sglang.srt.mem_cache.buffer_only.settings import (
    CACHE_RATIO,
    check_size,
    default_pages,
    physical_pages,
)
from sglang.srt.patchset.args import prefetch_threshold

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.memory_pool import KVCache, NSATokenToKVPool
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache as _Pool
    from sglang.srt.server_args import ServerArgs

else:
    _Pool = object
    HiCacheController = object
    NSATokenToKVPool = object

logger = logging.getLogger(__name__)


#: Size of the staging buffer that is built now, in pages or, if these are 0, in gigabytes; None
#: where what is built belongs to no staging buffer.
_WANTED: ContextVar[tuple[int, float] | None] = ContextVar("size of the pool", default=None)


@contextmanager
def staging_buffer(pages: int = 0, gigabytes: float = 0) -> Iterator[None]:
    """Host pools that are built inside have so many pages, or so much memory in units of 10**9
    bytes."""
    token = _WANTED.set((pages, gigabytes))
    try:
        yield
    finally:
        _WANTED.reset(token)


def chosen_pages(device_pool: KVCache, page_size: int, args: ServerArgs) -> int:
    """Pages of the staging buffer of ``device_pool`` by the server's arguments; 0 where
    ``--hicache-size`` says it in gigabytes.

    ``--hicache-buffer-pages`` comes first, then ``--hicache-size``, then a ``--hicache-ratio`` of
    its own, as part of the device pool.
    """
    pages: int | None = args.hicache_buffer_pages
    if pages is not None or args.hicache_size > 0:
        return pages or 0
    device_pages = device_pool.size // page_size
    if args.hicache_ratio != CACHE_RATIO:
        return int(args.hicache_ratio * device_pages)
    found = device_pool.get_kv_size_bytes()
    pool_bytes = sum(found) if isinstance(found, tuple) else found
    threshold = prefetch_threshold(args.hicache_storage_backend_extra_config)
    page_bytes = pool_bytes / device_pool.size * page_size
    return default_pages(page_bytes, device_pages, page_size, threshold)


class _Sized:
    """A device pool that claims another size: SGLang derives the host pool's size from it."""

    def __init__(self, pool: KVCache, size: int) -> None:
        self._pool = pool
        self.size = size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _sized(
    pool: KVCache, page_size: int, ratio: float, gigabytes: float
) -> tuple[KVCache | _Sized, float, float]:
    """``pool``, or a view of it, with a ratio and a size from which SGLang computes the wanted
    number of host pages."""
    wanted = _WANTED.get()
    if wanted is None:
        return pool, ratio, gigabytes
    pages, gigabytes = wanted
    if gigabytes:  # SGLang knows the bytes of a token, and demands more than a device pool
        return _Sized(pool, 0), ratio, gigabytes
    # One page less: SGLang always adds one, and so its size check is met as well.
    return _Sized(pool, (physical_pages(pages, pool.layer_num) - 1) * page_size), 1.0, 0


def _finish(host: HostKVCache, device_pool: KVCache) -> None:
    wanted = _WANTED.get()
    if wanted is None:
        return
    host.device_pool = device_pool
    host.is_stage = True  # storage backends look at it
    logger.info(
        "HiCache host memory is a staging buffer of %d pages of %d tokens (%.1f MB of host "
        "memory; the device pool has %d tokens)",
        wanted[0] or host.page_num,
        host.page_size,
        host.size * host.size_per_token / 1e6,
        device_pool.size,
    )


class _StagePool(_Pool):
    """What host pools of every kind have in common."""

    #: Pages of the staging buffer that are in use, asked of its owner; None where the pool is no
    #: staging buffer.
    used_pages: Callable[[], int] | None = None

    @override
    def init_kv_buffer(self) -> Any:
        wanted = _WANTED.get()
        if wanted is not None and wanted[1]:
            # Before memory is taken: the page-first layouts want at least a page a layer.
            needed = physical_pages(1, self.layer_num)
            check_size(wanted[1], self.page_num, self.page_size, needed)
        return super().init_kv_buffer()

    @override
    def available_size(self) -> int:
        if self.used_pages is None:
            return int(super().available_size())
        return int(self.size - self.used_pages() * self.page_size)


class StagePoolMHA(_StagePool):
    """For ``MHATokenToKVPoolHost``."""

    @override
    def __init__(
        self, device_pool: KVCache, host_to_device_ratio: float, host_size: int, page_size: int,
        layout: str, pin_memory: bool = True, device: str = "cpu", allocator_type: str = "default",
    ) -> None:  # fmt: skip
        super().__init__(
            *_sized(device_pool, page_size, host_to_device_ratio, host_size), page_size, layout,
            pin_memory, device, allocator_type,
        )  # fmt: skip
        _finish(self, device_pool)


class StagePoolNSA(StagePoolMHA):
    """For ``NSATokenToKVPoolHost``, which has the same arguments."""


class StagePoolMLA(_StagePool):
    """For ``MLATokenToKVPoolHost``."""

    @override
    def __init__(
        self, device_pool: KVCache, host_to_device_ratio: float, host_size: int, page_size: int,
        layout: str, pin_memory: bool = True, device: str = "cpu", allocator_type: str = "default",
        override_kv_cache_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            *_sized(device_pool, page_size, host_to_device_ratio, host_size), page_size, layout,
            pin_memory, device, allocator_type, override_kv_cache_dim,
        )  # fmt: skip
        _finish(self, device_pool)


class StageController(HiCacheController):
    """Stock unless it is built inside :func:`staging_buffer`."""

    #: Whether the host pool is a staging buffer.
    staging: bool = False

    @override
    def _start_storage_threads(self) -> None:
        # Called first by the constructor; the mode of a controller does not change after that.
        self.staging = self.staging or _WANTED.get() is not None
        if not self.staging:
            super()._start_storage_threads()
            return
        # Others look at their lengths.
        self.prefetch_queue: queue.Queue[object] = queue.Queue()
        self.backup_queue: queue.Queue[object] = queue.Queue()
        self.prefetch_revoke_queue: queue.Queue[object] = queue.Queue()
        self.ack_backup_queue: queue.Queue[object] = queue.Queue()
        self.host_mem_release_queue: queue.Queue[object] = queue.Queue()

    @override
    def reset(self) -> None:
        # A staging buffer has no threads to stop, and the pipelines have seen to the copies before.
        if not self.staging:
            super().reset()


class LoadedIndexPool(NSATokenToKVPool):
    """For ``NSATokenToKVPool``: the index of sparse attention is loaded before it is read. Stock
    where nothing is loaded from host memory."""

    @override
    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        # A layer stores its new tokens, and then selects among all. SGLang waits for what is loaded
        # of the layer where a fused kernel stores them, and nowhere where that cannot be built.
        self.get_index_k_with_scale_buffer(layer_id)
        super().set_index_k_scale_buffer(layer_id, loc, index_k, index_k_scale)

"""Host pools of a few pages: mixins for the pools that SGLang's ``HiRadixCache`` builds.

SGLang demands a host pool larger than the device pool, which is right for a cache and not for a
stage. The size is given by :func:`of_pages` around the construction; elsewhere the pools are the
stock ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.mem_cache.buffer_only.sizing import physical_pages

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache as _Pool
else:
    _Pool = object

logger = logging.getLogger(__name__)

_PAGES: ContextVar[int | None] = ContextVar("staging pages of the pool that is built", default=None)


@contextmanager
def of_pages(pages: int) -> Iterator[None]:
    """Host pools that are built inside have so many pages."""
    token = _PAGES.set(pages)
    try:
        yield
    finally:
        _PAGES.reset(token)


def staging() -> bool:
    """Whether what is built now belongs to a stage."""
    return _PAGES.get() is not None


class _Sized:
    """A device pool that claims another size: SGLang derives the host pool's size from it."""

    def __init__(self, pool: Any, size: int) -> None:
        self._pool = pool
        self.size = size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _sized(pool: Any, page_size: int) -> Any:
    """``pool``, or a view of it from which SGLang computes the wanted number of host pages."""
    pages = _PAGES.get()
    if pages is None:
        return pool
    # One page less: SGLang always adds one, and so its size check is met as well.
    return _Sized(pool, (physical_pages(pages, pool.layer_num) - 1) * page_size)


def _finish(host: Any, device_pool: Any) -> None:
    pages = _PAGES.get()
    if pages is None:
        return
    host.device_pool = device_pool
    host.is_stage = True  # storage backends look at it
    logger.info(
        "HiCache host memory is a stage of %d pages of %d tokens (%.1f MB of host memory; "
        "the device pool has %d tokens)",
        pages,
        host.page_size,
        host.size * host.size_per_token / 1e6,
        device_pool.size,
    )


class StagePoolMHA(_Pool):
    """For ``MHATokenToKVPoolHost``."""

    @override
    def __init__(
        self, device_pool: Any, host_to_device_ratio: float, host_size: int, page_size: int,
        layout: str, pin_memory: bool = True, device: str = "cpu", allocator_type: str = "default",
    ) -> None:  # fmt: skip
        pool = _sized(device_pool, page_size)
        if pool is not device_pool:
            host_to_device_ratio, host_size = 1.0, 0
        super().__init__(
            pool, host_to_device_ratio, host_size, page_size, layout, pin_memory, device,
            allocator_type,
        )  # fmt: skip
        _finish(self, device_pool)


class StagePoolNSA(StagePoolMHA):
    """For ``NSATokenToKVPoolHost``, which has the same arguments."""


class StagePoolMLA(_Pool):
    """For ``MLATokenToKVPoolHost``."""

    @override
    def __init__(
        self, device_pool: Any, host_to_device_ratio: float, host_size: int, page_size: int,
        layout: str, pin_memory: bool = True, device: str = "cpu", allocator_type: str = "default",
        override_kv_cache_dim: int | None = None,
    ) -> None:  # fmt: skip
        pool = _sized(device_pool, page_size)
        if pool is not device_pool:
            host_to_device_ratio, host_size = 1.0, 0
        super().__init__(
            pool, host_to_device_ratio, host_size, page_size, layout, pin_memory, device,
            allocator_type, override_kv_cache_dim,
        )  # fmt: skip
        _finish(self, device_pool)

"""SGLang's host pools as a staging buffer: its size, and the parts of a page.

SGLang requires a host pool larger than the device pool, which fits a cache but not a staging
buffer. :func:`staging_buffer` sets the size of the pools built inside it; all other pools are
stock. ``LoadedIndexPool`` makes the device pool of sparse attention wait for its loaded index.

A *part* is one tensor of the host pool viewed as pages (keys, values, a latent, an index), or
several tensors concatenated. A store keeps one part under one key, as a *value*. A page's values
have a fixed order, and all lists here are page by page: all values of the first page, then those of
the next. A page exists only if all its values do, and only leading pages count, because KV after a
gap is unusable.

Contract: ``_WANTED`` is set only while a pool is built, on the thread that builds it. Everything
else here is stateless; the pages' memory is shared with the store's threads (``staging``).
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: attributes and results of SGLang's pools

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only.settings import default_pages
from sglang.srt.patchset.args import prefetch_threshold
from sglang.srt.patchset.flags import CACHE_RATIO
from sglang.srt.patchset.staging_size import check_size

if TYPE_CHECKING:
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


#: Size of the staging buffer being built, in pages or, if these are 0, in gigabytes; None outside
#: of :func:`staging_buffer`.
_WANTED: ContextVar[tuple[int, float] | None] = ContextVar("size of the pool", default=None)


@contextmanager
def staging_buffer(pages: int = 0, gigabytes: float = 0) -> Iterator[None]:
    """Build host pools inside with ``pages`` pages, or with ``gigabytes`` * 10**9 bytes."""
    token = _WANTED.set((pages, gigabytes))
    try:
        yield
    finally:
        _WANTED.reset(token)


def chosen_pages(device_pool: KVCache, page_size: int, args: ServerArgs) -> int:
    """Return the pages of the staging buffer of ``device_pool`` by the server's arguments; 0 if
    ``--hicache-size`` gives it in gigabytes.

    Precedence: ``--hicache-buffer-pages``, ``--hicache-size``, a non-default ``--hicache-ratio`` of
    the device pool, the computed default.
    """
    pages: int | None = args.hicache_buffer_pages
    if pages is not None or args.hicache_size > 0:
        return pages or 0
    device_pages = device_pool.size // page_size
    if args.hicache_ratio != CACHE_RATIO:
        return int(args.hicache_ratio * device_pages)
    kv_bytes = device_pool.get_kv_size_bytes()
    pool_bytes = sum(kv_bytes) if isinstance(kv_bytes, tuple) else kv_bytes
    threshold = prefetch_threshold(args.hicache_storage_backend_extra_config)
    page_bytes = pool_bytes / device_pool.size * page_size
    return default_pages(page_bytes, device_pages, page_size, threshold)


class _Sized:
    """View of a device pool with another size, from which SGLang derives the host pool's size."""

    def __init__(self, pool: KVCache, size: int) -> None:
        self._pool = pool
        self.size = size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _sized(
    pool: KVCache, page_size: int, ratio: float, gigabytes: float
) -> tuple[KVCache | _Sized, float, float]:
    """Return the device pool (or a view of it), ratio and size from which SGLang computes the
    number of host pages."""
    size = _WANTED.get()
    if size is None:
        return pool, ratio, gigabytes
    pages, gigabytes = size
    if gigabytes:  # SGLang computes the pages; a device size of 0 passes its size check
        return _Sized(pool, 0), ratio, gigabytes
    # At least a page per layer, because SGLang's page-first layouts index the page axis by layer
    # number. Minus one page, because SGLang adds one; this also passes its size check.
    return _Sized(pool, (max(pages, pool.layer_num) - 1) * page_size), 1.0, 0


def _finish(host: HostKVCache, device_pool: KVCache) -> None:
    size = _WANTED.get()
    if size is None:
        return
    host.device_pool = device_pool
    host.is_staging = True  # read by the storage backends
    logger.info(
        "HiCache host memory is a staging buffer of %d pages of %d tokens (%.1f MB of host "
        "memory; the device pool has %d tokens)",
        size[0] or host.page_num,
        host.page_size,
        host.size * host.size_per_token / 1e6,
        device_pool.size,
    )


class _StagingHostPool(_Pool):
    """Base of the mixins for all kinds of host pools."""

    #: Returns the pages in use of the staging buffer; None if the pool is not one.
    used_pages: Callable[[], int] | None = None

    @override
    def init_kv_buffer(self) -> Any:
        size = _WANTED.get()
        if size is not None and size[1]:
            # Before the allocation, because page-first layouts need at least a page per layer.
            check_size(size[1], self.page_num, self.page_size, self.layer_num)
        return super().init_kv_buffer()

    @override
    def available_size(self) -> int:
        if self.used_pages is None:
            return int(super().available_size())
        return int(self.size - self.used_pages() * self.page_size)


class StagingHostPoolMHA(_StagingHostPool):
    """Mixin for ``MHATokenToKVPoolHost``."""

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


class StagingHostPoolNSA(StagingHostPoolMHA):
    """Mixin for ``NSATokenToKVPoolHost``, which has the same arguments."""


class StagingHostPoolMLA(_StagingHostPool):
    """Mixin for ``MLATokenToKVPoolHost``."""

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


class StagingController(HiCacheController):
    """Controller mixin. Stock unless built inside :func:`staging_buffer`."""

    #: True if the host pool is a staging buffer.
    staging: bool = False

    @override
    def _start_storage_threads(self) -> None:
        # The constructor calls this first; the mode does not change afterwards.
        self.staging = self.staging or _WANTED.get() is not None
        if not self.staging:
            super()._start_storage_threads()
            return
        # Never filled; SGLang reads their lengths.
        self.prefetch_queue: queue.Queue[object] = queue.Queue()
        self.backup_queue: queue.Queue[object] = queue.Queue()
        self.prefetch_revoke_queue: queue.Queue[object] = queue.Queue()
        self.ack_backup_queue: queue.Queue[object] = queue.Queue()
        self.host_mem_release_queue: queue.Queue[object] = queue.Queue()

    @override
    def reset(self) -> None:
        # A staging buffer has no threads to stop, and the pipelines have ended the copies before.
        if not self.staging:
            super().reset()


class LoadedIndexPool(NSATokenToKVPool):
    """Mixin for ``NSATokenToKVPool`` that waits for the loaded index of sparse attention before it
    is read. Stock if nothing is loaded from host memory."""

    @override
    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        # A layer stores its new tokens and then selects among all. SGLang waits for the load only
        # in its fused store kernel, not in the path used where that kernel cannot be built.
        self.get_index_k_with_scale_buffer(layer_id)
        super().set_index_k_scale_buffer(layer_id, loc, index_k, index_k_scale)


# ---- parts of a page ----

#: Layouts whose rows are pages; in the other layouts rows are slots.
_PAGE_ROWS = ("page_first_direct", "page_head")
_LAYOUTS = ("layer_first", "page_first", *_PAGE_ROWS)


@dataclass(frozen=True)
class PagePart:
    """One tensor, or several, of every page of a host pool."""

    #: Name in SGLang's keys: "k" and "v", also "k" for a latent; "index" for NSA's index; "" for a
    #: flat page.
    label: str
    #: Views of the pool's memory, uint8, (pages, bytes): one per tensor, in layer_first one per
    #: layer.
    pieces: tuple[torch.Tensor, ...]
    #: True if all tensor parallel ranks hold the same: the key has no rank, and one rank writes.
    shared: bool = False
    #: True if SGLang's own keys and flat pages lack it.
    extra: bool = False
    #: Group of KV heads, if the heads of a rank are stored in groups.
    group: int = 0

    @property
    def size(self) -> int:
        """Bytes of one page."""
        return sum(piece.shape[1] for piece in self.pieces)

    @property
    def in_place(self) -> bool:
        """True if it is contiguous, so that a store can use the pool's memory directly."""
        return len(self.pieces) == 1

    def gather(self, page: int) -> torch.Tensor:
        """Return the bytes of ``page``, 1-D uint8: a copy unless ``in_place``."""
        rows = [piece[page] for piece in self.pieces]
        return rows[0] if self.in_place else torch.cat(rows)

    def scatter(self, page: int, content: torch.Tensor) -> None:
        """Write ``content``, 1-D uint8 of ``size`` bytes, into ``page``."""
        offset = 0
        for piece in self.pieces:
            width = piece.shape[1]
            piece[page].copy_(content[offset : offset + width])
            offset += width


# ---- parts of a pool ----


def describe(pool: HostKVCache, groups: int = 1) -> tuple[PagePart, ...]:
    """Return the parts of a page in one of SGLang's host pools, in storage order.

    Args:
        pool: ``MHATokenToKVPoolHost``, ``MLATokenToKVPoolHost`` or ``NSATokenToKVPoolHost``.
        groups: number of head groups into which K and V are split; needs the layout ``page_head``.

    Raises:
        ValueError: unknown pool class or layout.
    """
    from sglang.srt.mem_cache import memory_pool_host as pools

    if isinstance(pool, pools.NSATokenToKVPoolHost):
        latent = PagePart("k", _rows(pool, pool.kv_buffer), shared=True)
        index = _rows(pool, pool.index_k_with_scale_buffer, by_page=True)
        return (latent, PagePart("index", index, shared=True, extra=True))
    if isinstance(pool, pools.MLATokenToKVPoolHost):
        return (PagePart("k", _rows(pool, pool.kv_buffer), shared=True),)
    if not isinstance(pool, pools.MHATokenToKVPoolHost):
        raise ValueError(f"the parts of a page of {type(pool).__name__} are not known")
    sides = [("k", _rows(pool, pool.kv_buffer[0])), ("v", _rows(pool, pool.kv_buffer[1]))]
    if groups == 1:
        return tuple(PagePart(label, rows) for label, rows in sides)
    if pool.layout != "page_head" or pool.head_num % groups:
        raise ValueError(
            f"{pool.head_num} heads in layout {pool.layout} cannot be stored in {groups} groups: "
            "this needs --hicache-mem-layout page_head"
        )
    return tuple(
        PagePart(label, (rows[0].view(len(rows[0]), groups, -1)[:, group],), group=group)
        for group in range(groups)
        for label, rows in sides
    )


def tensors(pool: HostKVCache) -> list[torch.Tensor]:
    """Return all host tensors of a pool, each contiguous, which a store has to register."""
    index = getattr(pool, "index_k_with_scale_buffer", [])
    return [pool.kv_buffer, *([index] if isinstance(index, torch.Tensor) else index)]


def _rows(
    pool: HostKVCache, buffer: torch.Tensor | Sequence[torch.Tensor], by_page: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return views of a buffer as (pages, bytes): one if a page is contiguous, else one per layer.

    ``by_page``: the buffer's rows are pages in every layout, as in NSA's index.
    """
    layout, page_size = pool.layout, pool.page_size
    if layout not in _LAYOUTS:
        raise ValueError(f"pages of layout {layout} are not known (--hicache-mem-layout)")
    buffers: list[torch.Tensor] = list(buffer) if layout == "layer_first" else [buffer]
    slots = 1 if by_page or layout in _PAGE_ROWS else page_size
    return tuple(rows.view(torch.uint8).view(len(rows) // slots, -1) for rows in buffers)


# ---- values of a store ----


def together(parts: Sequence[PagePart]) -> tuple[PagePart, ...]:
    """Return SGLang's flat page as one part with an empty label, followed by the extra parts."""
    flat = tuple(piece for part in parts if not part.extra for piece in part.pieces)
    return (PagePart("", flat), *(part for part in parts if part.extra))


# ---- lists ----


def page_numbers(host_indices: torch.Tensor, page_size: int) -> list[int]:
    """Return the host pages of ``host_indices`` (1-D, slots), in order.

    Raises:
        ValueError: the slots are not whole pages, each with its slots in order.
    """
    slots = host_indices.reshape(-1)
    if len(slots) % page_size:
        raise ValueError(f"{len(slots)} host slots are not whole pages of {page_size}")
    rows = slots.view(-1, page_size)
    pages = torch.div(rows[:, 0], page_size, rounding_mode="floor")
    if not torch.equal(rows, pages[:, None] * page_size + torch.arange(page_size)):
        raise ValueError(f"the host slots are not whole pages of {page_size} slots in order")
    return pages.tolist()


def fold(found: Sequence[bool], per_page: int, count: int) -> list[bool]:
    """Convert results by value to results by page: a page is good if all its ``per_page`` values
    are.

    Raises:
        ValueError: the results are not those of ``count`` pages.
    """
    if len(found) != per_page * count:
        raise ValueError(f"{len(found)} results for {count} pages of {per_page} values")
    return [all(found[start : start + per_page]) for start in range(0, len(found), per_page)]


def leading(pages: Sequence[bool]) -> int:
    """Return the number of good pages before the first bad one."""
    return next((index for index, is_good in enumerate(pages) if not is_good), len(pages))

"""SGLang's host pools as a staging buffer: how large one is, and what a page of it consists of.

SGLang demands a host pool larger than the device pool, which is right for a cache and not for a
staging buffer. The size is given by :func:`staging_buffer` around the construction; elsewhere the
classes are the stock ones. Besides, a mixin for the device pool of sparse attention, which waits
for what is loaded of its index.

What a store has to keep of a page, and where that lies: a *part* is one tensor of the host pool
seen as pages: keys, values, a latent, an index; or several, one behind the other. A *value* is what
a store keeps under one key: a part. A page's values come in one fixed order, and all lists here are
page by page: every value of the first page, then those of the next. A page is there only if all its
values are, and only leading pages count, since KV behind a gap is of no use.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: what SGLang's pools have and answer

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only.settings import default_pages
from sglang.srt.patchset.args import prefetch_threshold
from sglang.srt.patchset.flags import CACHE_RATIO
from sglang.srt.patchset.stage_size import check_size

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
    # SGLang's page-first layouts index the page axis by layer number. One page less: SGLang always
    # adds one, and so its size check is met as well.
    return _Sized(pool, (max(pages, pool.layer_num) - 1) * page_size), 1.0, 0


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
            check_size(wanted[1], self.page_num, self.page_size, self.layer_num)
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


# ---- what a page consists of ----

#: Layouts whose rows are pages; those of the others are slots.
_PAGE_ROWS = ("page_first_direct", "page_head")
_LAYOUTS = ("layer_first", "page_first", *_PAGE_ROWS)


@dataclass(frozen=True)
class Part:
    """One tensor of a page, or several, in every page of a host pool."""

    #: What SGLang's keys call it: "k" and "v", also "k" for a latent; "index" for NSA's index; ""
    #: for a flat page.
    label: str
    #: Views of the pool's memory, uint8, (pages, bytes): of each tensor one, or one a layer in
    #: layer_first.
    pieces: tuple[torch.Tensor, ...]
    #: All tensor parallel ranks hold the same: the key has no rank, and one rank writes.
    shared: bool = False
    #: SGLang's own keys and flat pages do not know it.
    extra: bool = False
    #: The group of KV heads it has, where a rank's heads are stored apart.
    group: int = 0

    @property
    def size(self) -> int:
        """Bytes of one page."""
        return sum(piece.shape[1] for piece in self.pieces)

    @property
    def in_place(self) -> bool:
        """Whether it lies in one piece, so that a store can read and write the pool's memory."""
        return len(self.pieces) == 1

    def gather(self, page: int) -> torch.Tensor:
        """The bytes of ``page``, 1-D uint8: a copy unless it is ``in_place``."""
        rows = [piece[page] for piece in self.pieces]
        return rows[0] if self.in_place else torch.cat(rows)

    def scatter(self, page: int, content: torch.Tensor) -> None:
        """Write ``content``, 1-D uint8 of ``size`` bytes, into ``page``."""
        offset = 0
        for piece in self.pieces:
            width = piece.shape[1]
            piece[page].copy_(content[offset : offset + width])
            offset += width


# ---- what a pool has ----


def describe(pool: HostKVCache, groups: int = 1) -> tuple[Part, ...]:
    """The parts of a page in one of SGLang's host pools, in the order in which they are stored.

    Args:
        pool: ``MHATokenToKVPoolHost``, ``MLATokenToKVPoolHost`` or ``NSATokenToKVPoolHost``.
        groups: parts into which K and V are cut by heads; needs the layout ``page_head``.

    Raises:
        ValueError: a pool or a layout whose pages are not known here.
    """
    from sglang.srt.mem_cache import memory_pool_host as pools

    if isinstance(pool, pools.NSATokenToKVPoolHost):
        latent = Part("k", _rows(pool, pool.kv_buffer), shared=True)
        index = _rows(pool, pool.index_k_with_scale_buffer, by_page=True)
        return (latent, Part("index", index, shared=True, extra=True))
    if isinstance(pool, pools.MLATokenToKVPoolHost):
        return (Part("k", _rows(pool, pool.kv_buffer), shared=True),)
    if not isinstance(pool, pools.MHATokenToKVPoolHost):
        raise ValueError(f"the parts of a page of {type(pool).__name__} are not known")
    sides = [("k", _rows(pool, pool.kv_buffer[0])), ("v", _rows(pool, pool.kv_buffer[1]))]
    if groups == 1:
        return tuple(Part(label, rows) for label, rows in sides)
    if pool.layout != "page_head" or pool.head_num % groups:
        raise ValueError(
            f"{pool.head_num} heads in layout {pool.layout} cannot be stored in {groups} groups: "
            "this needs --hicache-mem-layout page_head"
        )
    return tuple(
        Part(label, (rows[0].view(len(rows[0]), groups, -1)[:, group],), group=group)
        for group in range(groups)
        for label, rows in sides
    )


def tensors(pool: HostKVCache) -> list[torch.Tensor]:
    """All host tensors of a pool, each in one stretch of memory: what a store has to register."""
    index = getattr(pool, "index_k_with_scale_buffer", [])
    return [pool.kv_buffer, *([index] if isinstance(index, torch.Tensor) else index)]


def _rows(
    pool: HostKVCache, buffer: torch.Tensor | Sequence[torch.Tensor], by_page: bool = False
) -> tuple[torch.Tensor, ...]:
    """Views of a buffer as (pages, bytes): one where a page lies together, else one a layer.

    ``by_page``: its rows are pages in every layout, as those of NSA's index are.
    """
    layout, page_size = pool.layout, pool.page_size
    if layout not in _LAYOUTS:
        raise ValueError(f"pages of layout {layout} are not known (--hicache-mem-layout)")
    wholes: list[torch.Tensor] = list(buffer) if layout == "layer_first" else [buffer]
    slots = 1 if by_page or layout in _PAGE_ROWS else page_size
    return tuple(whole.view(torch.uint8).view(len(whole) // slots, -1) for whole in wholes)


# ---- how a store keeps it ----


def together(parts: Sequence[Part]) -> tuple[Part, ...]:
    """SGLang's flat page under one key, with an empty label; what it does not know apart."""
    flat = tuple(piece for part in parts if not part.extra for piece in part.pieces)
    return (Part("", flat), *(part for part in parts if part.extra))


# ---- lists ----


def page_numbers(host_indices: torch.Tensor, page_size: int) -> list[int]:
    """The host pages that ``host_indices`` (1-D, slots) stand for, in their order.

    Raises:
        ValueError: they are not whole pages, each with its slots in order.
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
    """Results by value as results by page: a page is there if all its ``per_page`` values are.

    Raises:
        ValueError: results for anything but ``count`` pages.
    """
    if len(found) != per_page * count:
        raise ValueError(f"{len(found)} results for {count} pages of {per_page} values")
    return [all(found[at : at + per_page]) for at in range(0, len(found), per_page)]


def leading(pages: Sequence[bool]) -> int:
    """How many pages are there before the first that is not."""
    return next((at for at, there in enumerate(pages) if not there), len(pages))

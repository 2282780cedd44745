"""The parts of a page: what a store has to keep of it, where that lies, and under which keys.

A *part* is one tensor of the host pool seen as pages: keys, values, a latent, an index; or several,
one behind the other. A *value* is what a store keeps under one key: a part. A page's values come in
one fixed order, and all lists here are page by page: every value of the first page, then those of
the next. A page is there only if all its values are, and only leading pages count, since KV behind
a gap is of no use.

Everything here is pure: pools are looked at, never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache

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

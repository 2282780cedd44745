"""``sgl_kernel.kvcacheio`` on a CPU: the copies of HiCache's ``direct`` I/O backend, in torch.

*Layer-first* buffers (``lf``: the device pool, and a host pool of layout ``layer_first``) are one
tensor a layer, indexed by token slot. *Page-first* buffers (``pf``: a host pool of layout
``page_first_direct``) are indexed ``[page, layer, slot in page]``. Index tensors hold token slots,
page by page and in order inside a page, which is what HiCache's allocators give out.

The module is loaded under SGLang's name for it, so it imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn  # Any: functions that are not there

import torch

Buffers = Sequence[torch.Tensor]


def transfer_kv_direct(
    src_layers: Buffers,
    dst_layers: Buffers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy slots between layer-first buffers, layer by layer."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Buffers,
    dst_ptrs: Buffers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Load one layer: from page-first buffers (one each for K and V) to layer-first ones."""
    pages = _pages(src_indices, page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Buffers,
    dst_ptrs: Buffers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Back up all layers: ``src_ptrs`` lists the layers of the first page-first buffer (K), then
    those of the next (V)."""
    layers, rest = divmod(len(src_ptrs), len(dst_ptrs))
    if rest:
        raise ValueError(f"{len(src_ptrs)} layers do not divide among {len(dst_ptrs)} buffers")
    pages = _pages(dst_indices, page_size)
    for i, src in enumerate(src_ptrs):
        dst = dst_ptrs[i // layers]
        dst[pages, i % layers] = src[src_indices].view(len(pages), page_size, *src.shape[1:])


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    """The page of each run of ``page_size`` slots."""
    return indices[::page_size] // page_size


def __getattr__(name: str) -> Any:
    """The other copies work on raw device pointers: importable, and an error when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.kvcacheio.{name} has no CPU form: start SGLang with "
            "--hicache-io-backend direct"
        )

    return missing

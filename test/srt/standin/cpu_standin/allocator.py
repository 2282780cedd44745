"""Paged allocation without Triton.

SGLang's paged allocator keeps free page numbers, and two Triton kernels turn them into token
slots. Here the two are numpy, without a loop over the requests of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


def extend_slots(prefix: Ints, seq: Ints, last: Ints, free: Ints, page_size: int) -> Ints | None:
    """Slots for tokens ``prefix[i]..seq[i]`` of each request, one request after the other.

    A request first fills the page of its last slot ``last[i]``, then takes whole pages from
    ``free``, in order. None if there are not enough of them.
    """
    first_page = -(-prefix // page_size)
    new_pages = -(-seq // page_size) - first_page
    if new_pages.sum() > len(free):
        return None

    # From here on one element a token: np.repeat spreads a request's value over its tokens.
    lengths = seq - prefix
    begin = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) + np.repeat(prefix - begin, lengths)
    slots: Ints = position + np.repeat(last + 1 - prefix, lengths)
    fresh = position >= np.repeat(first_page * page_size, lengths)
    before = np.cumsum(new_pages) - new_pages
    taken = position // page_size + np.repeat(before - first_page, lengths)
    slots[fresh] = free[taken[fresh]] * page_size + position[fresh] % page_size
    return slots


def decode_slots(seq: Ints, last: Ints, free: Ints, page_size: int) -> Ints | None:
    """One slot a request, for token ``seq[i] - 1``: next to ``last[i]``, or a page of its own."""
    opens_page = (seq - 1) % page_size == 0
    needed = int(np.count_nonzero(opens_page))
    if needed > len(free):
        return None
    slots: Ints = last + 1
    slots[opens_page] = free[:needed] * page_size
    return slots


def _extend_kernel(
    pre_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Signature of SGLang's ``alloc_extend_kernel``."""
    _write(
        out_indices,
        extend_slots(
            _ints(pre_lens), _ints(seq_lens), _ints(last_loc), _ints(free_pages), page_size
        ),
    )


def _decode_kernel(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Signature of SGLang's ``alloc_decode_kernel``."""
    _write(
        out_indices,
        decode_slots(_ints(seq_lens), _ints(last_loc), _ints(free_pages), page_size),
    )


def _ints(tensor: torch.Tensor) -> Ints:
    return tensor.numpy().astype(np.int64, copy=False)


def _write(out_indices: torch.Tensor, slots: Ints | None) -> None:
    # The caller compares its free pages with the need after the kernel, and then returns None:
    # with too few pages the content of `out_indices` does not matter.
    if slots is not None:
        out_indices.numpy()[:] = slots


@dataclass(frozen=True)
class Launch:
    """Replaces a Triton kernel: ``kernel[grid](...)`` calls a function once."""

    function: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.function


def edit(module: ModuleType) -> None:
    """Replace the Triton kernels of ``mem_cache.allocator`` by the numpy forms."""
    for name, function in (
        ("alloc_extend_kernel", _extend_kernel),
        ("alloc_decode_kernel", _decode_kernel),
    ):
        if not hasattr(module, name):
            raise ImportError(f"{module.__name__} has no {name}: another SGLang release?")
        setattr(module, name, Launch(function))

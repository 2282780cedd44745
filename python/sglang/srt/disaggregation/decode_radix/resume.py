"""Bringing a retracted request's KV back: what the tree still shares is not copied."""

from __future__ import annotations

from typing import Any

import torch


def without_leading(
    copy: list[list[Any]], chunk: int, skip: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Split a CPU copy of KV at ``skip`` tokens.

    SGLang keeps the copy as one list a layer of chunks of ``chunk`` tokens; a chunk is a tensor
    (MLA) or a [key, value] pair (MHA), tokens first. Returns the rest of the chunk that ``skip``
    falls into, and the whole chunks after it, each in the same form.
    """
    whole, part = divmod(skip, chunk)
    if part == 0:
        return [[] for _ in copy], [layer[whole:] for layer in copy]
    head = [[_tail(layer[whole], part)] if whole < len(layer) else [] for layer in copy]
    return head, [layer[whole + 1 :] for layer in copy]


def _tail(chunk: Any, start: int) -> Any:
    if isinstance(chunk, torch.Tensor):
        return chunk[start:]
    return [part[start:] for part in chunk]


def restore_private(req: Any, slots: torch.Tensor, allocator: Any) -> None:
    """Copy what is not shared from the request's CPU copy to ``slots``, and drop the copy.

    Shared pages are never written: other requests read them, and their content is the same.
    """
    chunk = allocator.get_kvcache().cpu_offloading_chunk_size
    head, rest = without_leading(req.kv_cache_cpu, chunk, req.cache_protected_len)
    at = min(len(slots), -req.cache_protected_len % chunk)
    if at:
        allocator.load_cpu_copy(head, slots[:at])
    if at < len(slots):
        allocator.load_cpu_copy(rest, slots[at:])
    del req.kv_cache_cpu

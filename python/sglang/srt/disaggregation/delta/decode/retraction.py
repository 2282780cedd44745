"""Bringing back a retracted request's KV: what the tree still shares of it is not copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: a chunk of KV, a tensor or a pair of them

import torch

from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.delta.sparse_index import load_index

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache


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

    def tail(layer: list[Any]) -> list[Any]:
        if whole >= len(layer):
            return []
        both = layer[whole]
        return [both[part:] if isinstance(both, torch.Tensor) else [one[part:] for one in both]]

    return [tail(layer) for layer in copy], [layer[whole + 1 :] for layer in copy]


def restore_private(
    req: Req,
    slots: torch.Tensor,
    allocator: BaseTokenToKVPoolAllocator,
    draft_pool: KVCache | None = None,
) -> None:
    """Copy what is not shared from the request's CPU copy to ``slots``, and drop the copy; with a
    draft model also its KV, which has the same slots, and with sparse attention the index.

    Shared pages are never written: other requests read them, and their content is the same.
    """
    pool, record, shared = allocator.get_kvcache(), record_of(req), req.cache_protected_len
    load_private(
        req.kv_cache_cpu, pool.cpu_offloading_chunk_size, shared, slots, allocator.load_cpu_copy
    )
    del req.kv_cache_cpu
    if draft_pool is not None:
        chunk = draft_pool.cpu_offloading_chunk_size
        load_private(record.draft_copy, chunk, shared, slots, draft_pool.load_cpu_copy)
    if record.index_copy is not None:
        load_index(pool, record.index_copy, slots, shared)
    record.drop_copies()


def load_private(
    copy: list[list[Any]],
    chunk: int,
    shared: int,
    slots: torch.Tensor,
    load: Callable[[list[list[Any]], torch.Tensor], None],
) -> None:
    """Call ``load`` with what is behind ``shared`` tokens, and the slots for it."""
    head, rest = without_leading(copy, chunk, shared)
    at = min(len(slots), -shared % chunk)
    if at:
        load(head, slots[:at])
    if at < len(slots):
        load(rest, slots[at:])

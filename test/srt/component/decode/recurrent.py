"""SGLang's pools of a model with recurrent state: each state slot holds the tag of its request's
text, as each KV slot does (``kv``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from component.decode import kv
from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
from sglang.srt.disaggregation.delta.decode.recurrent import serve_states
from sglang.srt.disaggregation.delta.decode.request import record_of
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

#: Two layers have recurrent state, and two others KV.
RECURRENT_LAYERS, ATTENTION_LAYERS = [0, 2], [1, 3]
#: Shapes: two windows of convolutions, and the recurrence's matrix.
SHAPE = SimpleNamespace(conv=[(2, 3), (1, 3)], temporal=(2, 2, 2))


def build(tokens: int, page: int, rows: int, states: int) -> tuple[Any, Any, Any]:
    """Return rows, KV pool and its allocator, as on a decode server with the flag."""
    dtype = torch.int64
    table = HybridMambaDecodeReqToTokenPool(
        size=rows,
        max_context_len=1024,
        device="cpu",
        enable_memory_saver=False,
        cache_params=SimpleNamespace(
            shape=SHAPE, dtype=SimpleNamespace(conv=dtype, temporal=dtype)
        ),
        mamba_layer_ids=RECURRENT_LAYERS,
        speculative_num_draft_tokens=None,
        enable_mamba_extra_buffer=False,
        pre_alloc_size=8,
        enable_overlap_schedule=False,
        mamba_size=states,
    )
    pool = HybridLinearKVPool(
        size=tokens,
        dtype=dtype,
        page_size=page,
        head_num=1,
        head_dim=1,
        full_attention_layer_ids=ATTENTION_LAYERS,
        enable_kvcache_transpose=False,
        device="cpu",
        mamba_pool=table.mamba_pool,
    )
    pool.full_kv_pool.cpu_offloading_chunk_size = kv.OFFLOADED_CHUNK
    serve_states(pool, table)
    if page == 1:
        return table, pool, TokenToKVPoolAllocator(tokens, dtype, "cpu", pool, True)
    return table, pool, PagedTokenToKVPoolAllocator(tokens, page, dtype, "cpu", pool, True)


def item_lens(rows: Any) -> list[int]:
    """Return the bytes of a state slot, by buffer."""
    lens: list[int] = rows.mamba_pool.get_contiguous_buf_infos()[2]
    return lens


def write(rows: Any, slots: list[int], tag: int) -> None:
    """Write a tag into state slots, in all parts."""
    for number, part in enumerate(_parts(rows)):
        part[:, slots] = tag + number


def read(rows: Any, slot: int) -> int:
    """Return the tag of a state slot; garbage if its parts do not agree."""
    found = {
        int(value) - n for n, part in enumerate(_parts(rows)) for value in part[:, slot].unique()
    }
    return found.pop() if len(found) == 1 else kv.GARBAGE


def _parts(rows: Any) -> list[torch.Tensor]:
    states = rows.mamba_pool.mamba_cache
    return [*states.conv, states.temporal]


def slot_of(rows: Any, req: Any) -> int:
    """Return the slot that the model's layers use for a request."""
    return int(rows.req_index_to_mamba_index_mapping[req.req_pool_idx])


def advance(rows: Any, req: Any) -> None:
    """Run a decode step: add the last token of the text to the state."""
    slot = slot_of(rows, req)
    last = (req.origin_input_ids + req.output_ids)[-1]
    write(rows, [slot], kv.tags([last], req.extra_key, read(rows, slot))[0])


def expected(req: Any) -> int:
    """Return the tag of all tokens with KV."""
    ids = (req.origin_input_ids + req.output_ids)[: req.kv_committed_len]
    return kv.tags(ids, req.extra_key, weights=record_of(req).generation)[-1]


def problems(rows: Any, held: list[Any], arrived: list[Any]) -> list[str]:
    """Return the violations of the state slots. ``held``: requests that own one; ``arrived``:
    requests with a state that has arrived."""
    free, size = rows.mamba_pool.free_slots.tolist(), rows.mamba_pool.size
    used = [slot_of(rows, req) for req in held]
    found = []
    if sorted([*free, *used]) != list(range(1, size + 1)):
        found.append(f"state slots: {sorted(free)} free, {sorted(used)} used of {size}")
    if used != [int(req.mamba_pool_idx) for req in held]:
        found.append("a row is mapped to another request's state slot")
    for req in arrived:
        if read(rows, slot_of(rows, req)) != expected(req):
            found.append(f"request {req.rid}: its state is not that of its text")
    return found

"""Attention in torch, where SGLang's ``torch_native`` backend has none.

That backend knows causal attention over one pool. Here are windows, also in a pool of their own;
attention sinks; a cap of the scores; KV in fp8; tokens that an index chooses (DSA); and the passes
of speculation: verification (TARGET_VERIFY), the draft model's extension (DRAFT_EXTEND) and its
steps. MLA needs none of it in its absorbed form, where all queries share one latent head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any  # Any: modules that are edited, their objects, arguments passed on

import torch
from torch import Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[Tensor],
    counts: Sequence[int],
    scaling: float | None = None,
    *,
    window: int = -1,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    tree: Tensor | None = None,
) -> Tensor:
    """Return attention of the last ``counts[i]`` tokens of each request, whose tokens so far are in
    ``slots[i]`` of the pool: [tokens, heads, dim of a value]. Rows of padding get zeros.

    Args:
        query: [tokens, heads, dim], one request behind the other, then padding.
        keys, values: the pool, [slots, KV heads, dim].
        window: number of tokens before its own that a query sees; -1: all.
        cap: bound of the scores; 0: none.
        sinks: [heads], a score that takes its part of the weights and has no value.
        chosen: [tokens, any number], positions that a query sees, -1 for none.
        tree: a mask of each request's queries and keys, one behind the other.
    """
    out = query.new_zeros(len(query), query.shape[1], values.shape[-1])
    groups, start, at = query.shape[1] // keys.shape[1], 0, 0
    for request, count in zip(slots, counts, strict=True):
        length, part = len(request), slice(start, start + count)
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        if tree is not None:
            visible = tree[at : at + count * length].view(count, length)
            at += count * length
        if window >= 0:
            visible = visible.triu(length - count - window)
        if chosen is not None:
            # An additional column takes the -1 entries.
            listed = torch.zeros(count, length + 1, dtype=torch.bool)
            listed.scatter_(1, chosen[part].long() % (length + 1), True)
            visible &= listed[:, :length]
        key, value = (rows(pool, request).repeat_interleave(groups, 1) for pool in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[part].float(), key)
        scores *= query.shape[-1] ** -0.5 if scaling is None else scaling
        if cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :length]
        out[part] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
        start += count
    return out


def rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Return rows of a pool in float32. On a CPU torch does not index fp8."""
    if pool.element_size() > 1:
        return pool[slots].float()
    return pool.view(torch.uint8)[slots].view(pool.dtype).float()


def lengths(batch: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of each request of a ``ForwardBatch``, and how many of them are queries."""
    lens, mode = batch.seq_lens.tolist(), batch.forward_mode
    if mode.is_target_verify():
        drafts = batch.spec_info.draft_token_num
        return [length + drafts for length in lens], [drafts] * len(lens)
    if mode.is_decode_or_idle():
        return lens, [1] * len(lens)
    # Not ``extend_prefix_lens``, which are still those of prefill.
    return lens, batch.extend_seq_lens.tolist()


def _tree(batch: Any) -> Tensor | None:
    """Return the mask of a batch that verifies trees; chains need none."""
    if getattr(batch.spec_info, "topk", 1) == 1 or not batch.forward_mode.is_target_verify():
        return None
    mask: Tensor = batch.spec_info.custom_mask
    return mask


def edit(module: Any) -> None:
    """After ``torch_native_backend``: the forms that it lacks, in both of its passes."""
    backend, is_later = module.TorchNativeAttnBackend, hasattr(module, "KVWriteLoc")
    # SGLang 0.5.23 has windows over one pool, keeps the pools in the backend, and makes an object
    # of a place. A pool of windows has slots of its own: stock writes to them, and reads others.

    def forward(
        self: Any,
        stock: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        topk_indices: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        pools, ahead = self if is_later else forward_batch, getattr(self, "steps_ahead", 0)
        pool, mode = pools.token_to_kv_pool, forward_batch.forward_mode
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        keys = pool.get_key_buffer(layer.layer_id)
        in_windows = getattr(pool, "layers_mapping", {}).get(layer.layer_id, (0, False))[1]
        if not (
            ahead
            or mode.is_target_verify()
            or mode.name == "DRAFT_EXTEND"
            or (window >= 0 and not is_later)
            or in_windows
            or layer.logit_cap
            or sinks is not None
            or topk_indices is not None
            or keys.element_size() == 1
        ):
            return stock(self, q, k, v, layer, forward_batch, save_kv_cache, **more)
        if save_kv_cache and k is not None:
            place = forward_batch.out_cache_loc
            if is_later:
                place = module.KVWriteLoc(place, getattr(self, "swa_out_cache_loc", None))
            pool.set_kv_buffer(layer, place, k, v)
        lens, counts = lengths(forward_batch)
        table = pools.req_to_token_pool.req_to_token
        requests = zip(forward_batch.req_pool_indices.tolist(), lens, strict=True)
        slots = [table[row, : length + ahead].long() for row, length in requests]
        if in_windows:
            slots = [pool.full_to_swa_index_mapping[each] for each in slots]
        out = attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            pool.get_value_buffer(layer.layer_id),
            slots,
            counts,
            layer.scaling,
            window=window,
            cap=layer.logit_cap,
            sinks=sinks,
            chosen=topk_indices,
            tree=_tree(forward_batch),
        )
        return out.reshape(len(out), -1)

    backend.forward_extend = partialmethod(forward, backend.forward_extend)
    backend.forward_decode = partialmethod(forward, backend.forward_decode)


def absorb_latents(module: Any) -> None:
    """After ``attention_backend_handler``: MLA in its absorbed form also where a prompt has no
    prefix, because keys and values are read from the pool."""
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def instead_of_triton(module: Any) -> None:
    """After ``attention_registry``: gpt-oss refuses any backend for a CPU by name."""
    module.ATTENTION_BACKENDS["triton"] = module.ATTENTION_BACKENDS["torch_native"]


def without_triton(module: Any) -> None:
    """After ``utils.common``: nothing is launched, whatever the name of the backend."""
    module.support_triton = lambda backend: False

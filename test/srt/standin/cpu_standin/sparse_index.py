"""The index of sparse attention (DSA) in torch: which tokens a query of DeepSeek V3.2 sees.

The index keeps a key a token in fp8, with a scale, in pages beside the latents:
``[pages, page * dim bytes of keys, then page * 4 bytes of scales]``.
"""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, layers and batches of SGLang

import torch
from torch import Tensor
from torch.nn.functional import linear

from .attention import lengths

FP8_MAX = 448.0


class IndexPages:
    """The keys of one layer's index, by slot. Accessed as bytes, since torch cannot index fp8 on a
    CPU."""

    def __init__(self, buffer: Tensor, page: int, dim: int) -> None:
        """``buffer``: [pages, bytes of a page]."""
        self._page = page
        self._keys = buffer[:, : page * dim].view(-1, page, dim)
        self._scales = buffer[:, page * dim :].view(torch.float32)

    def write(self, slots: Tensor, keys: Tensor) -> None:
        """Put ``keys``, [tokens, dim], into ``slots``."""
        scales = keys.float().abs().amax(-1).clamp(min=1e-4) / FP8_MAX
        at = slots // self._page, slots % self._page
        self._keys[at] = (keys / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        self._scales[at] = scales

    def read(self, slots: Tensor) -> Tensor:
        """Return the keys in ``slots`` in float32: [tokens, dim]."""
        at = slots // self._page, slots % self._page
        return self._keys[at].view(torch.float8_e4m3fn).float() * self._scales[at][:, None]


def choose(query: Tensor, weights: Tensor, keys: Tensor, most: int) -> Tensor:
    """Return the ``most`` positions that each query prefers of those up to its own, -1 for none:
    [queries, most].

    Args:
        query: [queries, heads, dim], the last ones of a request.
        weights: [queries, heads], of the heads' scores.
        keys: [tokens of the request, dim].
    """
    count, length = len(query), len(keys)
    scores = torch.einsum("qhd,kd->qhk", query.float(), keys).relu()
    totals = torch.einsum("qhk,qh->qk", scores, weights)
    visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    best = totals.masked_fill(~visible, float("-inf")).topk(min(most, length), -1)
    chosen = torch.full((count, most), -1, dtype=torch.int32)
    chosen[:, : best.indices.shape[1]] = best.indices.where(best.values.isfinite(), -1)
    return chosen


def edit(module: Any) -> None:
    """After ``nsa_indexer``, in SGLang 0.5.23 ``dsa_indexer``."""

    def forward(
        self: Any,
        x: Tensor,
        q_lora: Tensor,
        positions: Tensor,
        forward_batch: Any,
        layer_id: int,
        return_indices: bool = True,
    ) -> Tensor | None:
        """Write the keys of the batch, and return positions in each request's text: [tokens,
        ``index_topk``]."""
        pools, dim, rope = pools_of(forward_batch), self.head_dim, self.rope_head_dim
        pool = pools.token_to_kv_pool
        query = self.wq_b(q_lora)[0].view(-1, self.n_heads, dim)
        key = self.k_norm(self.wk(x)[0])[:, None]
        turned = self.rotary_emb(
            positions, query[..., :rope].contiguous(), key[..., :rope].contiguous()
        )
        query, key = (
            torch.cat([start.reshape(*whole.shape[:2], rope), whole[..., rope:]], -1)
            for start, whole in zip(turned, (query, key), strict=True)
        )
        pages = IndexPages(pool.get_index_k_with_scale_buffer(layer_id), pool.page_size, dim)
        pages.write(forward_batch.out_cache_loc.long(), key[:, 0])
        if not return_indices:
            return None
        weights = linear(x.float(), self.weights_proj.weight.float())
        weights *= self.n_heads**-0.5 * self.softmax_scale
        chosen, start = torch.full((len(x), self.index_topk), -1, dtype=torch.int32), 0
        table, requests = pools.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        for row, length, count in zip(requests.tolist(), *lengths(forward_batch), strict=True):
            keys, part = pages.read(table[row, :length].long()), slice(start, start + count)
            chosen[part] = choose(query[part], weights[part], keys, self.index_topk)
            start += count
        return chosen

    def pools_of(forward_batch: Any) -> Any:
        # SGLang 0.5.23 keeps the pools in the backend.
        return module.get_attn_backend() if is_later else forward_batch

    is_later = hasattr(module, "get_attn_backend")
    module.Indexer.forward = forward


def without_device(module: Any) -> None:
    """After ``server_args``: the defaults of DSA follow from the capability of the device."""
    module.ServerArgs._set_default_nsa_kv_cache_dtype = lambda self, major, quantization: None
    module.ServerArgs._set_default_nsa_backends = lambda self, dtype, major: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)


def without_device_later(module: Any) -> None:
    """After ``model_hook`` of SGLang 0.5.23: the same."""
    module._dsa_kv_cache_dtype_default = lambda view: {}
    module._dsa_split_backend_resolution = lambda view: {}
    torch.cuda.get_device_capability = lambda device=None: (9, 0)

"""Linear attention with a state, in torch: a short convolution, then gated delta nets.

Everything is computed one request after the other, and the recurrence one token after the other.
"""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, arguments that are not used

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


def convolve(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: object
) -> tuple[Tensor, Tensor]:
    """Return the convolution of ``x`` behind ``state``, and the state behind it.

    ``x``: [dim, tokens]; ``state``: [dim, width - 1], the inputs before; ``weight``: [dim, width].
    """
    inputs = torch.cat([state.to(x.dtype), x], -1)
    out = conv1d(inputs[None], weight[:, None], bias, groups=len(x))[0]
    return silu(out) if activation else out, inputs[:, -state.shape[-1] :]


def convolve_texts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: object,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: object = "silu",
    **options: Any,
) -> Tensor:
    """Signature of ``causal_conv1d_fn``: ``x`` is [dim, tokens of all requests]."""
    out, bounds = torch.empty_like(x), query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        part = slice(bounds[request], bounds[request + 1])
        state = conv_states[slot].where(has_initial_state[request], 0)
        out[:, part], conv_states[slot] = convolve(x[:, part], state, weight, bias, activation)
    return out


def convolve_tokens(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: object,
    conv_state_indices: Tensor,
    **options: Any,
) -> Tensor:
    """Signature of ``causal_conv1d_update``: ``x`` is [requests, dim]; a slot of -1 is padding."""
    out = torch.empty_like(x)
    for request, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            column, state = x[request][:, None], conv_states[slot]
            column, conv_states[slot] = convolve(column, state, weight, bias, activation)
            out[request] = column[:, 0]
    return out


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Signature of ``fused_gdn_gating``: the logarithm of the decay of a state, and the part of a
    value that is written to it; [1, tokens, heads]."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias)
    return decay[None], b.float().sigmoid()[None]


def recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    bounds: list[int],
) -> Tensor:
    """Return what the queries read, [1, tokens, value heads, V], and update ``states``.

    Args:
        query, key: [1, tokens, heads, K], not normalized.
        value: [1, tokens, value heads, V].
        decay, beta: of ``gates``.
        states: [slots, value heads, V, K].
        slots: of the requests; -1 is padding.
        bounds: first token of each request, and the number of all.
    """
    out, groups = torch.zeros_like(value), value.shape[2] // query.shape[2]
    query, key = (_unit(x[0].float()).repeat_interleave(groups, 1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    for slot, start, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        if slot < 0:
            continue
        state = states[slot].float()
        for token in range(start, end):
            state = state * decay[0, token].exp()[:, None, None]
            read = torch.einsum("hvk,hk->hv", state, key[token])
            written = (value[0, token].float() - read) * beta[0, token][:, None]
            state = state + written[:, :, None] * key[token][:, None, :]
            out[0, token] = torch.einsum("hvk,hk->hv", state, query[token]).to(out.dtype)
        states[slot] = state.to(states.dtype)
    return out


def _unit(x: Tensor) -> Tensor:
    """Return vectors of about length one, as SGLang's kernels make them."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet:
    """Has the methods of SGLang's ``TritonGDNKernel``."""

    supports_packed_decode = False

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        **places: Any,
    ) -> Tensor:
        return self.extend(q, k, v, *gates(A_log, a, b, dt_bias), **places)[0]

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **options: Any,
    ) -> tuple[Tensor, None, None]:
        bounds = query_start_loc.tolist()
        return recur(q, k, v, g, beta, ssm_states, cache_indices, bounds), None, None


def edit(module: Any) -> None:
    """After ``gdn_backend``."""
    module.causal_conv1d_fn, module.causal_conv1d_update = convolve_texts, convolve_tokens
    module.fused_gdn_gating, module.TritonGDNKernel = gates, GatedDeltaNet

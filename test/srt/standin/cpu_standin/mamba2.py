"""Mamba2 in torch (Falcon-H1, Nemotron-H): one request after the other, one token after the other.

The convolution is that of the gated delta nets.
"""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, arguments that are not used

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .recurrent import convolve_texts, convolve_tokens


def _step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what one token reads, [heads, P], and the new state, [heads, P, N].

    ``x``: [heads, P]; ``dt``, ``A``, ``D``, ``bias``: [heads]; ``B``, ``C``: [groups, N].
    """
    groups = len(x) // len(B)
    B, C = (each.float().repeat_interleave(groups, 0) for each in (B, C))
    dt = softplus(dt.float() + bias.float())
    written = (dt[:, None] * x.float())[:, :, None] * B[:, None]
    state = state.float() * (dt * A.float()).exp()[:, None, None] + written
    read = torch.einsum("hpn,hn->hp", state, C) + D.float()[:, None] * x.float()
    return read, state


def scan_texts(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor, dt_bias: Tensor,
    cu_seqlens: Tensor, initial_states: Tensor | None, out: Tensor, state_dtype: torch.dtype,
    **options: Any,
) -> Tensor | tuple[None, Tensor, None]:  # fmt: skip
    """Signature of ``mamba_chunk_scan_combined``: returns the state behind each request."""
    bounds = cu_seqlens.tolist()
    shape = len(bounds) - 1, *x.shape[2:], B.shape[-1]
    states = torch.zeros(shape) if initial_states is None else initial_states.clone()
    for request, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = states[request]
        for t in range(start, end):
            out[0, t], state = _step(state, x[0, t], dt[0, t], A, B[0, t], C[0, t], D, dt_bias)
        states[request] = state
    states = states.to(state_dtype)
    # SGLang 0.5.23 also takes states within a text, which its tree needs for pages of more tokens.
    return (None, states, None) if options.get("return_track_states") else states


def scan_tokens(
    states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    *, dt_bias: Tensor, state_batch_indices: Tensor, out: Tensor, **options: Any,
) -> None:  # fmt: skip
    """Signature of ``selective_state_update``: one token a request; a slot of -1 is padding."""
    A, D, bias = A[:, 0, 0], D[:, 0], dt_bias[:, 0]
    for i, slot in enumerate(state_batch_indices.tolist()):
        if slot >= 0:
            read = _step(states[slot], x[i], dt[i, :, 0], A, B[i], C[i], D, bias)
            out[i], states[slot] = read


def edit(module: Any) -> None:
    """After ``attention.mamba.mamba``."""
    for name in ("causal_conv1d_fn", "causal_conv1d_fn_triton"):
        setattr(module, name, convolve_texts)
    for name in ("causal_conv1d_update", "causal_conv1d_update_triton"):
        setattr(module, name, convolve_tokens)
    module.mamba_chunk_scan_combined, module.selective_state_update = scan_texts, scan_tokens

"""Experts in torch: those of ``gpt-oss``, and expert parallelism."""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, layers of SGLang

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def mix(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
    clamped: tuple[float, float] | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts: [tokens, dim].

    Args:
        x: [tokens, dim].
        weights, ids: [tokens, experts of a token]; an id of -1 is an expert of another rank.
        gate_up, down: [experts, 2 * inner, dim], [experts, dim, inner].
        biases: of the two, [experts, 2 * inner], [experts, dim].
        clamped: slope and limit of the activation of gpt-oss, whose gates alternate with what they
            gate; None: SiLU, with the gates in front.
    """
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        up_bias, down_bias = (b[expert].to(x.dtype) for b in biases) if biases else (None, None)
        inner = linear(x[token], gate_up[expert], up_bias)
        if clamped is None:
            gate, up = inner.chunk(2, -1)
            inner = silu(gate) * up
        else:
            slope, limit = clamped
            gate, up = inner[..., ::2].clamp(max=limit), inner[..., 1::2].clamp(-limit, limit)
            inner = gate * torch.sigmoid(gate * slope) * (up + 1)
        answer = linear(inner, down[expert], down_bias)
        out.index_add_(0, token, answer * weights[token, place, None].to(x.dtype))
    return out


def edit(module: Any) -> None:
    """After ``fused_moe_native``: biases, gpt-oss' activation, and experts of other ranks."""
    stock = module.moe_forward_native

    def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        biased = getattr(layer, "w13_weight_bias", None) is not None
        if not biased and config.gemm1_alpha is None and layer.moe_ep_size == 1:
            return stock(layer, x, topk_output, config)
        weights, ids, _ = topk_output
        return mix(
            *(x, weights, ids, layer.w13_weight, layer.w2_weight),
            biases=(layer.w13_weight_bias, layer.w2_weight_bias) if biased else None,
            clamped=config.gemm1_alpha and (config.gemm1_alpha, config.gemm1_clamp_limit),
        )

    module.moe_forward_native = moe_forward_native


def map_on_cpu(module: Any) -> None:
    """After ``token_dispatcher.standard``: expert parallelism keeps its table on the device."""
    module.get_device = lambda: "cpu"

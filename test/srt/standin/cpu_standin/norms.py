"""Norms in torch that SGLang has only as Triton kernels."""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, layers of SGLang

import torch
from torch import Tensor
from torch.nn.functional import silu


def gated(module: Any) -> None:
    """After ``fla.fused_norm_gate``: RMS norm times a gate."""

    def forward(self: Any, x: Tensor, g: Tensor, *args: Any, **options: Any) -> Tensor:
        out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            out = out * self.weight
        gate = g.float().sigmoid() if self.activation == "sigmoid" else silu(g.float())
        return (out * gate).to(x.dtype)

    module.FusedRMSNormGated.forward = forward


def minimax(module: Any) -> None:
    """After ``minimax_m2``: one RMS norm over the heads of all ranks, for queries and for keys.

    SGLang adds up the sums of squares between the two functions.
    """

    def squares(query: Tensor, key: Tensor) -> Tensor:
        """Return the sums of this rank: [2, tokens]."""
        return torch.stack([x.float().pow(2).sum(-1) for x in (query, key)])

    def apply(
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        sums: Tensor,
        ranks: int = 1,
        eps: float = 1e-5,
    ) -> tuple[Tensor, Tensor]:
        """Signature of ``rms_apply_serial``."""

        def scaled(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
            scale = torch.rsqrt(total[:, None] / (x.shape[-1] * ranks) + eps)
            return (x.float() * scale * weight).to(x.dtype)

        return scaled(query, query_weight, sums[0]), scaled(key, key_weight, sums[1])

    module.rms_sumsq_serial, module.rms_apply_serial = squares, apply


def of_mamba2(module: Any) -> None:
    """After ``mixer2_rms_norm_gated``: the form that SGLang has in torch."""
    norm = module.Mixer2RMSNormGated
    norm.forward_cpu = norm.forward_cuda = norm.forward_native

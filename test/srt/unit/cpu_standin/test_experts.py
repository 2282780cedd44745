"""Experts in torch, against those of transformers and a formula for each token."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from cpu_standin import experts

TOKENS, EXPERTS, DIM, INNER = 7, 4, 6, 5


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, and the weights and ids of two different experts for each."""
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    return torch.randn(TOKENS, DIM), torch.rand(TOKENS, 2), ids


def test_experts_of_gpt_oss() -> None:
    """Guards against gates taken from the wrong half, and a bias or a limit that is left out."""
    x, weights, ids = routed()
    theirs = GptOssExperts(
        GptOssConfig(num_local_experts=EXPERTS, hidden_size=DIM, intermediate_size=INNER)
    )
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 3)  # so that the limit is reached
    found = experts.mix(
        *(x, weights, ids, theirs.gate_up_proj.mT, theirs.down_proj.mT),
        biases=(theirs.gate_up_proj_bias, theirs.down_proj_bias),
        clamped=(theirs.alpha, theirs.limit),
    )
    assert torch.allclose(found, theirs(x, ids, weights), rtol=1e-4, atol=1e-3)


def test_experts_of_other_ranks_add_nothing() -> None:
    """Guards against an id of -1 that is taken for the last expert."""
    x, weights, ids = routed()
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, DIM), torch.randn(EXPERTS, DIM, INNER)
    ids[ids == 2] = -1
    expected = torch.zeros(TOKENS, DIM)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                expected[token] += weight * (down[expert] @ (silu(gate) * up))
    assert torch.allclose(experts.mix(x, weights, ids, gate_up, down), expected, atol=1e-4)


def test_what_sglang_can_do_is_left_to_it() -> None:
    """Guards against a form of the stand-in that replaces one that SGLang has for a CPU."""
    module: Any = SimpleNamespace(moe_forward_native=lambda *args: "stock")
    experts.edit(module)
    config = SimpleNamespace(gemm1_alpha=None, gemm1_clamp_limit=None)
    layer = SimpleNamespace(
        moe_ep_size=1, w13_weight=torch.ones(1, 2, 1), w2_weight=torch.ones(1, 1, 1)
    )
    x, topk = torch.ones(1, 1), (torch.ones(1, 1), torch.zeros(1, 1), None)
    assert module.moe_forward_native(layer, x, topk, config) == "stock"
    layer.moe_ep_size = 2
    assert torch.allclose(module.moe_forward_native(layer, x, topk, config), silu(x))

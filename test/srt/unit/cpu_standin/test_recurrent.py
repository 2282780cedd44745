"""Linear attention in torch, against that of transformers; norms against their formulas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from cpu_standin import norms, recurrent

KEY_HEADS, HEADS, K, V, SLOTS = 2, 4, 8, 6, 5


def texts(tokens: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values, decays and write strengths (beta)."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, tokens, KEY_HEADS, K)
    value = torch.randn(1, tokens, HEADS, V)
    decay, beta = -torch.rand(1, tokens, HEADS), torch.rand(1, tokens, HEADS)
    return query, key, value, decay, beta


def expected(parts: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[Any, Any]:
    """Return the output and the state [heads, V, K] of one text that continues ``state``."""
    query, key, *rest = parts
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (query, key))
    out, last = theirs.torch_recurrent_gated_delta_rule(
        query, key, *rest, state.mT[None], True, use_qk_l2norm_in_kernel=True
    )
    return out, last[0].mT


def test_recurrence_of_several_requests() -> None:
    """Guards against another request's state, a transposed state, and padding that writes to the
    last slot."""
    parts, states = texts(9), torch.randn(SLOTS, HEADS, V, K)
    before = states.clone()
    slots, bounds = torch.tensor([3, 1, -1]), [0, 4, 9, 9]
    found = recurrent.recur(*parts, states, slots, bounds)
    for slot, start, end in ((3, 0, 4), (1, 4, 9)):
        out, last = expected(tuple(x[:, start:end] for x in parts), before[slot])
        assert torch.allclose(found[:, start:end], out, atol=1e-5)
        assert torch.allclose(states[slot], last, atol=1e-5)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9], list(range(10))])
def test_chunks_are_as_one_text(cuts: list[int]) -> None:
    """Guards against a chunk, or a token of decode, that does not start from the state that the
    previous one left."""
    parts, states = texts(9), torch.zeros(SLOTS, HEADS, V, K)
    whole, last = expected(parts, states[2])
    slot = torch.tensor([2])
    found = [
        recurrent.recur(*(x[:, start:end] for x in parts), states, slot, [0, end - start])
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    assert torch.allclose(torch.cat(found, 1), whole, atol=1e-5)
    assert torch.allclose(states[2], last, atol=1e-5)


def test_convolution() -> None:
    """Guards against a text that starts from the state of its slot's previous request, and a token
    of decode that does not continue its text."""
    torch.manual_seed(0)
    dim, width = 6, 4
    x, weight = torch.randn(dim, 9), torch.randn(dim, width)
    states = torch.randn(SLOTS, dim, width - 1)
    old = states.clone()
    starts, slots = torch.tensor([0, 5, 8]), torch.tensor([2, 4])
    has_state = torch.tensor([False, True])
    found = recurrent.convolve_texts(x[:, :8], weight, None, states, starts, None, slots, has_state)
    found = torch.cat(
        [found, recurrent.convolve_tokens(
            x[:, 8:].T, states, weight, None, "silu", conv_state_indices=slots[1:]
        ).T], 1,
    )  # fmt: skip
    for slot, part, before in ((2, slice(0, 5), torch.zeros(1, dim, 3)), (4, slice(5, 9), old[4:])):
        state = before.clone()
        out = theirs.torch_causal_conv1d_update(x[None, :, part], state, weight)
        assert torch.allclose(found[:, part], out[0], atol=1e-5)
        assert torch.equal(states[slot], state[0])


def test_decode_is_a_chunk_of_one_token() -> None:
    """Guards against gates that decode computes in another way."""
    query, key, value, _, _ = texts(1)
    a, b = torch.randn(2, 1, HEADS)
    A_log, dt_bias = torch.rand(HEADS), torch.rand(HEADS)
    decay, beta = recurrent.gates(A_log, a, b, dt_bias)
    assert torch.allclose(decay[0], -A_log.exp() * torch.log1p((a + dt_bias).exp()))
    assert torch.allclose(beta[0], 1 / (1 + (-b).exp()))
    net = recurrent.GatedDeltaNet()
    places = [
        {
            "ssm_states": torch.ones(1, HEADS, V, K),
            "cache_indices": torch.tensor([0]),
            "query_start_loc": torch.tensor([0, 1]),
        }
        for _ in range(2)
    ]
    one = net.decode(query, key, value, a, b, A_log=A_log, dt_bias=dt_bias, **places[0])
    other = net.extend(query, key, value, decay, beta, **places[1])[0]
    assert torch.equal(one, other)
    assert torch.equal(places[0]["ssm_states"], places[1]["ssm_states"])


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_gated_norm(activation: str) -> None:
    """Guards against a gate that is applied before the norm, or through another activation."""

    class Norm:
        weight, eps = torch.tensor([1.0, 2.0, 3.0]), 1e-6

    Norm.activation = activation
    norms.gated(SimpleNamespace(FusedRMSNormGated=Norm))
    torch.manual_seed(0)
    x, gate = torch.randn(2, 4, 3)
    scaled = x / (x.pow(2).mean(-1, keepdim=True) + Norm.eps).sqrt() * Norm.weight
    passed = silu(gate) if activation == "swish" else gate.sigmoid()
    assert torch.allclose(Norm().forward(x, gate), scaled * passed, atol=1e-5)


def test_a_norm_over_two_ranks_is_that_of_their_heads_together() -> None:
    """Guards against ranks that each treat their own heads as all heads."""
    module: Any = SimpleNamespace()
    norms.minimax(module)
    torch.manual_seed(0)
    query, key = torch.randn(3, 8), torch.randn(3, 4)
    query_weight, key_weight = torch.randn(8), torch.randn(4)
    ranks = [(query[:, :4], key[:, :2]), (query[:, 4:], key[:, 2:])]
    sums = sum(module.rms_sumsq_serial(*rank) for rank in ranks)
    weights = [(query_weight[:4], key_weight[:2]), (query_weight[4:], key_weight[2:])]
    parts = [
        module.rms_apply_serial(*rank, *weight, sums, 2, 1e-6)
        for rank, weight in zip(ranks, weights, strict=True)
    ]
    for index, (x, weight) in enumerate(((query, query_weight), (key, key_weight))):
        found = torch.cat([part[index] for part in parts], 1)
        whole = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        assert torch.allclose(found, whole, atol=1e-5)

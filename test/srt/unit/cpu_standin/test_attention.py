"""Attention in torch, against a reference for one head and one query at a time."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_standin import attention

HEADS, KV_HEADS, SCALE = 4, 2, 0.5
REQUESTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=3)
"""Tokens before a request's queries, and number of queries."""


def alone(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cap: float = 0.0,
    sink: float | None = None,
) -> torch.Tensor:
    """Return the output of one query of one head over the tokens that it may see."""
    scores = [float(key @ query) * SCALE for key in keys]
    if cap:
        scores = [cap * math.tanh(score / cap) for score in scores]
    parts = [math.exp(score) for score in scores]
    whole = sum(parts) + (math.exp(sink) if sink is not None else 0.0)
    return sum(part / whole * value for part, value in zip(parts, values, strict=True))


@given(REQUESTS, st.sampled_from([-1, 0, 2, 5]), st.sampled_from([0.0, 1.5]), st.booleans())
def test_each_query_reads_its_own_tokens(
    requests: list[tuple[int, int]], window: int, cap: float, has_sinks: bool
) -> None:
    """Guards against queries that see later keys, keys before their window or keys of another
    request; and against scores without their cap or sink."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 64, KV_HEADS, 8)
    counts = [new for _, new in requests]
    slots = [torch.randperm(64)[: before + new] for before, new in requests]
    query, sinks = torch.randn(sum(counts) + 1, HEADS, 8), torch.randn(HEADS)
    found = attention.attend(
        *(query, keys, values, slots, counts, SCALE),
        window=window, cap=cap, sinks=sinks if has_sinks else None,
    )  # fmt: skip
    at = 0
    for request, (before, new) in zip(slots, requests, strict=True):
        for position in range(before, before + new):
            first = max(0, position - window) if window >= 0 else 0
            seen = request[first : position + 1]
            for head in range(HEADS):
                sink = float(sinks[head]) if has_sinks else None
                of_head = keys[seen, head // 2], values[seen, head // 2]
                expected = alone(query[at, head], *of_head, cap, sink)
                assert torch.allclose(found[at, head], expected, atol=1e-5)
            at += 1
    assert not found[at:].any()  # padding


def test_a_query_sees_what_the_index_chose() -> None:
    """Guards against a choice that is read as slots, against -1 that is read as the last token, and
    against a query that sees later tokens."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 16, 1, 8)
    slots, query = torch.randperm(16)[:6], torch.randn(2, 1, 8)
    chosen = torch.tensor([[3, 0, -1], [5, 1, 4]], dtype=torch.int32)
    found = attention.attend(query, keys, values, [slots], [2], SCALE, chosen=chosen)
    for at, seen in enumerate(([0, 3], [1, 4, 5])):
        expected = alone(query[at, 0], keys[slots[seen], 0], values[slots[seen], 0])
        assert torch.allclose(found[at, 0], expected, atol=1e-5)


def test_fp8_rows_are_read_as_what_they_are() -> None:
    """Guards against bytes that are read as values."""
    pool = torch.randn(8, 2, 4).to(torch.float8_e4m3fn)
    slots = torch.tensor([5, 0, 7])
    assert torch.equal(attention.rows(pool, slots), pool.float()[slots])


class Backend:
    """A backend with the passes of ``TorchNativeAttnBackend``."""

    def forward_extend(self, *args: Any, **more: Any) -> str:
        return "stock"

    forward_decode = forward_extend


def forwarded(pool_dtype: torch.dtype = torch.float32, mode: str = "EXTEND", **changes: Any) -> Any:
    """Return the edited backend's output for two tokens of one request."""
    module = SimpleNamespace(TorchNativeAttnBackend=type("Edited", (Backend,), {}))
    attention.edit(module)
    layer = {"layer_id": 0, "sliding_window_size": None, "logit_cap": 0.0, "scaling": SCALE}
    layer |= {"tp_q_head_num": 1, "qk_head_dim": 4}
    options = {name: changes.pop(name) for name in ("sinks", "topk_indices") if name in changes}
    buffer = torch.ones(8, 1, 4).to(pool_dtype)
    pool = SimpleNamespace(
        get_key_buffer=lambda layer: buffer,
        get_value_buffer=lambda layer: buffer,
        set_kv_buffer=lambda *args: None,
    )
    batch = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(8)[None]),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([2]),
        extend_seq_lens=torch.tensor([2]),
        out_cache_loc=torch.tensor([0, 1]),
        spec_info=SimpleNamespace(draft_token_num=2),
        forward_mode=SimpleNamespace(
            name=mode,
            is_target_verify=lambda: mode == "TARGET_VERIFY",
            is_decode_or_idle=lambda: mode == "DECODE",
        ),
    )
    tokens = torch.ones(2, 4)
    backend = module.TorchNativeAttnBackend()
    return backend.forward_extend(
        tokens, tokens, tokens, SimpleNamespace(**{**layer, **changes}), batch, **options
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window_size": 3},
        {"logit_cap": 2.0},
        {"sinks": torch.zeros(1)},
        {"topk_indices": torch.zeros(2, 1, dtype=torch.int32)},
        {"pool_dtype": torch.float8_e4m3fn},
        {"mode": "TARGET_VERIFY"},
        {"mode": "DRAFT_EXTEND"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_sglang_lacks_is_computed_here(changes: dict[str, Any]) -> None:
    """Guards against a window, a sink or a choice that SGLang's own pass would silently ignore; all
    other passes stay SGLang's."""
    assert forwarded() == "stock"
    out = forwarded(**changes)
    # All values are one, and so is the output, except for the share of a sink.
    assert out.shape == (2, 4) and (out > 0).all() and (out <= 1 + 1e-6).all()

"""Closed forms against numbers worked out by hand from the published reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.agentic import capacity
from benchmark.agentic.capacity import GIB
from benchmark.kv_transfer import shapes

PR = {"prefix": 50_000, "suffix": 4500, "prefixes": 20}


CONFIG = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "torch_dtype": "bfloat16",
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}


def test_shape_from_a_config(tmp_path: Path) -> None:
    """A model folder gives the same shape as the entry by name; MLA is recognized by its latent
    rank."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert shapes.load(str(tmp_path)).token_bytes == 98_304
    assert shapes.load(str(tmp_path), "fp8_e4m3").token_bytes == 98_304 // 2
    assert shapes.from_config({**CONFIG, **LATENT}).token_bytes == 61 * 576 * 2
    with pytest.raises(ValueError, match="num_hidden_layers"):
        shapes.from_config({})


def test_requests_that_pools_hold() -> None:
    """11.5 GiB in a pool of 38 GiB: three requests, the limit that the report met. The pull
    request's pool holds 37 whole requests, and more than all 128 with shared prefixes. A pool too
    small for all prefixes gains nothing from sharing, where the formula would give a negative
    number."""
    holds, gib = capacity.holds, GIB / 98_304
    p99 = {"prefix": 0, "suffix": int(11.5 * gib), "prefixes": 1}
    assert holds(38 * gib, **p99, shared=False) == holds(38 * gib, **p99, shared=True) == 3
    pool = 37 * (54_500 + 355.4 / 2) / 0.99
    assert holds(pool, **PR, shared=False) == 37
    shared = holds(pool, **PR, shared=True, reserved=400)
    assert shared == (int(pool) - 20 * 50_000) // 4900 > 128
    assert holds(400_000, **PR, shared=True) == holds(400_000, **PR, shared=False) == 7

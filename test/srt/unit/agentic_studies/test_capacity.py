"""Closed forms against numbers worked out by hand from the published reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmark.agentic import capacity
from benchmark.agentic.capacity import GIB
from benchmark.kv_transfer import shapes

H20 = capacity.load_costs("qwen3-coder-30b-h20")
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
    """A model folder gives the same as the entry by name; MLA is told by its latent rank."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert shapes.load(str(tmp_path)).token_bytes == 98_304
    assert shapes.load(str(tmp_path), "fp8_e4m3").token_bytes == 98_304 // 2
    assert shapes.from_config({**CONFIG, **LATENT}).token_bytes == 61 * 576 * 2
    with pytest.raises(ValueError, match="num_hidden_layers"):
        shapes.from_config({})


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(2048, 0.0206), (32_768, 0.3209), (65_536, 1.8951), (131_072, 2.8351)]
)
def test_transfer_follows_the_measured_curve(tokens: int, seconds: float) -> None:
    """Bandwidth collapses beyond 3 GiB; a constant one would be off by three there."""
    assert H20.transfer_s(tokens) == pytest.approx(seconds)


def test_transfer_between_and_beyond_its_points() -> None:
    """Guards interpolation, and the bandwidth below the first point and beyond the last."""
    curve = replace(H20, kv_token_bytes=1, transfer=((100.0, 1.0), (300.0, 5.0)))
    assert [curve.transfer_s(n) for n in (0, 50, 100, 200, 600)] == [0, 0.5, 1.0, 3.0, 10.0]
    with pytest.raises(ValueError, match="increasing"):
        replace(H20, transfer=((2.0, 1.0), (1.0, 1.0)))


def test_what_pools_hold() -> None:
    """11.5 GiB in a pool of 38 GiB: three requests, which is the wall that the report met. Of the
    pull request's, 37 whole ones fill its pool; shared prefixes leave room for more than all 128. A
    pool too small for all prefixes gains nothing, where they would give a negative number."""
    holds, gib = capacity.holds, GIB / 98_304
    p99 = {"prefix": 0, "suffix": int(11.5 * gib), "prefixes": 1}
    assert holds(38 * gib, **p99, shared=False) == holds(38 * gib, **p99, shared=True) == 3
    pool = 37 * (54_500 + 355.4 / 2) / 0.99
    assert holds(pool, **PR, shared=False) == 37
    shared = holds(pool, **PR, shared=True, reserved=400)
    assert shared == (int(pool) - 20 * 50_000) // 4900 > 128
    assert holds(400_000, **PR, shared=True) == holds(400_000, **PR, shared=False) == 7


def test_capacity_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against numbers that are printed and not written, against a file that nobody asked
    for, and against costs of a model with other KV bytes, which would pass for numbers."""
    assert capacity.main([]) == 0
    assert capacity.main(["--out", str(tmp_path / "capacity.json")]) == 0
    found = json.loads((tmp_path / "capacity.json").read_text())
    committed = json.loads((capacity.FOLDER / "results/eight-h20.json").read_text())
    assert found["pool_tokens"] == 415_061
    assert found["isolation"] == committed["isolation"]
    assert capacity.main(["--model", "unknown"]) == 2
    capsys.readouterr()
    assert capacity.main(["--model", "qwen3-32b"]) == 2
    assert "--costs" in capsys.readouterr().err

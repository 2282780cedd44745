"""Closed forms against numbers worked out by hand from the published reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.agentic import capacity
from benchmark.agentic.capacity import GIB, Costs, Transfer, Workload
from benchmark.kv_transfer import shapes

H20 = capacity.load_costs("qwen3-coder-30b-h20")
PR = Workload(prefix=50_000, suffix=4500, prefixes=20)


def test_kv_bytes_of_the_reports_models() -> None:
    """A wrong factor (keys and values, heads, element size) would shift every other number."""
    assert shapes.load("qwen3-coder-30b-a3b").token_bytes == 98_304
    assert shapes.load("qwen3-32b", "fp8_e4m3").token_bytes == 64 * 2 * 8 * 128
    assert shapes.load("deepseek-v3").token_bytes == 61 * 576 * 2


def test_shape_from_a_config(tmp_path: Path) -> None:
    """A model folder gives the same as the entry by name; MLA is told by its latent rank."""
    config = {
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 2048,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shapes.load(str(tmp_path)).token_bytes == 98_304
    assert shapes.load(str(tmp_path), "fp8_e4m3").token_bytes == 98_304 // 2
    latent = {**config, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    assert shapes.from_config(latent).token_bytes == 61 * 576 * 2
    old = {k: v for k, v in config.items() if k not in ("head_dim", "num_key_value_heads")}
    assert shapes.from_config(old).token_bytes == 48 * 2 * 2048 * 2
    with pytest.raises(ValueError, match="num_hidden_layers"):
        shapes.from_config({})
    with pytest.raises(ValueError, match="KV type int3"):
        shapes.load("qwen3-32b", "int3")


@pytest.mark.parametrize(
    ("tokens", "prefill_s", "benefit_s"), [(2000, 0.14, 1.1), (33_000, 4.5, 36), (125_000, 57, 456)]
)
def test_isolation_benefit_is_a_prefill_for_each_stream(
    tokens: int, prefill_s: float, benefit_s: float
) -> None:
    """The published accounting was once bounded by a request's own decode, and wrong by 100x."""
    found = capacity.isolation(tokens, prefill_s, 0.0, streams=8)
    assert found.benefit_s == pytest.approx(benefit_s, rel=0.02)
    slowed = capacity.isolation(tokens, prefill_s, 0.0, streams=8, slowdown=2)
    assert slowed.benefit_s == pytest.approx(benefit_s / 2, rel=0.02)


def test_isolation_ratio_of_the_reports_middle_row() -> None:
    """33k tokens: 320 ms of transfer against 36 s is 0.9%."""
    found = capacity.isolation(33_000, 4.5, 0.320, streams=8)
    assert found.ratio == pytest.approx(0.009, abs=0.0002)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(2048, 0.0206), (32_768, 0.3209), (65_536, 1.8951), (131_072, 2.8351)]
)
def test_transfer_follows_the_measured_curve(tokens: int, seconds: float) -> None:
    """Bandwidth collapses beyond 3 GiB; a constant one would be off by three there."""
    assert H20.transfer_s(tokens) == pytest.approx(seconds)


def test_transfer_between_and_beyond_its_points() -> None:
    curve = Transfer(((100.0, 1.0), (300.0, 5.0)))
    assert [curve.seconds(n) for n in (0, 50, 100, 200, 600)] == [0, 0.5, 1.0, 3.0, 10.0]
    with pytest.raises(ValueError, match="increasing"):
        Transfer(((2.0, 1.0), (1.0, 1.0)))


@pytest.mark.parametrize(("tokens", "seconds"), [(2048, 0.14), (32_768, 4.5), (125_000, 57.0)])
def test_h20_prefill_meets_the_measurements_it_was_solved_from(tokens: int, seconds: float) -> None:
    assert H20.prefill_s(tokens) == pytest.approx(seconds, rel=0.01)


def test_p99_request_against_the_decode_pool() -> None:
    """11.5 GiB in a pool of 38 GiB: three requests, which is the wall that the report met."""
    token_bytes = 98_304
    pool = capacity.pool_tokens(38 * GIB, token_bytes)
    assert pool == 415_061
    p99 = Workload(prefix=0, suffix=capacity.pool_tokens(11.5 * GIB, token_bytes), prefixes=1)
    assert capacity.holds(p99, pool, shared=False) == 3
    assert capacity.holds(p99, pool, shared=True) == 3, "nothing to share"


def test_what_the_pull_requests_pool_holds() -> None:
    """37 whole requests fill it; 20 prefixes and suffixes leave room for more than all 128."""
    pool = 37 * (54_500 + 355.4 / 2) / 0.99
    assert capacity.holds(PR, pool, shared=False) == 37
    shared = capacity.holds(PR, pool, shared=True, reserved=400)
    assert shared == (int(pool) - 20 * 50_000) // 4900
    assert shared > 128


def test_a_pool_too_small_for_all_prefixes_gains_nothing() -> None:
    """Counting as if all prefixes fitted would give a negative number of requests."""
    assert (
        capacity.holds(PR, 400_000, shared=True) == capacity.holds(PR, 400_000, shared=False) == 7
    )


def test_costs_need_a_source_for_every_number() -> None:
    """A number without its origin is an invented one."""
    with pytest.raises(ValueError, match="prefill_token_s"):
        fields = {f: getattr(H20, f) for f in H20.__struct_fields__}
        fields["sources"] = {k: v for k, v in H20.sources.items() if k != "prefill_token_s"}
        Costs(**fields)
    with pytest.raises(ValueError, match="--costs nowhere"):
        capacity.load_costs("nowhere")


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

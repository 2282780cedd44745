"""Predictions as they are today, so that a change of the model shows what it does to them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmark.agentic.model import calibrate, capacity
from benchmark.agentic.model import costs as cost_files
from benchmark.agentic.model import simulate as simulate_cli
from benchmark.agentic.model.sim.decode import DecodeConfig
from benchmark.agentic.model.sim.fleet import Fleet, FleetConfig
from benchmark.agentic.model.sim.jobs import SharedPrefixes
from benchmark.agentic.model.sim.outcome import Outcome, outcome
from benchmark.agentic.model.sim.prefill import PrefillConfig
from benchmark.traces.generate import generate
from benchmark.traces.read import write

pytestmark = pytest.mark.slow


def test_the_pull_requests_benchmark_from_its_stock_arm() -> None:
    """sgl-project/sglang#19746: 3P1D, 20 prefixes, 128 at once. Prefill and steps were scaled to
    the published rate and ITL of the stock arm; its batch, and the radix arm, follow from them."""
    load = SharedPrefixes(1000, 20, 50_000, 4500, 355.4, 500, 100, block=500)
    pool = round(37 * (54_500 + 355.4 / 2) / 0.99)  # 37 requests with half of their answers
    roofline = cost_files.load("qwen3-32b-b200-roofline")
    scales = {
        "prefill_token_s": 5.12,
        "prefill_pair_s": 5.12,
        "step_s": 3.58,
        "step_context_s": 3.58,
    }
    costs = msgspec.structs.replace(
        roofline, **{name: scale * getattr(roofline, name) for name, scale in scales.items()}
    )

    def simulated(radix: bool) -> Outcome:
        decode = DecodeConfig(pool, radix, reserved=400, page=64)
        prefill = PrefillConfig(pool, chunk=32_768)
        config = FleetConfig(prefill, decode, 3, prefill_policy="round_robin", block_tokens=500)
        return outcome(Fleet(config, costs).run(load.jobs(), 128, sample_s=1.0))

    stock, radix = simulated(False), simulated(True)
    assert stock.requests_per_s == pytest.approx(1.23, abs=0.01)
    assert stock.peak_running == 37
    assert 1e3 * stock.itl.mean == pytest.approx(66.5, abs=0.5)
    assert radix.requests_per_s / stock.requests_per_s == pytest.approx(1.13, abs=0.02)
    assert radix.peak_running == 128
    assert radix.middle_in_use == pytest.approx(0.79, abs=0.03)
    assert radix.retracted == stock.retracted == 0


def test_costs_of_a_run_are_found_in_its_records(tmp_path: Path) -> None:
    """Prefill of 0.1 ms a token and 1 us a pair behind 20 ms; steps of 2 + 0.5 ms a request."""
    lines, at = [{"header": "of the run"}], 0.0

    def answer(began: float, prompt: int, cached: int, end: float, tpot: float) -> None:
        new = prompt - cached
        ttft = 0.02 + 1e-4 * new + 1e-6 * new * (cached + new / 2)
        record = {"prompt_tokens": prompt, "cached_tokens": cached, "started_s": began}
        record |= {"first_token_s": began + ttft, "finished_s": end, "output_tokens": 20}
        lines.append(record | {"tpot_s": tpot, "arm": "a"})

    for prompt, cached in ((100, 0), (500, 0), (900, 0), (1000, 900), (2000, 1500), (3000, 0)):
        for batch in (1, 4):
            answer(at, prompt, cached, at + 200, 0.002 + 0.0005 * batch)
            for _ in range(batch - 1):  # they begin together after the first one has begun
                answer(at + 30, 100, 0, at + 200, 0.002 + 0.0005 * batch)
            at += 1000
    # One that waited behind another, which timed out: it was not alone.
    answer(at, 1000, 0, at + 200, 0.0025)
    lines[-1]["first_token_s"] += 30
    lines.append({"prompt_tokens": 9000, "started_s": at - 9, "finished_s": at + 51, "arm": "a"})
    lines[-1]["error"] = "timeout"
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = calibrate.read([file], "a")
    assert calibrate.prefill(runs) == pytest.approx((1e-4, 1e-6, 0.02), rel=1e-3)
    fixed, request, _ = calibrate.step(runs)
    assert (fixed, request) == pytest.approx((0.002, 0.0005), rel=0.15)
    out = tmp_path / "costs.yaml"
    arguments = [str(file), "--model", "qwen3-32b", "--out", str(out)]
    assert calibrate.main(arguments) == 0
    assert cost_files.load(str(out)).kv_token_bytes == 262_144
    assert calibrate.main([*arguments, "--arm", "nobody"]) == 2


def test_capacity_command_writes_its_results(tmp_path: Path) -> None:
    assert capacity.main(["--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "capacity.json").read_text())
    assert found["pool_tokens"] == 415_061
    assert capacity.main(["--model", "unknown", "--out", str(tmp_path)]) == 2


def test_a_model_with_the_costs_of_another_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs hold for the KV bytes that they were measured with; others would pass for numbers."""
    assert capacity.main(["--model", "qwen3-32b", "--out", str(tmp_path)]) == 2
    assert "--costs" in capsys.readouterr().err


def test_simulate_command_writes_a_line_an_arm(tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", generate(60))
    arguments = ["--trace", str(tmp_path / "trace.jsonl"), "--rate", "5", "--split", "2", "5"]
    arguments += ["--aggregated", "--out", str(tmp_path)]
    assert simulate_cli.main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "simulate.jsonl").read_text().splitlines()]
    assert len(rows) == 2 + 2 * 3
    assert all(row["outcome"]["requests"] == 60 for row in rows)
    assert (tmp_path / "splits-ttft.png").exists()
    assert simulate_cli.main(["--split", "8", "--out", str(tmp_path)]) == 2

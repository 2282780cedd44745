"""Predictions as they are today, so that a change of the model shows what it does to them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmark.agentic.capacity import calibrate, check, published
from benchmark.agentic.capacity import cli as capacity
from benchmark.agentic.capacity import costs as cost_files
from benchmark.agentic.capacity import simulate as simulate_cli
from benchmark.agentic.capacity.calibrate import Prefilled, Stepped
from benchmark.agentic.capacity.sim.fit import scaled

pytestmark = pytest.mark.slow


def test_the_pull_requests_benchmark_from_its_stock_arm() -> None:
    """The scales were fitted to the stock arm; the radix arm follows from them."""
    costs = scaled(cost_files.load("qwen3-32b-b200-roofline"), prefill=5.12, step=3.58)
    stock = published.simulate(costs, radix=False)
    radix = published.simulate(costs, radix=True)
    assert stock.requests_per_s == pytest.approx(1.23, abs=0.01)
    assert stock.peak_running == 37
    assert 1e3 * stock.itl.mean == pytest.approx(66.5, abs=0.5)
    assert radix.requests_per_s / stock.requests_per_s == pytest.approx(1.13, abs=0.02)
    assert radix.peak_running == 128
    assert radix.middle_in_use == pytest.approx(0.79, abs=0.03)
    assert radix.retracted == stock.retracted == 0


def test_the_cpu_rigs_peaks_are_predicted() -> None:
    """What fits into the pool follows from sizes alone, whatever the costs."""
    load, arms = check.read_arms(json.loads(check.MEASURED.read_text()))
    costs = cost_files.load("cpu-rig")
    peaks = {name: check.simulate(load, arms, name, costs).peak_running for name in arms}
    assert peaks == {"stock": 2, "flag": 11, "flag capped": 2}


def test_fit_of_costs_finds_what_made_the_times() -> None:
    """Prefill of 1 ms a batch, 0.1 ms a token, 1 us a pair behind 20 ms; steps of 2 + 0.5 ms."""
    seen = [
        Prefilled(n, new, context, 0.0)
        for n, new, context in ((1, 100, 0), (1, 500, 0), (1, 900, 0), (1, 100, 900), (8, 100, 900))
    ]
    timed = [
        dataclasses.replace(
            s,
            seconds=0.02
            + 0.001 * -(-s.requests * s.new // 512)
            + s.requests * (1e-4 * s.new + 1e-6 * s.new * (s.context + s.new / 2)),
        )
        for s in seen
    ]
    assert calibrate.fit_prefill(timed, 512) == pytest.approx((0.001, 1e-4, 1e-6, 0.02), rel=1e-3)
    steps = [Stepped(b, c, 0.002 + 0.0005 * b) for b in (1, 4, 8) for c in (100.0, 900.0)]
    assert calibrate.fit_step(steps) == pytest.approx((0.002, 0.0005, 0.0), abs=1e-9)


def test_capacity_command_writes_its_results(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps({**line, "timestamp": 1000 * i}) + "\n" for i in range(9)))
    assert capacity.main(["--out", str(tmp_path), "--trace", str(trace)]) == 0
    found = json.loads((tmp_path / "capacity.json").read_text())
    assert found["pool_tokens"] == 415_061 and len(found["splits"]["radix"]) == 7
    assert (tmp_path / "capacity.png").stat().st_size > 0
    assert capacity.main(["--model", "unknown", "--out", str(tmp_path)]) == 2


def test_simulate_command_writes_a_line_an_arm(tmp_path: Path) -> None:
    arguments = ["--generate", "60", "--rate", "5", "--split", "2", "5", "--out", str(tmp_path)]
    assert simulate_cli.main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "simulate.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 3
    assert all(row["outcome"]["requests"] == 60 for row in rows)
    assert (tmp_path / "splits-ttft.png").exists()
    assert simulate_cli.main(["--split", "8", "--out", str(tmp_path)]) == 2

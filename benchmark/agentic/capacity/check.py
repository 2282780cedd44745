"""Prediction against measurement on the CPU rig: costs from one arm, the other arms predicted.

    python -m benchmark.agentic.capacity.check [--measured throughput.summary.json] [--from stock]

The measurement is a summary that ``python -m benchmark.decode_radix_cache throughput`` wrote (by
default one that is kept beside the results, so that they stay what they were made from): 24
requests at once over two prefixes that nearly fill the decode pool. Prefill and steps are scaled
until the simulated arm has that arm's requests a second and ITL. What part of a step grows with
the batch is assumed both ways: none of it, and all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console

from benchmark.agentic.capacity import costs as cost_files
from benchmark.agentic.capacity.costs import Costs
from benchmark.agentic.capacity.sim.decode import DecodeConfig
from benchmark.agentic.capacity.sim.fit import Quantities, Target, fit, print_errors
from benchmark.agentic.capacity.sim.fleet import Fleet, FleetConfig
from benchmark.agentic.capacity.sim.jobs import SharedPrefixes
from benchmark.agentic.capacity.sim.outcome import Outcome, outcome
from benchmark.agentic.capacity.sim.prefill import PrefillConfig
from benchmark.decode_radix_cache.throughput import Load
from benchmark.harness import report

MEASURED = Path(__file__).parent / "results" / "cpu-rig.throughput.summary.json"


@dataclass(frozen=True)
class Arm:
    """Medians over an arm's runs."""

    requests_per_s: float
    itl_p50_s: float
    ttft_p50_s: float
    peak_running: float


def read_arms(summary: Mapping[str, Any]) -> tuple[Load, dict[str, Arm]]:
    """Load and arms of a throughput summary."""
    arms = {
        name: Arm(
            median(run["summary"]["requests_per_s"] for run in runs),
            median(run["summary"]["itl_s"]["p50"] for run in runs),
            median(run["summary"]["ttft_s"]["p50"] for run in runs),
            median(run["peak_running"] for run in runs),
        )
        for name, runs in summary["runs"].items()
    }
    return Load(**summary["load"]), arms


def simulate(load: Load, arms: Mapping[str, Arm], name: str, costs: Costs) -> Outcome:
    """One arm of the throughput benchmark."""
    workload = SharedPrefixes(
        load.requests,
        load.groups,
        load.prefix_tokens,
        load.suffix_tokens,
        load.generated_tokens,
        block_tokens=load.suffix_tokens,
        in_turn=True,
    )
    radix = name.startswith("flag")
    capped = name == "flag capped"
    config = FleetConfig(
        PrefillConfig(load.prefill_pool, load.chunked_prefill_tokens),
        DecodeConfig(
            load.decode_pool,
            radix,
            load.reserved_decode_tokens,
            int(arms["stock"].peak_running) if capped else load.max_running,
            gentle=radix,
        ),
        block_tokens=workload.block_tokens,
    )
    return outcome(Fleet(config, costs).run(workload.jobs(load.seed), load.requests, sample_s=0.05))


def assumptions(costs: Costs) -> dict[str, Costs]:
    """Starting points whose scale the arm gives: a step that does not grow, and one that does."""
    replace = msgspec.structs.replace
    return {
        "steps do not grow": replace(costs, step_s=0.004, step_request_s=0.0, step_context_s=0.0),
        "steps grow with the batch": replace(
            costs, step_s=0.0, step_request_s=0.002, step_context_s=0.0
        ),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic.capacity.check")
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--from", dest="base", default="stock", help="arm that gives the costs")
    parser.add_argument("--costs", default="cpu-rig", help="what the scales start from")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    console = Console()
    load, arms = read_arms(json.loads(args.measured.read_text()))
    base = cost_files.load(args.costs)
    found: dict[str, dict[str, Outcome]] = {
        "costs as calibrate measured them": {n: simulate(load, arms, n, base) for n in arms}
    }
    target = Target(arms[args.base].requests_per_s, arms[args.base].itl_p50_s)
    for name, start in assumptions(base).items():
        try:
            fitted = fit(
                start,
                target,
                lambda costs: simulate(load, arms, args.base, costs),
                itl=lambda o: o.itl.p50,
            )
        except ValueError as error:
            console.print(f"[yellow]{name}: {error}[/]")
            continue
        found[f"from {args.base}; {name}"] = {
            n: simulate(load, arms, n, fitted.costs) for n in arms
        }
    quantities: Quantities[Arm] = {
        "requests/s": (lambda o: o.requests_per_s, lambda a: a.requests_per_s),
        "peak running": (lambda o: o.peak_running, lambda a: a.peak_running),
        "ITL p50, ms": (lambda o: 1e3 * o.itl.p50, lambda a: 1e3 * a.itl_p50_s),
        "TTFT p50, s": (lambda o: o.ttft.p50, lambda a: a.ttft_p50_s),
    }
    for name, outcomes in found.items():
        print_errors(name, arms, outcomes, quantities, {}, console)
    report.write_summary(
        args.out / "check.json",
        {"measured": arms, "load": load, "predicted": found},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

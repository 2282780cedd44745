"""The upstream pull request's benchmark, predicted from its stock arm.

    python -m benchmark.agentic.capacity.published

sgl-project/sglang#19746: 8 GPUs, three prefill workers and one decode worker with TP2, 20 prefixes
of 50,000 tokens, suffixes of 4,500, 1,000 requests, 128 at once. Of the stock arm are used: 37
running requests at a pool usage of 0.99 (which gives the pool), requests a second (which gives
prefill's speed) and mean ITL (decode's). The arms with the radix cache are then predicted.

What part of a decode step grows with the batch cannot be read from one arm, so it is assumed in
three ways: every part of the roofline slowed alike (``efficiency``), memory at its peak and all
else fixed (``overhead``), and, with the radix arm's ITL as one more given number, in between.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmark.agentic.capacity import costs as cost_files
from benchmark.agentic.capacity.costs import Costs, Transfer
from benchmark.agentic.capacity.sim.decode import DecodeConfig
from benchmark.agentic.capacity.sim.fit import (
    PREFILL,
    STEP,
    Fit,
    Quantities,
    Target,
    fit,
    print_errors,
)
from benchmark.agentic.capacity.sim.fleet import Fleet, FleetConfig
from benchmark.agentic.capacity.sim.jobs import SharedPrefixes
from benchmark.agentic.capacity.sim.outcome import Outcome, outcome
from benchmark.agentic.capacity.sim.prefill import PrefillConfig
from benchmark.harness import plot, report

#: aiperf's flags in the pull request; answers as long as they were, 355.4 tokens on average.
WORKLOAD = SharedPrefixes(
    requests=1000,
    prefixes=20,
    prefix_tokens=50_000,
    suffix_tokens=4500,
    suffix_spread=500,
    output_tokens=355.4,
    output_spread=100,
    block_tokens=500,
)
CONCURRENCY = 128
#: 37 requests with half of their answers, at usage 0.99.
POOL = round(37 * (54_500 + 355.4 / 2) / 0.99)


@dataclass(frozen=True)
class Arm:
    """What the pull request says of an arm: jobs 12488, 12487 and 12490, run for one comparison."""

    radix: bool
    max_running: int
    requests_per_s: float
    ttft_p50_s: float
    itl_mean_s: float
    itl_p50_s: float
    latency_p50_s: float
    running: tuple[int, int]
    """As the decode logs say: of steady state, from and to."""


PUBLISHED = {
    "stock": Arm(False, 256, 1.2312, 72.417, 0.06646, 0.07406, 98.681, (37, 37)),
    "radix": Arm(True, 256, 1.6196, 7.297, 0.13069, 0.16691, 71.844, (104, 126)),
    "radix, 64 running": Arm(True, 64, 1.5485, 39.534, 0.07904, 0.09181, 73.956, (59, 64)),
}

QUANTITIES: Quantities[Arm] = {
    "requests/s": (lambda o: o.requests_per_s, lambda a: a.requests_per_s),
    "ITL mean, ms": (lambda o: 1e3 * o.itl.mean, lambda a: 1e3 * a.itl_mean_s),
    "ITL p50, ms": (lambda o: 1e3 * o.itl.p50, lambda a: 1e3 * a.itl_p50_s),
    "TTFT p50, s": (lambda o: o.ttft.p50, lambda a: a.ttft_p50_s),
    "latency p50, s": (lambda o: o.latency.p50, lambda a: a.latency_p50_s),
    "running, peak": (lambda o: o.peak_running, lambda a: a.running[1]),
}
MORE: dict[str, Callable[[Outcome], float]] = {
    "running, middle half": lambda o: o.middle_running,
    "running, mean": lambda o: o.mean_running,
    "pool in use": lambda o: o.middle_in_use,
    "prefill busy": lambda o: o.prefill_busy,
    "link busy": lambda o: o.link_busy,
    "stalled by the link, mean, s": lambda o: o.stages["stalled"].mean,
}


def simulate(costs: Costs, radix: bool, max_running: int = 256, seed: int = 0) -> Outcome:
    """One arm. The front end is started without a routing mode: round robin."""
    config = FleetConfig(
        # The prefill servers are started with the same memory.
        PrefillConfig(pool=POOL, chunk=32_768),
        DecodeConfig(POOL, radix=radix, reserved=400, max_running=max_running, page=64),
        prefill_workers=3,
        prefill_policy="round_robin",
        block_tokens=WORKLOAD.block_tokens,
    )
    return outcome(Fleet(config, costs).run(WORKLOAD.jobs(seed), CONCURRENCY, sample_s=1.0))


def predictions(seed: int = 0) -> dict[str, Fit]:
    """Costs at which the simulated stock arm is as fast as the published one, by assumption."""
    roofline = cost_files.load("qwen3-32b-b200-roofline")
    slow_wire = msgspec.structs.replace(roofline, transfer=Transfer(((20e9, 1.0),)))
    return {
        "efficiency": _fit(roofline, seed),
        "overhead": _fit(roofline, seed, ("step_s",)),
        "efficiency, 20 GB/s": _fit(slow_wire, seed),
        "both ITLs": _both(roofline, seed),
    }


def _fit(costs: Costs, seed: int, step_fields: Sequence[str] = STEP) -> Fit:
    stock = PUBLISHED["stock"]
    target = Target(stock.requests_per_s, stock.itl_mean_s)
    return fit(
        costs, target, lambda c: simulate(c, radix=False, seed=seed), step_fields=step_fields
    )


def _both(costs: Costs, seed: int) -> Fit:
    """The fixed part of a step at which the radix arm has its published ITL too."""
    low, high = costs.step_s, 50 * costs.step_s
    for _ in range(7):
        middle = (low * high) ** 0.5
        found = _fit(msgspec.structs.replace(costs, step_s=middle), seed)
        if simulate(found.costs, radix=True, seed=seed).itl.mean > PUBLISHED["radix"].itl_mean_s:
            low = middle
        else:
            high = middle
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic.capacity.published")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console()
    found: dict[str, dict[str, object]] = {}
    gains = {"published": PUBLISHED["radix"].requests_per_s / PUBLISHED["stock"].requests_per_s}
    for name, fitted in predictions(args.seed).items():
        outcomes = {
            arm: simulate(fitted.costs, told.radix, told.max_running, args.seed)
            for arm, told in PUBLISHED.items()
        }
        title = (
            f"{name}, prefill {fitted.prefill_scale:.1f} and steps {fitted.step_scale:.1f} times "
            "the starting costs"
        )
        print_errors(title, PUBLISHED, outcomes, QUANTITIES, MORE, console)
        gains[name] = outcomes["radix"].requests_per_s / outcomes["stock"].requests_per_s
        found[name] = {
            "gain": gains[name],
            "prefill_scale": fitted.prefill_scale,
            "step_scale": fitted.step_scale,
            "costs": {k: f"{getattr(fitted.costs, k):.4g}" for k in (*PREFILL, *STEP)},
            "arms": outcomes,
        }
    report.write_summary(
        args.out / "published.json",
        {"pool_tokens": POOL, "seed": args.seed, "published": PUBLISHED, "predicted": found},
    )
    plot.bars(args.out / "published.png", {"requests/s with the radix cache over stock": gains})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

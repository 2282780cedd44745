"""``python -m benchmark.admission``; README.md beside it says more."""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmark.harness.command import status
from benchmark.harness.environment import describe
from benchmark.harness.report import percentile, print_table, write_summary

RUNNING = (0, 64, 256, 512)
PAGES = (1, 64)
#: Requests that one step admits, and that the queue leaves room for. Zero: its head is blocked.
ADMITS = (0, 1, 4)
ARMS = ("stock", "ours")


# Any: arms need torch and SGLang, which --help does without.
def measure(arms: dict[str, Any], admits: int, steps: int) -> dict[str, dict[str, float]]:
    """Both arms by turns; microseconds of a step, and what it matched."""
    from benchmark.admission.arms import Step

    for arm in arms.values():
        arm.room_for(admits)
        for _ in range(3):
            arm.between()
            arm.step()
            arm.put_back()
    gc.collect()
    gc.freeze()
    times: dict[str, list[Step]] = {name: [] for name in arms}
    matches: dict[str, list[int]] = {name: [] for name in arms}
    for _ in range(steps):
        for name, arm in arms.items():
            arm.between()
            times[name].append(arm.step())
            matches[name].append(arm.matches)
            admitted = arm.put_back()
            assert admitted == admits, f"{name}: {admitted} admitted where {admits} fit"
    return {
        name: {
            **{
                f"{clock}_{name_of}_us": value
                for clock in Step._fields
                for name_of, value in _numbers([getattr(t, clock) for t in times[name]]).items()
            },
            "matches_median": median(matches[name]),
            "matches_max": max(matches[name]),
        }
        for name in arms
    }


def _numbers(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "p99": percentile(values, 99)}


def run(args: argparse.Namespace, console: Console) -> int:
    """All cases; a table, and a summary in ``args.out``."""
    from benchmark.admission.arms import Ours, Stock
    from benchmark.admission.parts import Load, one_rank
    from benchmark.harness.without_engine import set_arguments

    builders = dict(zip(ARMS, (Stock, Ours), strict=True))
    cases: list[dict[str, Any]] = []
    with one_rank():
        for page in args.pages:
            set_arguments(page)
            loads = [Load(page=page, running=running) for running in args.running]
            loads.append(replace(loads[-1], queued=args.line))
            # Long tails: shorter ones are not waited for.
            copies = {"queued": 10 * args.copies, "copies": args.copies, "depth": 20}
            loads.append(replace(loads[-1], **copies))
            for load in loads:
                arms = {name: build(load) for name, build in builders.items()}
                for admits in ADMITS if load.copies == 1 else (0,):
                    steps = args.steps if admits == 0 else args.steps // 4
                    case = {"page": page, "running": load.running, "admits": admits}
                    case |= {"queued": load.queued, "copies": load.copies, "steps": steps}
                    cases.append(case | measure(arms, admits, steps))
    summary = {"machine": describe(), "cases": cases}
    write_summary(args.out / f"{args.name}.summary.json", summary)
    _print(cases, console)
    return 0


def _print(cases: list[dict[str, Any]], console: Console) -> None:
    rows = [
        [
            f"page {case['page']}, {case['running']} running, {case['queued']} in line"
            + f", {case['copies']} of each" * (case["copies"] > 1),
            str(case["admits"]),
            *(
                f"{case[name]['cpu_median_us']:,.0f} / {case[name]['cpu_p99_us']:,.0f}"
                for name in ARMS
            ),
            f"{case['ours']['cpu_median_us'] - case['stock']['cpu_median_us']:,.0f}",
            f"{case['ours']['matches_median']:.0f} / {case['ours']['matches_max']}",
        ]
        for case in cases
    ]
    columns = ["", "admits", "stock", "ours", "over stock", "matches"]
    print_table("One step, microseconds of CPU: median / p99", columns, rows, console)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.admission")
    add = parser.add_argument
    add(
        "--steps",
        type=int,
        default=1000,
        help="blocked steps per arm; a quarter of that in cases with admissions",
    )
    add("--pages", type=int, nargs="+", default=list(PAGES), help="page sizes")
    add("--running", type=int, nargs="+", default=list(RUNNING), help="running requests")
    add(
        "--line",
        type=int,
        default=10_000,
        help="waiting requests, in the last cases of each page size",
    )
    add(
        "--copies",
        type=int,
        default=64,
        help="copies of each of ten waiting prompts, in the same cases",
    )
    add("--name", default="admission", help="file name of the summary")
    add("--out", type=Path, default=Path("out/admission"), help="folder of the summary")
    args, console = parser.parse_args(), Console(width=110)
    return status(lambda: run(args, console), console)


if __name__ == "__main__":
    sys.exit(main())

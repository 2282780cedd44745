"""``python -m benchmark.admission``; described in README.md in this folder."""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from benchmark.admission import page
from benchmark.harness.command import status
from benchmark.harness.environment import describe
from benchmark.harness.report import percentile, print_table, write_summary

RUNNING = [0, 64, 256, 512]
PAGES = [1, 64]
#: Page sizes of the cases with decode's writes.
WRITES_PAGES = [16, 64]
#: Requests that fit, and are admitted, in one step. Zero: the head of the queue is blocked.
ADMITS = (0, 1, 4)
#: Waiting requests in the case with a long queue.
LINE = 10_000


# Any: the arms need torch and SGLang, which must not be imported for --help.
def measure(arms: dict[str, Any], admits: int, steps: int) -> dict[str, dict[str, float]]:
    """Measure both arms alternately. Return microseconds and matched prompts of a step, by arm."""
    for arm in arms.values():
        arm.room_for(admits)
        for _ in range(3):
            arm.between()
            arm.step()
            arm.put_back()
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in arms}
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
            "cpu_mean_us": mean(times[name]),
            "cpu_median_us": median(times[name]),
            "cpu_p99_us": percentile(times[name], 99),
            "matches_median": median(matches[name]),
            "matches_max": max(matches[name]),
        }
        for name in arms
    }


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure all cases, print a table, and write a summary to ``args.out``."""
    from benchmark.admission.arms import Load, Ours, Stock, one_rank
    from benchmark.harness.without_engine import set_arguments

    cases: list[dict[str, Any]] = []
    with one_rank():
        for tokens in args.pages or PAGES:
            set_arguments(tokens)
            loads = [Load(page=tokens, running=running) for running in args.running]
            loads.append(replace(loads[-1], queued=LINE))
            for load in loads:
                arms = {"stock": Stock(load), "ours": Ours(load)}
                for admits in ADMITS:
                    steps = args.steps if admits == 0 else args.steps // 4
                    case = {"page": tokens, "running": load.running, "admits": admits}
                    case |= {"queued": load.queued, "steps": steps}
                    cases.append(case | measure(arms, admits, steps))
    write_summary(args.out / "admission.json", {"machine": describe(), "cases": cases})
    title = "One step, microseconds of CPU: median / p99"
    print_table(title, page.COLUMNS, page.rows(cases), console)
    return 0


def run_writes(args: argparse.Namespace, console: Console) -> int:
    """Measure steps in which a request ends, without and with decode's writes."""
    from benchmark.admission.arms import Load, one_rank
    from benchmark.admission.writes import With, Without
    from benchmark.harness.without_engine import set_arguments

    cases: list[dict[str, Any]] = []
    with one_rank():
        for tokens in args.pages or WRITES_PAGES:
            set_arguments(tokens)
            load = Load(page=tokens, running=max(args.running))
            case = {"page": tokens, "running": load.running, "steps": args.steps}
            arms = {"without": Without(load), "with": With(load)}
            cases.append(case | measure(arms, 0, args.steps))
    write_summary(args.out / "writes.json", {"machine": describe(), "cases": cases})
    title = "One step in which a request ends, microseconds of CPU: mean / median / p99"
    print_table(title, page.WRITES_COLUMNS, page.writes_rows(cases), console)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.admission")
    add = parser.add_argument
    add(
        "--steps",
        type=int,
        default=1000,
        help="blocked steps per arm; a quarter of that in cases with admissions",
    )
    add("--pages", type=int, nargs="+", help="page sizes")
    add("--running", type=int, nargs="+", default=RUNNING, help="running requests")
    add("--writes", action="store_true", help="measure only the cost of decode's writes to a store")
    add("--out", type=Path, default=Path("out/admission"), help="folder of the summary")
    args, console = parser.parse_args(), Console(width=110)
    return status(lambda: (run_writes if args.writes else run)(args, console), console)


if __name__ == "__main__":
    sys.exit(main())

"""Cut a smaller trace that shares as much.

    python -m benchmark.agentic sample FILE [OUT] [--window-seconds S] [--sample-ratio R] [...]
    python -m benchmark.agentic sample FILE --compare     # beside as many requests at random

Two passes over the file: one looks which sessions begin when and share what, one takes those
chosen.
A trace that names no sessions is given some (see ``benchmark.traces.sessions``).
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from benchmark.agentic.sample.command import Source, reporting, whole
from benchmark.agentic.sample.describe import Description, describe, print_table
from benchmark.agentic.sample.select import (
    Plan,
    Selection,
    chosen,
    random_requests,
    window_and_thin,
)
from benchmark.agentic.sample.window import requests_of
from benchmark.harness.report import write_summary
from benchmark.traces.read import write
from benchmark.traces.record import BLOCK_TOKENS


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    began = time.perf_counter()
    with reporting(), tempfile.TemporaryDirectory() as scratch:
        plan = Plan(
            window_s=args.window_seconds,
            window_start_s=args.window_start,
            ratio=args.sample_ratio,
            thin_by=args.thin_by,
            max_single_turn=args.max_single_turn_ratio,
            seed=args.seed,
        )
        source = Source(args.file, args.block_tokens)
        if args.out and args.out.resolve() == args.file.resolve():
            raise ValueError(f"{args.out} would overwrite the trace that it is taken from")
        full = source.survey()
        selections: dict[str, tuple[Selection, Path]] = {}
        path = args.out or Path(scratch, "window.jsonl")
        selections["window and thin"] = (window_and_thin(full, plan), path)
        if args.compare:
            requests = requests_of(full.columns, selections["window and thin"][0].sessions)
            other = random_requests(full.columns, requests, plan.seed)
            selections["random"] = (other, Path(scratch, "random.jsonl"))

        traces = {"full": describe(full)}
        for name, (selection, path) in selections.items():
            total = traces["full"].requests
            write(path, chosen(source.records(f"taking: {name}", total), selection))
            sample = Source(path, args.block_tokens)
            traces[name] = describe(sample.survey())
        print_table(traces)
        seconds = time.perf_counter() - began
        _finish(args, plan, selections, traces, seconds)
    return 0


def _finish(
    args: argparse.Namespace,
    plan: Plan,
    selections: dict[str, tuple[Selection, Path]],
    traces: dict[str, Description],
    seconds: float,
) -> None:
    """What was kept of the sharing, from where, and what it took."""
    full = traces["full"].cross_session_share
    keeps = {
        name: trace.cross_session_share / full if full else 0.0
        for name, trace in traces.items()
        if name != "full"
    }
    for name, share in keeps.items():
        print(f"{name}: keeps {share:.1%} of the share of blocks that sessions share")
    start = selections["window and thin"][0].start_s
    print(
        f"window: {plan.window_s:g} s from {start:g} s on; ratio {plan.ratio:g} by "
        f"{plan.thin_by}; single-turn sessions at most {plan.max_single_turn:g}; seed {plan.seed}"
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    print(f"{seconds:.1f} s, {memory / 2**20:,.0f} MiB at most")
    if args.out:
        print(f"{args.out}: {traces[next(iter(selections))].requests} requests")
    if args.json:
        content = {"plan": plan, "traces": traces, "keeps": keeps}
        content |= {"seconds": seconds, "peak_memory_bytes": memory}
        write_summary(args.json, content)


def _arguments(argv: list[str]) -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.agentic sample",
        description="Cut a smaller trace that shares as much.",
    )
    add = parser.add_argument
    add("file", type=Path)
    add("out", type=Path, nargs="?", help="the sample; without it, figures only")
    add("--window-seconds", type=float, default=plan.window_s, help="sessions that begin in it")
    add("--window-start", type=float, help="seconds since the first request (default: densest)")
    add("--sample-ratio", type=float, default=plan.ratio, help="share of sessions to keep")
    add(
        "--thin-by",
        choices=("family", "session"),
        default=plan.thin_by,
        help="keep or drop sessions with those few that they share a prefix with, or one by one",
    )
    add(
        "--max-single-turn-ratio",
        type=float,
        default=plan.max_single_turn,
        help="most of the sessions that may have a single turn",
    )
    add("--seed", type=int, default=plan.seed)
    add("--compare", action="store_true", help="as many requests by random sessions, beside it")
    add("--block-tokens", type=whole, default=BLOCK_TOKENS, help="of the trace")
    add("--json", type=Path, help="write the figures to this file, too")
    return parser.parse_args(argv)

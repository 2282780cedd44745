"""``python -m benchmark.agentic report``, also ``make bench-agentic``; README.md says more."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmark.agentic.replay.classes import Classes
from benchmark.agentic.replay.outcome import Outcome
from benchmark.agentic.report.arms import Arm, matrix
from benchmark.agentic.report.findings import findings
from benchmark.agentic.report.load import Load, Trace, prepare
from benchmark.agentic.report.measure import Measured, run
from benchmark.agentic.report.page import page
from benchmark.agentic.report.plots import draw
from benchmark.harness.command import status
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.report import write_summary


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    console = Console()
    # Servers start sooner on a machine with no GPU (docs/advanced_features/cpu_standin.md).
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")
    return status(lambda: _run(args, console), console)


def _run(args: argparse.Namespace, console: Console) -> int:
    try:
        arms = [
            arm for arm in matrix(spinning=args.spinning) if re.search(args.arms or "", arm.name)
        ]
    except re.error as error:
        raise ValueError(f"--arms {args.arms!r} is no pattern: {error}") from error
    if not arms:
        names = ", ".join(arm.name for arm in matrix(spinning=args.spinning))
        raise ValueError(f"--arms {args.arms!r} matches no arm's name: {names}")
    load = Load(**{name: getattr(args, name) for name in asdict(Load())})
    trace = prepare(args.trace, load)
    console.print(
        f"{len(trace.records)} requests of {escape(trace.source)}, {len(arms)} arms of about "
        f"{load.seconds + 30:.0f} s"
    )
    measured = _measure(arms, trace, load, args.out, console)
    _write(measured, trace, load, args, console)
    return 1 if any(m.report.overall.failed for m in measured) else 0


def _measure(
    arms: Sequence[Arm], trace: Trace, load: Load, out: Path, console: Console
) -> list[Measured]:
    model = random_qwen3(out / "model-random")
    classes = Classes().scaled(load.block_tokens)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    results = []
    encoder = msgspec.json.Encoder()
    out.mkdir(parents=True, exist_ok=True)
    with (
        (out / "requests.jsonl").open("wb") as lines,
        Progress(*columns, console=console, refresh_per_second=1) as progress,
    ):
        for arm in arms:
            bar = progress.add_task(arm.name, total=len(trace.records), failed=0)
            failed = 0

            def ended(outcome: Outcome, arm: Arm = arm, bar: int = bar) -> None:
                nonlocal failed
                failed += outcome.error is not None
                lines.write(encoder.encode({"arm": arm.name, **msgspec.to_builtins(outcome)}))
                lines.write(b"\n")
                lines.flush()
                progress.update(bar, advance=1, failed=failed)

            logs = out / "logs" / arm.name.replace(" ", "-").replace(",", "")
            results.append(run(arm, model, trace, load, classes, logs, ended))
    return results


def _write(
    measured: Sequence[Measured],
    trace: Trace,
    load: Load,
    args: argparse.Namespace,
    console: Console,
) -> None:
    out: Path = args.out
    command = "python -m benchmark.agentic report"
    if args.trace:
        command += f" --trace {shlex.quote(args.trace.name)}"
    for name, default in asdict(Load()).items():
        if (value := getattr(load, name)) != default:
            command += f" --{name.replace('_', '-')} {value:g}"
    if args.arms:
        command += f" --arms {shlex.quote(args.arms)}"
    if args.spinning:
        command += " --spinning"
    text = page(measured, trace, load, describe(), command, draw(measured, out))
    (out / "report.md").write_text(text)
    write_summary(
        out / "summary.json",
        {
            **describe(),
            "command": command,
            "load": load,
            "trace": replace(trace, records=[]),
            "findings": findings(measured),
            "arms": {m.arm.name: replace(m, outcomes=[]) for m in measured},
        },
    )
    for sentence in findings(measured):
        console.print(escape(sentence.replace("**", "")))
    console.print(f"{out / 'report.md'}")


def _arguments(argv: list[str]) -> argparse.Namespace:
    load = Load()
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.agentic report",
        description="A matrix of real servers under one trace, and one page about it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, help="in Mooncake's format; without it one is generated")
    add("--arms", help="only those whose name matches, as '1P2D (round|delta)'")
    add("--spinning", action="store_true", help="also 1P1D radix with a spinning NIXL thread")
    add("--requests", type=int, default=load.requests, help="to replay, about")
    add("--seconds", type=float, default=load.seconds, help="that they are spread over")
    add("--window-s", type=float, default=load.window_s, help="seconds of the trace to take from")
    add("--max-single-turn", type=float, default=load.max_single_turn, help="share of sessions")
    add("--block-tokens", type=int, default=load.block_tokens, help="512 are scaled to so many")
    add("--pool-tokens", type=int, default=load.pool_tokens, help="KV pool of each server")
    add("--seed", type=int, default=load.seed, help="of the trace, its sample, and the prompts")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    return parser.parse_args(argv)

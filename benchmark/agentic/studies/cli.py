"""``python -m benchmark run``, ``report`` and ``compare``; README.md says more."""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmark.agentic.fleet import spec as fleets
from benchmark.agentic.fleet.spec import Arm, FleetFile
from benchmark.agentic.load.run import raise_open_files
from benchmark.agentic.report.numbers import levels
from benchmark.agentic.report.page import html, page
from benchmark.agentic.report.plots import draw
from benchmark.agentic.report.summary import summary
from benchmark.agentic.studies import record
from benchmark.agentic.studies.load import Trace, limit, prepare
from benchmark.agentic.studies.record import Cell, Run
from benchmark.agentic.studies.run import cells
from benchmark.agentic.studies.spec import Study, find, titles
from benchmark.aiperf import MOONCAKE, Program
from benchmark.harness.command import reported, retyped
from benchmark.harness.environment import describe
from benchmark.harness.report import plain, write_summary

ABOUT_MADE = "FIRST: a session's first turn; LATER: its other turns; COLD: a prompt of its own"


@reported
def run(argv: list[str]) -> int:
    """``run STUDY [--fleet FILE]``: measures, and writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmark run",
        description="Measures the arms of a study on a fleet, and writes one page about it.",
    )
    add = parser.add_argument
    add("study", help="study: a YAML file, or the name of a study of the suite")
    add(
        "--fleet",
        type=Path,
        default=fleets.RIG,
        help="fleet: a YAML file; default: the local CPU rig",
    )
    add("--trace", type=Path, help="trace in Mooncake's format, instead of the study's")
    add("--skip-invalid", action="store_true", help="skip lines that cannot be read")
    add("--arms", help="only arms whose names match this pattern")
    add("--rounds", type=int, help="instead of the study's")
    about = "approximate requests of the trace, or that count in a round of a steady load"
    add("--requests", type=int, help=about)
    add("--sessions", type=int, nargs="+", help="concurrent sessions, instead of the study's loads")
    add("--rate", type=float, nargs="+", help="requests/s, instead of the study's loads")
    add(
        "--resume",
        action="store_true",
        help="continue the run in --out; its finished loads are not repeated",
    )
    add("--aiperf", type=Path, help="send with this aiperf program; fleets by URL, traces")
    add("--format", default=MOONCAKE, help="of --trace, as --aiperf knows it; it is sent whole")
    add("--out", type=Path, help="folder of the run; default: out/NAME")
    add(
        "--page",
        type=Path,
        help="folder for the page, figures and numbers; default: the folder of the run",
    )
    args = parser.parse_args(argv)
    # Servers start sooner on a machine with no GPU (docs/advanced_features/cpu_standin.md).
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")
    return _run(args, Console(), retyped(argv))


@reported
def report(argv: list[str]) -> int:
    """``report RUN``: the page of a run, again."""
    parser = argparse.ArgumentParser(prog="python -m benchmark report")
    parser.add_argument("run", type=Path, help="folder that `run` wrote")
    parser.add_argument(
        "--page",
        type=Path,
        help="folder for the page; default: the folder of the run",
    )
    args = parser.parse_args(argv)
    write(record.load(args.run), args.page or args.run, Console())
    return 0


@reported
def compare(argv: list[str]) -> int:
    """``compare RUN RUN``: arms of two runs of one study on one page."""
    parser = argparse.ArgumentParser(prog="python -m benchmark compare")
    parser.add_argument("before", type=Path, help="folder that `run` wrote")
    parser.add_argument(
        "after",
        type=Path,
        help="folder of another run of the same study and trace",
    )
    parser.add_argument("--page", type=Path, default=Path("out/compare"), help="folder")
    args = parser.parse_args(argv)
    both = merged(record.load(args.before), record.load(args.after))
    both.command = "python -m benchmark compare " + retyped(argv)
    write(both, args.page, Console())
    return 0


def merged(before: Run, after: Run) -> Run:
    """One run with the arms of both.

    Raises:
        ValueError: their loads or requests differ, so that nothing can be compared.
    """
    for what in ("load", "trace", "made", "grid"):
        if getattr(before.study, what) != getattr(after.study, what):
            raise ValueError(f"the runs differ in `{what}`: they cannot be compared")
    if before.fleet["endpoint"] != after.fleet["endpoint"] or _sent(before) != _sent(after):
        raise ValueError("the runs have different requests: they cannot be compared")
    titles, found = {}, []
    servers: dict[str, dict[str, int]] = {}
    for name, of in (("before", before), ("after", after)):
        titles |= {f"{name}: {arm}": f"{name}: {title}" for arm, title in of.titles.items()}
        servers |= {f"{name}: {arm}": count for arm, count in of.servers.items()}
        found += [msgspec.structs.replace(c, arm=f"{name}: {c.arm}") for c in of.cells]
    note = "Two runs, one after the other: what changed on the machines between them counts too. "
    study = msgspec.structs.replace(
        before.study,
        title=f"{before.study.title}: two runs",
        question=note + before.study.question,
        rounds=min(before.study.rounds, after.study.rounds),
    )
    return msgspec.structs.replace(
        before,
        study=study,
        titles=titles,
        environment=_both(before.environment, after.environment),
        cells=found,
        servers=servers,
    )


def _both(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Of what was measured partly in the one and partly in the other."""
    return {
        name: " and ".join(dict.fromkeys((told, after.get(name, told))))
        for name, told in before.items()
    }


def _sent(run: Run) -> list[int]:
    """How much it was, of which two loads that differ hardly agree in all."""
    return [run.trace.get(name, 0) for name in ("requests", "prompt_tokens", "output_tokens")]


def _run(args: argparse.Namespace, console: Console, words: str) -> int:
    fleet = fleets.load(args.fleet, FleetFile)
    path = find(args.study)
    study = _changed(fleets.load(path, Study), fleet, args)
    if study.rig and fleet.rig is not None:
        rig = msgspec.convert({**msgspec.to_builtins(fleet.rig), **study.rig}, type(fleet.rig))
        fleet = msgspec.structs.replace(fleet, rig=rig)
    if args.aiperf and (fleet.rig or fleet.endpoint == "generate" or study.made):
        raise ValueError(
            "--aiperf needs a fleet by URL with `endpoint: chat` or `completions`, and a study of "
            "a trace"
        )
    whole = args.format != MOONCAKE
    if whole and not (args.aiperf and args.trace):
        raise ValueError("--format needs --aiperf and --trace")
    program = None
    if args.aiperf:
        program = Program(args.aiperf, args.trace if whole else None, args.format)
    arms, missing = (study.arms, []) if fleet.rig else study.at(fleet.named())
    arms = _chosen(arms, args.arms)
    trace = None
    if study.made is None and not whole:
        trace = prepare(study.trace, fleet)
    elif study.made is not None:
        _check_made(study, fleet)
    for note in trace.notes if trace else ():
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    out: Path = args.out or Path("out") / path.stem
    out.mkdir(parents=True, exist_ok=True)
    raise_open_files(max(study.load.sessions, default=1000))
    shown = _described(trace) if trace else {"classes": ABOUT_MADE if study.made else "No classes"}
    if whole:
        shown["source"] = f"{args.trace.name}, as AIPerf reads {args.format}"
    file = trace.source if trace and study.trace.file else None
    public = msgspec.structs.replace(study.trace, file=file)
    done = Run(
        msgspec.structs.replace(study, trace=public),
        titles(arms),
        missing,
        fleet.public(),
        describe(),
        f"python -m benchmark run {words}",
        shown,
        servers={name: arm.servers for name, arm in arms.items()},
    )
    earlier = record.load(out) if args.resume else None
    if earlier is not None:
        same = earlier.fleet == plain(done.fleet) and _sent(earlier) == _sent(done)
        if (earlier.study, earlier.titles) != (done.study, done.titles) or not same:
            raise ValueError(
                f"{out} holds another study: remove --resume, or give the options of that study"
            )
        done.cells += earlier.cells
    steps = study.rounds * len(arms) * len(study.points) - len(done.cells)
    if earlier is not None:
        done.environment = _both(earlier.environment, done.environment if steps else {})
    what = f"{len(trace.records)} requests of {escape(trace.source)}" if trace else "Sessions"
    each = study.load.window.requests if study.load.window else len(trace.records) if trace else 1
    console.print(f"{what}, {len(arms)} arms, {study.rounds} rounds: {steps} loads")
    began, failed = time.monotonic(), 0
    with _progress(console) as progress:
        bar = progress.add_task("", total=steps, failed=0, at="")

        def told(cell: Cell) -> None:
            nonlocal failed
            failed += bool(cell.outcomes) and cell.outcomes[-1].error is not None
            text = f"round {cell.round + 1}, {done.titles[cell.arm]}, {cell.key[2].name}"
            ended = len(done.cells) - len(earlier.cells if earlier else ())
            now = ended + min(0.99, len(cell.outcomes) / each)
            at = done_at(now, steps, time.monotonic() - began, datetime.now())
            progress.update(bar, description=escape(text), completed=now, failed=failed, at=at)

        for cell in cells(study, arms, fleet, trace, out, told, earlier, program):
            done.cells.append(cell)
            record.save(out, done)  # what was measured outlives a later failure
    write(done, args.page or out, console)
    return 0


def done_at(now: float, steps: int, seconds: float, clock: datetime) -> str:
    """When the run will end, by what it took so far; ``now`` of ``steps`` loads."""
    if now <= 0:
        return ""
    return f"done at about {clock + timedelta(seconds=seconds * (steps - now) / now):%a %H:%M}"


def _check_made(study: Study, fleet: FleetFile) -> None:
    """Raises ValueError where a session does not fit, or its answers cannot be read."""
    assert study.made is not None
    if fleet.endpoint != "generate":
        raise ValueError(
            "`made` sends each answer back as token ids: it needs `endpoint: generate`"
        )
    largest = max(point.made(study.made).largest for point in study.points)
    if largest > (most := limit(fleet)):
        raise ValueError(
            f"`made` has requests of {largest:,} tokens, more than the {most:,} that fit"
        )


def _changed(study: Study, fleet: FleetFile, args: argparse.Namespace) -> Study:
    """With what the command line and the fleet say otherwise."""
    change = msgspec.structs.replace
    if fleet.slo is not None:
        study = change(study, slo=fleet.slo)
    if args.rounds:
        study = change(study, rounds=args.rounds)
    trace = study.trace
    if args.trace:
        trace = change(trace, file=str(args.trace))
    if args.skip_invalid:
        trace = change(trace, skip_invalid=True)
    if args.requests and study.load.window is None:
        trace = change(trace, requests=args.requests)
    load = study.load
    if args.requests and load.window is not None:
        load = change(load, window=change(load.window, requests=args.requests))
    if args.sessions or args.rate:
        sessions, rate = tuple(args.sessions or ()), tuple(args.rate or ())
        load = change(load, sessions=sessions, rate=rate, speed=())
    return change(study, trace=trace, load=load)


def _chosen(arms: dict[str, Arm], pattern: str | None) -> dict[str, Arm]:
    try:
        found = {name: arm for name, arm in arms.items() if re.search(pattern or "", name)}
    except re.error as error:
        raise ValueError(f"--arms {pattern!r} is not a pattern: {error}") from error
    if not found:
        raise ValueError(f"--arms {pattern!r} matches none of {', '.join(arms)}")
    return found


def _described(trace: Trace) -> dict[str, Any]:
    """As `run.json` has it, rounded, so that a page does not change when it is written again."""
    told: dict[str, Any] = plain(
        {
            "source": trace.source,
            "described": asdict(trace.described),
            "ratio": trace.ratio,
            "left_out": trace.left_out,
            "classes": str(trace.classes),
            "requests": len(trace.records),
            "prompt_tokens": sum(r.input_length for r in trace.records),
            "output_tokens": sum(r.output_length for r in trace.records),
            "largest_tokens": max(r.input_length + r.output_length for r in trace.records),
        }
    )
    return told


def write(run: Run, folder: Path, console: Console) -> None:
    """Page, figures and numbers of a run."""
    found = levels(run)
    told = summary(run, found)
    text = page(run, told, draw(run, found, folder))
    (folder / "page.md").write_text(text)
    (folder / "page.html").write_text(html(text, run.study.title))
    write_summary(folder / "summary.json", told)
    console.print(escape(told["answer"].replace("**", "")))
    console.print(str(folder / "page.md"))


def _progress(console: Console) -> Progress:
    columns: tuple[TextColumn | BarColumn | TimeElapsedColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f} of {task.total}, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    # Rendering takes the interpreter from the event loop.
    return Progress(*columns, console=console, refresh_per_second=1)

"""``python -m benchmark run``, ``report`` and ``compare``; described in README.md."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from benchmark.agentic.report.page import page
from benchmark.agentic.report.plots import draw
from benchmark.agentic.report.summary import summary
from benchmark.agentic.studies import record
from benchmark.agentic.studies.dry_run import planned_servers
from benchmark.agentic.studies.load import Trace, limit, prepare
from benchmark.agentic.studies.record import Cell, Run
from benchmark.agentic.studies.run import Plan, cells
from benchmark.agentic.studies.spec import Study, find, titles
from benchmark.aiperf import MOONCAKE, Program
from benchmark.harness.command import reported, retyped
from benchmark.harness.environment import describe
from benchmark.harness.report import plain, write_summary

ABOUT_MADE = "FIRST: a session's first turn; LATER: its other turns; COLD: an unrelated prompt"


@reported
def run(argv: list[str]) -> int:
    """``run STUDY [--fleet FILE]``: measure, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmark run",
        description="Measures the arms of a study on a fleet, and writes one page about it.",
    )
    add = parser.add_argument
    add("study", help="study: a YAML file, or the name of a study of the suite")
    about = "fleet: a YAML file; default: the one that the study names, or the local CPU rig"
    add("--fleet", type=Path, help=about)
    add("--trace", type=Path, help="trace in Mooncake's format, instead of the study's")
    add("--skip-invalid", action="store_true", help="skip lines that cannot be read")
    about = "only arms whose names match this pattern; one arm alone by its exact name"
    add("--arms", help=about)
    add("--rounds", type=int, help="instead of the study's")
    about = "approximate requests of the trace, or that count in a round of a steady load"
    add("--requests", type=int, help=about)
    add("--sessions", type=int, nargs="+", help="concurrent sessions, instead of the study's loads")
    about = "requests a second of sessions that begin at random times, instead of the loads"
    add("--rate", type=float, nargs="+", help=about)
    again = "continue the run in --out; its finished loads are not repeated"
    add("--resume", action="store_true", help=again)
    about = "print what would be sent, for how long, and each server of the rig"
    add("--dry-run", action="store_true", help=about)
    add("--aiperf", type=Path, help="send with this aiperf program; fleets by URL, traces")
    add("--format", default=MOONCAKE, help="format of --trace for --aiperf, which sends all of it")
    add("--out", type=Path, help="folder of the run; default: out/NAME")
    add("--page", type=Path, help="folder for page, figures and numbers; default: the run's")
    args = parser.parse_args(argv)
    return _run(args, Console(), retyped(argv))


@reported
def report(argv: list[str]) -> int:
    """``report RUN``: write the page of a run again."""
    parser = argparse.ArgumentParser(prog="python -m benchmark report")
    parser.add_argument("run", type=Path, help="folder that `run` wrote")
    parser.add_argument("--page", type=Path, help="folder for the page; default: the run's")
    args = parser.parse_args(argv)
    write(record.load(args.run), args.page or args.run, Console())
    return 0


@reported
def compare(argv: list[str]) -> int:
    """``compare RUN RUN``: put the arms of two runs of one study on one page."""
    parser = argparse.ArgumentParser(prog="python -m benchmark compare")
    parser.add_argument("before", type=Path, help="folder that `run` wrote")
    parser.add_argument("after", type=Path, help="folder of another run, same study and trace")
    parser.add_argument("--page", type=Path, default=Path("out/compare"), help="folder")
    args = parser.parse_args(argv)
    both = merged(record.load(args.before), record.load(args.after))
    both.command = "python -m benchmark compare " + retyped(argv)
    write(both, args.page, Console())
    return 0


def merged(before: Run, after: Run) -> Run:
    """Return one run with the arms of both.

    Raises:
        ValueError: their loads or requests differ, so they cannot be compared.
    """
    for what in ("load", "trace", "made", "grid", "rounds"):
        if getattr(before.study, what) != getattr(after.study, what):
            raise ValueError(f"the runs differ in `{what}`: they cannot be compared")
    if before.fleet["endpoint"] != after.fleet["endpoint"] or _sent(before) != _sent(after):
        raise ValueError("the runs have different requests: they cannot be compared")
    change, runs = msgspec.structs.replace, (("before", before), ("after", after))
    note = "Two runs, one after the other: changes of the machines between them count too. "
    study = change(
        before.study,
        title=f"{before.study.title}: two runs",
        question=note + before.study.question,
        claims=(),
    )
    return change(
        before,
        study=study,
        titles={
            f"{n}: {arm}": f"{n}: {title}" for n, run in runs for arm, title in run.titles.items()
        },
        environment=_both(before.environment, after.environment),
        cells=[change(cell, arm=f"{n}: {cell.arm}") for n, run in runs for cell in run.cells],
        servers={f"{n}: {arm}": count for n, run in runs for arm, count in run.servers.items()},
    )


def _both(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return the environment of a run that was measured partly in each of two."""
    return {
        name: " and ".join(dict.fromkeys((value, after.get(name, value))))
        for name, value in before.items()
    }


def _sent(run: Run) -> list[int]:
    """Return the amounts that were sent; two different loads hardly agree in all of them."""
    return [run.trace.get(name, 0) for name in ("requests", "prompt_tokens", "output_tokens")]


def _run(args: argparse.Namespace, console: Console, words: str) -> int:
    plan, done = _planned(args, words)
    study, trace, out = plan.study, plan.trace, plan.out
    for note in trace.notes if trace else ():
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    earlier = record.load(out) if args.resume else None
    if earlier is not None:
        same = earlier.fleet == plain(done.fleet) and _sent(earlier) == _sent(done)
        if (earlier.study, earlier.titles) != (done.study, done.titles) or not same:
            raise ValueError(
                f"{out} holds another study: remove --resume, or give the options of that study"
            )
        done.cells += earlier.cells
    steps = study.rounds * len(plan.arms) * len(study.points) - len(done.cells)
    if earlier is not None:
        done.environment = _both(earlier.environment, done.environment if steps else {})
    what = f"{len(trace.records)} requests of {escape(trace.source)}" if trace else "Sessions"
    text = f"{what}, {len(plan.arms)} arms, {study.rounds} rounds: {steps} loads"
    if study.load.window:
        start_s = plan.fleet.rig.start_s if plan.fleet.rig else 0.0
        text += f", at most about {study.load_s(start_s) * steps / 60:.0f} min in all"
    console.print(text, soft_wrap=True)
    if args.dry_run:
        print("\n".join(planned_servers(plan)))  # plain: a command must not be wrapped
        return 0
    out.mkdir(parents=True, exist_ok=True)
    raise_open_files(max(study.load.sessions, default=1000))
    requests = (
        study.load.window.requests if study.load.window else len(trace.records) if trace else 1
    )
    with _progress(console, steps, requests, len(done.cells), done) as told:
        for cell in cells(plan, told, earlier):
            done.cells.append(cell)
            record.save(out, done)  # keeps finished cells if a later one fails
    write(done, args.page or out, console)
    return 0


def _planned(args: argparse.Namespace, words: str) -> tuple[Plan, Run]:
    """Return the plan, and its run, which has no cells yet."""
    path = find(args.study)
    study = fleets.load(path, Study)
    beside = path.parent / study.fleet if study.fleet else fleets.RIG
    fleet = fleets.load(args.fleet or beside, FleetFile)
    study = _changed(study, fleet, args)
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
    _check_arms(study, arms, missing, args.arms)
    if fleet.rig is not None:
        fleet.rig.check(arms)
    trace, shown = None, {"classes": ABOUT_MADE if study.made else "No classes"}
    if study.made is not None:
        _check_made(study, fleet)
    elif whole:
        shown["source"] = f"{args.trace.name}, as AIPerf reads {args.format}"
    else:
        trace = prepare(study.trace, fleet)
        _check_window(study, trace)
        shown = _described(trace)
    file = trace.source if trace and study.trace.file else None
    public = msgspec.structs.replace(study.trace, file=file)
    done = Run(
        msgspec.structs.replace(study, trace=public),
        titles(arms),
        missing,
        fleet.public(),
        describe(next((arm.venv for arm in arms.values() if arm.venv), None)),
        f"python -m benchmark run {words}",
        shown,
        servers={name: arm.servers for name, arm in arms.items()},
    )
    out = args.out or Path("out") / path.stem
    return Plan(study, arms, fleet, trace, out, program), done


def _check_window(study: Study, trace: Trace) -> None:
    """Raise ValueError if no request of a trace would count, because a trace is not repeated."""
    load, requests = study.load, len(trace.records)
    if load.window is None or not load.sessions:
        return
    warm_up = max(load.window.warm_up, 2 * max(load.sessions))
    if warm_up >= requests:
        text = (
            f"the trace has {requests} requests, and the warm-up of {max(load.sessions)} sessions "
            f"at once takes {warm_up}: --sessions of fewer, or a longer --trace"
        )
        raise ValueError("; ".join([text, *trace.notes]))


def _check_made(study: Study, fleet: FleetFile) -> None:
    """Raise ValueError if a session does not fit, or its answers cannot be read."""
    assert study.made is not None
    if fleet.endpoint != "generate":
        raise ValueError(
            "`made` sends each answer back as token ids: it needs `endpoint: generate`"
        )
    largest = max(point.made(study.made).largest for point in study.points)
    if largest > (max_tokens := limit(fleet)):
        raise ValueError(
            f"`made` has requests of {largest:,} tokens, more than the {max_tokens:,} that fit"
        )


def _changed(study: Study, fleet: FleetFile, args: argparse.Namespace) -> Study:
    """Return the study with the changes of the command line and the fleet."""
    change, trace, load = msgspec.structs.replace, study.trace, study.load
    if args.trace and study.made:
        raise ValueError("--trace: this study makes its sessions (`made`); take one with `trace`")
    if args.trace:
        trace = change(trace, file=str(args.trace))
    if args.skip_invalid:
        trace = change(trace, skip_invalid=True)
    if args.requests and load.window is None:
        trace = change(trace, requests=args.requests)
    elif args.requests:
        load = change(load, window=change(load.window, requests=args.requests))
    if args.sessions or args.rate:
        levels = {"sessions": tuple(args.sessions or ()), "requests_per_s": tuple(args.rate or ())}
        load = change(load, speed=(), **levels)
    rounds, slo = args.rounds or study.rounds, fleet.slo or study.slo
    study = change(study, trace=trace, load=load, rounds=rounds, slo=slo)
    return msgspec.convert(msgspec.to_builtins(study), Study)  # validates it like a file


def _chosen(arms: dict[str, Arm], pattern: str | None) -> dict[str, Arm]:
    try:
        matching = {name: arm for name, arm in arms.items() if re.search(pattern or "", name)}
    except re.error as error:
        raise ValueError(f"--arms {pattern!r} is not a pattern: {error}") from error
    if not matching:
        raise ValueError(f"--arms {pattern!r} matches none of {', '.join(arms)}")
    return matching


def _check_arms(
    study: Study, arms: dict[str, Arm], missing: list[str], pattern: str | None
) -> None:
    """Raise ValueError if one arm of several is left, which nothing is compared with."""
    if len(arms) > 1 or len(study.arms) == 1:
        return
    (name,) = arms
    if pattern == name:
        return
    if missing:
        raise ValueError(
            f"only the arm {name} would be measured, and compared with nothing: the fleet has no "
            f"setup {', '.join(missing)}. Add one under `setups`, or ask for --arms {name}"
        )
    raise ValueError(
        f"only the arm {name} would be measured, and compared with nothing: --arms {pattern!r} "
        f"matches no other. Widen it, or ask for --arms {name}"
    )


def _described(trace: Trace) -> Any:
    """Return a trace's figures, rounded as in `run.json`, so that a repeated page is identical."""
    return plain(
        {
            "source": trace.source,
            "described": trace.described,
            "ratio": trace.ratio,
            "left_out": trace.left_out,
            "classes": f"WARM < {trace.classes.medium:,} new tokens <= MEDIUM <= "
            f"{trace.classes.heavy:,} < HEAVY",
            "requests": len(trace.records),
            "prompt_tokens": sum(r.input_length for r in trace.records),
            "output_tokens": sum(r.output_length for r in trace.records),
            "largest_tokens": max(r.input_length + r.output_length for r in trace.records),
        }
    )


def write(run: Run, folder: Path, console: Console) -> None:
    """Write page, figures and numbers of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_summary(folder / "summary.json", summary(run))
    told = msgspec.json.decode((folder / "summary.json").read_bytes())
    (folder / "page.md").write_text(page(told, draw(told, folder)))
    console.print(escape(told["answer"].replace("**", "")))
    console.print(str(folder / "page.md"))


@contextmanager
def _progress(
    console: Console, steps: int, requests: int, before: int, done: Run
) -> Iterator[Callable[[Cell], None]]:
    """Show a bar of ``steps`` loads with about ``requests`` requests each; provide its update.

    ``before``: loads of ``done`` that an earlier run measured.
    """
    began, failed = time.monotonic(), 0
    columns: tuple[TextColumn | BarColumn | TimeElapsedColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f} of {task.total}, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    # Redraw only once a second, because rendering delays the event loop.
    with Progress(*columns, console=console, refresh_per_second=1) as progress:
        bar = progress.add_task("", total=steps, failed=0, at="")

        def told(cell: Cell) -> None:
            nonlocal failed
            failed += cell.outcomes[-1].error is not None
            text = f"round {cell.round + 1}, {done.titles[cell.arm]}, {cell.key[2].name}"
            now = len(done.cells) - before + min(0.99, len(cell.outcomes) / requests)
            left_s = (time.monotonic() - began) * (steps - now) / now
            at = f"done at about {datetime.now() + timedelta(seconds=left_s):%a %H:%M}"
            progress.update(bar, description=escape(text), completed=now, failed=failed, at=at)

        yield told

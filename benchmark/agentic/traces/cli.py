"""``python -m benchmark generate``, ``describe`` and ``sample``; README.md says more.

Sampling takes two passes over the file: one looks which sessions begin when and share what, one
takes those chosen. A trace that names no sessions is given some (``benchmark.traces.sessions``).
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track

from benchmark.agentic.traces.describe import Description, print_table
from benchmark.agentic.traces.describe import describe as described
from benchmark.agentic.traces.select import (
    Plan,
    Selection,
    chosen,
    random_requests,
    requests_of,
    window_and_thin,
)
from benchmark.agentic.traces.survey import Survey, survey
from benchmark.harness.command import reported
from benchmark.harness.report import write_summary
from benchmark.traces.generate import AGENTIC, CONVERSATION, TOOLS, at_rate
from benchmark.traces.generate import generate as generated
from benchmark.traces.invalid import Invalid
from benchmark.traces.read import read, write
from benchmark.traces.record import BLOCK_TOKENS, Record
from benchmark.traces.sessions import annotate
from benchmark.traces.units import UnitCheck

SHAPES = {"agentic": AGENTIC, "conversation": CONVERSATION, "tools": TOOLS}
SKIP = "skip lines that cannot be read, and print their number"


@dataclass(frozen=True)
class Source:
    """A trace file whose every record names its session."""

    path: Path
    block_tokens: int
    skip_invalid: bool = False

    def records(
        self, what: str, total: int | None = None, invalid: Invalid | None = None
    ) -> Iterable[Record]:
        invalid = invalid or Invalid(self.skip_invalid)
        found = read(self.path, self.block_tokens, invalid)
        return _counted(annotate(found, self.block_tokens), what, total)

    def survey(self) -> tuple[Survey, list[str]]:
        """One pass, and what there is to tell of the file: lines left out, a unit that is off.

        Raises:
            ValueError: no trace; the message names the file, and the line where it is one line's.
        """
        invalid, units = Invalid(self.skip_invalid), UnitCheck()
        try:
            found = survey(units.watch(self.records("reading", invalid=invalid)), self.block_tokens)
        except ValueError as error:
            text = "; ".join([str(error), *invalid.told()])
            named = text.startswith(str(self.path))
            raise ValueError(text if named else f"{self.path}: {text}") from error
        return found, invalid.told() + units.told(self.path)


@reported
def generate(argv: list[str]) -> int:
    """``generate FILE``: traffic as a trace, for machines with no trace at hand."""
    parser = argparse.ArgumentParser(prog="python -m benchmark generate")
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="agentic")
    parser.add_argument("--requests", type=_whole, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rate",
        type=float,
        help="requests/s: changes the number of sessions, not their pace",
    )
    parser.add_argument(
        "--no-sessions", action="store_true", help="omit session_id and turn, as Mooncake does"
    )
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    shape = at_rate(shape, args.rate, args.seed) if args.rate else shape
    records: Iterable[Record] = generated(args.requests, args.seed, shape)
    if args.no_sessions:
        records = (msgspec.structs.replace(r, session_id=None, turn=None) for r in records)
    print(f"{write(args.file, _counted(records, 'generating', args.requests))} requests")
    return 0


@reported
def describe(argv: list[str]) -> int:
    """``describe FILE``: what a trace holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmark describe")
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--block-tokens",
        type=_whole,
        default=BLOCK_TOKENS,
        help="tokens per block of the trace",
    )
    parser.add_argument("--skip-invalid", action="store_true", help=SKIP)
    args = parser.parse_args(argv)
    found, notes = Source(args.file, args.block_tokens, args.skip_invalid).survey()
    description = described(found)
    print_table({args.file.name: description})
    _tell(notes)
    if args.json:
        write_summary(args.json, {"trace": description})
    return 0


@reported
def sample(argv: list[str]) -> int:
    """``sample FILE [OUT]``: a smaller trace that shares as much; with ``--compare``, beside as
    many requests at random."""
    args = _arguments(argv)
    began = time.perf_counter()
    plan = Plan(
        window_s=args.window_seconds,
        window_start_s=args.window_start,
        ratio=args.sample_ratio,
        thin_by=args.thin_by,
        max_single_turn=args.max_single_turn_ratio,
        seed=args.seed,
    )
    source = Source(args.file, args.block_tokens, args.skip_invalid)
    if args.out and args.out.resolve() == args.file.resolve():
        raise ValueError(f"{args.out} would overwrite the input trace")
    full, notes = source.survey()
    selections = {"window and thin": window_and_thin(full, plan)}
    if args.compare:
        requests = requests_of(full.columns, selections["window and thin"].sessions)
        selections["random"] = random_requests(full.columns, requests, plan.seed)
    traces = {"full": described(full)}
    with tempfile.TemporaryDirectory() as scratch:
        for name, selection in selections.items():
            path = args.out if args.out and name != "random" else Path(scratch, name)
            total = traces["full"].requests
            write(path, chosen(source.records(f"taking: {name}", total), selection))
            traces[name] = described(Source(path, args.block_tokens).survey()[0])
    print_table(traces)
    _finish(args, plan, selections["window and thin"], traces, time.perf_counter() - began)
    _tell(notes)
    return 0


def _finish(
    args: argparse.Namespace,
    plan: Plan,
    window: Selection,
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
    print(
        f"window: {plan.window_s:g} s from {window.start_s:g} s on; ratio {plan.ratio:g} by "
        f"{plan.thin_by}; single-turn sessions at most {plan.max_single_turn:g}; seed {plan.seed}"
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    print(f"{seconds:.1f} s, {memory / 2**20:,.0f} MiB at most")
    if args.out:
        print(f"{args.out}: {traces['window and thin'].requests} requests")
    if args.json:
        content = {"plan": plan, "traces": traces, "keeps": keeps}
        content |= {"seconds": seconds, "peak_memory_bytes": memory}
        write_summary(args.json, content)


def _arguments(argv: list[str]) -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmark sample")
    add = parser.add_argument
    add("file", type=Path)
    add("out", type=Path, nargs="?", help="file for the sample; default: print figures only")
    add(
        "--window-seconds",
        type=float,
        default=plan.window_s,
        help="length of the window in which sessions begin, seconds",
    )
    add(
        "--window-start",
        type=float,
        help="start of the window, seconds since the first request (default: the densest window)",
    )
    add("--sample-ratio", type=float, default=plan.ratio, help="share of sessions to keep")
    add(
        "--thin-by",
        choices=("family", "session"),
        default=plan.thin_by,
        help="sample sessions that share a prefix together, or each session alone",
    )
    add(
        "--max-single-turn-ratio",
        type=float,
        default=plan.max_single_turn,
        help="maximum share of single-turn sessions",
    )
    add("--seed", type=int, default=plan.seed)
    add("--compare", action="store_true", help="also sample as many requests by random sessions")
    add("--block-tokens", type=_whole, default=BLOCK_TOKENS, help="tokens per block of the trace")
    add("--skip-invalid", action="store_true", help=SKIP)
    add("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def _counted(records: Iterable[Record], what: str, total: int | None = None) -> Iterable[Record]:
    """The records, counted on a bar where a person looks on; ``total`` where it is known."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(records, what, total, console=console, transient=True, disable=hidden)


def _tell(notes: Iterable[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more: {text}")
    return value

"""``python -m benchmark generate``, ``convert``, ``describe`` and ``sample``: see README.md.

Sampling reads the file twice: first to find when sessions begin and which blocks they share, then
to take the chosen sessions. If a trace names no sessions, they are derived
(``benchmark.traces.sessions``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmark.harness.command import reported
from benchmark.harness.report import write_summary
from benchmark.traces import convert as converting
from benchmark.traces import logs
from benchmark.traces.describe import describe as described
from benchmark.traces.describe import print_table
from benchmark.traces.generate import AGENTIC, at_rate
from benchmark.traces.generate import generate as generated
from benchmark.traces.record import Record, left_out, read, write
from benchmark.traces.sample import Plan, Survey, chosen, random_requests, survey, window_and_thin
from benchmark.traces.sessions import annotate


@reported
def generate(argv: list[str]) -> int:
    """``generate FILE``: write synthetic traffic, for machines without a trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmark generate")
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rate", type=float, help="requests/s: changes the number of sessions, not their pace"
    )
    args = parser.parse_args(argv)
    if args.requests < 1:
        raise ValueError(f"--requests must be 1 or more: {args.requests}")
    shape = at_rate(AGENTIC, args.rate, args.seed) if args.rate else AGENTIC
    records = generated(args.requests, args.seed, shape)
    print(f"{write(args.file, _counted(records, 'generating'))} requests")
    return 0


@reported
def convert(argv: list[str]) -> int:
    """``convert LOG FILE``: write the requests of a log as a trace, which holds no text."""
    default = converting.Pace()
    parser = argparse.ArgumentParser(prog="python -m benchmark convert")
    add = parser.add_argument
    about = "OpenAI's batch file or request log, ShareGPT's list, or chat histories (JSON or lines)"
    add("log", type=Path, help=about)
    add("file", type=Path, help="file for the trace")
    add("--answers", type=Path, help="output file of OpenAI's batches, joined by custom_id")
    add("--answer-tokens", type=int, help="length of answers that the log does not have")
    about = "tokenizer.json of the model, or its folder; default: 4 bytes of UTF-8 are a token"
    add("--tokenizer", type=Path, help=about)
    about = "for a log without times: rate at which sessions begin, at random"
    add("--sessions-per-s", type=float, default=default.sessions_per_s, help=about)
    about = "for conversations: seconds from one request to the next"
    add("--turn-s", type=float, default=default.turn_s, help=about)
    add("--skip-invalid", action="store_true", help="skip entries that cannot be read")
    args = parser.parse_args(argv)
    if args.sessions_per_s <= 0 or args.turn_s < 0:
        raise ValueError("--sessions-per-s must be above 0, and --turn-s at least 0")
    if args.file.resolve() == args.log.resolve():
        raise ValueError(f"{args.file} would overwrite the log")
    log = logs.read(args.log, args.answers, args.skip_invalid)
    tokenize = converting.tokenizer(args.tokenizer) if args.tokenizer else converting.by_bytes
    pace = converting.Pace(args.sessions_per_s, args.turn_s)
    records = converting.records(log.calls, tokenize, pace, args.answer_tokens)
    by_time = sorted(records, key=lambda record: record.timestamp)
    print(f"{write(args.file, by_time)} requests")
    counted = args.tokenizer is not None
    invented = converting.invented(log.calls, pace, args.answer_tokens, counted=counted)
    for text in (*left_out(log.skipped), *invented):
        print(text, file=sys.stderr)
    if log.other_parts:
        print(f"{log.other_parts} parts of messages that are no text (images) count as nothing")
    pairs = zip(log.calls, records, strict=True)
    if known := [(c.prompt_tokens, r.input_length) for c, r in pairs if c.prompt_tokens]:
        logged, counted = map(sum, zip(*known, strict=True))
        print(f"prompt tokens as logged, over those counted here: {logged / counted:.2f}")
    return 0


@reported
def describe(argv: list[str]) -> int:
    """``describe FILE``: print the figures of a trace."""
    args = _reader("describe").parse_args(argv)
    description = described(_surveyed(args))
    print_table({args.file.name: description})
    if args.json:
        write_summary(args.json, {"trace": description})
    return 0


@reported
def sample(argv: list[str]) -> int:
    """``sample FILE [OUT]``: take a smaller trace that shares as much; with ``--compare``, also as
    many requests at random."""
    default = Plan()
    parser = _reader("sample")
    add = parser.add_argument
    add("out", type=Path, nargs="?", help="file for the sample; default: print figures only")
    add(
        "--window-seconds",
        type=float,
        default=default.window_s,
        help="length of the window in which sessions begin, seconds",
    )
    add(
        "--window-start",
        type=float,
        help="start of the window, seconds since the first request (default: the densest window)",
    )
    add("--sample-ratio", type=float, default=default.ratio, help="share of sessions to keep")
    add(
        "--max-single-turn-ratio",
        type=float,
        default=default.max_single_turn,
        help="maximum share of single-turn sessions",
    )
    add("--seed", type=int, default=default.seed)
    add("--compare", action="store_true", help="also sample as many requests by random sessions")
    args = parser.parse_args(argv)
    plan = Plan(
        args.window_seconds,
        args.window_start,
        args.sample_ratio,
        args.max_single_turn_ratio,
        args.seed,
    )
    if args.out and args.out.resolve() == args.file.resolve():
        raise ValueError(f"{args.out} would overwrite the input trace")
    trace_survey = _surveyed(args)
    window = window_and_thin(trace_survey, plan)
    selections = {"window and thin": window}
    if args.compare:
        selections["random"] = random_requests(trace_survey, window.requests, plan.seed)
    traces, keeps = {"full": described(trace_survey)}, {}
    whole = traces["full"]["cross_session_share"]
    with tempfile.TemporaryDirectory() as scratch:
        for name, selection in selections.items():
            path = args.out if args.out and name != "random" else Path(scratch, name)
            # Unreadable lines were reported by the first pass.
            second_pass = annotate(read(args.file, [] if args.skip_invalid else None))
            write(path, chosen(_counted(second_pass, f"taking: {name}"), selection))
            traces[name] = described(survey(read(path)))
            keeps[name] = traces[name]["cross_session_share"] / whole if whole else 0.0
    print_table(traces)
    for name, share in keeps.items():
        print(f"{name}: keeps {share:.1%} of the share of blocks that sessions share")
    print(f"window: {plan.window_s:g} s from {window.start_s:g} s on; seed {plan.seed}")
    if window.dropped:
        cap = f"--max-single-turn-ratio {plan.max_single_turn:g}"
        print(f"{window.dropped:,} sessions of a single turn were dropped by {cap}")
    if args.out:
        print(f"{args.out}: {window.requests} requests")
    if args.json:
        write_summary(args.json, {"plan": plan, "traces": traces, "keeps": keeps})
    return 0


def _reader(command: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all commands that read a trace."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmark {command}")
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--skip-invalid",
        action="store_true",
        help="skip lines that cannot be read, and print their number",
    )
    return parser


def _surveyed(args: argparse.Namespace) -> Survey:
    """Return the survey of the trace; print the number of skipped lines."""
    skipped = list[str]()
    lines = read(args.file, skipped if args.skip_invalid else None)
    trace_survey = survey(_counted(annotate(lines), "reading"))
    print(*left_out(skipped), sep="\n", end="\n" * bool(skipped), file=sys.stderr)
    return trace_survey


def _counted(records: Iterable[Record], label: str) -> Iterable[Record]:
    """Yield the records, counted on a progress bar if standard error is a terminal."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(records, label, console=console, transient=True, disable=hidden)

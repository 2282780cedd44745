"""``python -m benchmark.agentic replay``; README.md beside it says more."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmark.agentic.replay import sink
from benchmark.agentic.replay.classes import BY, Classes
from benchmark.agentic.replay.limits import raise_open_files
from benchmark.agentic.replay.outcome import Outcome
from benchmark.agentic.replay.plan import DISPATCH
from benchmark.agentic.replay.prepare import PromptSource
from benchmark.agentic.replay.report import report
from benchmark.agentic.replay.run import Settings, replay
from benchmark.agentic.replay.tables import show
from benchmark.harness import environment
from benchmark.harness.client import Target
from benchmark.harness.report import write_summary
from benchmark.harness.workload import token_range
from benchmark.traces.read import read
from benchmark.traces.record import BLOCK_TOKENS, Record
from benchmark.traces.scale import Fitting, Scale
from benchmark.traces.sessions import annotate


def main(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    args.block_tokens = args.block_tokens or args.trace_block_tokens
    if (args.prefill is None) != (args.decode is None) or (args.url is None) == (
        args.prefill is None
    ):
        parser.error("either --url, or --prefill, --decode and --bootstrap-port")
    if args.prefill is not None and args.bootstrap_port is None:
        parser.error("--prefill needs --bootstrap-port")
    if args.think_seconds is not None and args.dispatch != "think":
        parser.error("--think-seconds is for --dispatch think")
    if args.retry_errors and not args.resume:
        parser.error("--retry-errors is for --resume")
    console = Console()
    try:
        return _Run(args, console).run()
    except (ValueError, OSError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    except KeyboardInterrupt:
        console.print(f"stopped; the same command with --resume goes on with {args.out}")
        return 130


class _Run:
    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args, self._console = args, console
        self._target = Target(args.url) if args.url else _pair(args)
        self._scale = Scale(args.block_tokens, args.speed, args.trace_block_tokens)
        self._fitting = Fitting(args.max_tokens or sys.maxsize)
        vocabulary = token_range(args.model) if args.model else args.vocabulary
        self._prompts = PromptSource(vocabulary, args.block_tokens, args.seed)
        classes = Classes(args.medium_tokens, args.heavy_tokens, args.classes)
        if not args.unscaled_classes:
            classes = classes.scaled(args.block_tokens, args.trace_block_tokens)
        self._settings = Settings(args.dispatch, args.think_seconds, args.timeout, classes)
        self._header = sink.Header(
            {
                **{name: getattr(args, name) for name in _SETTINGS},
                "vocabulary": f"{vocabulary.start}:{vocabulary.stop}",
                "medium_tokens": classes.medium,
                "heavy_tokens": classes.heavy,
            },
            sink.sha256(args.trace),
        )

    def run(self) -> int:
        args, console = self._args, self._console
        earlier = self._earlier()
        done = {
            index: outcome.finished_s
            for index, outcome in (earlier.outcomes if earlier else {}).items()
            if outcome.error is None or not args.retry_errors
        }
        raise_open_files(args.streams, 2 if self._target.prefill_url else 1)
        console.print(escape(str(self._settings.classes)))
        with sink.Sink(args.out, self._header, earlier) as out, _progress(console) as progress:
            lines = _lines(args.trace)
            total = min(args.requests or lines, lines)
            bar = progress.add_task("", total=total, completed=len(done), failed=0)
            failed = 0

            def ended(outcome: Outcome) -> None:
                nonlocal failed
                out.write(outcome)
                failed += outcome.error is not None
                progress.update(bar, advance=1, total=total - self._fitting.left_out, failed=failed)

            asyncio.run(
                replay(
                    self._target,
                    self._records(),
                    self._prompts,
                    self._settings,
                    done=done,
                    on_outcome=ended,
                    keep=False,
                )
            )
        if self._fitting.left_out:
            console.print(
                f"{self._fitting.left_out} requests were left out: longer than --max-tokens "
                f"{args.max_tokens}"
            )
        self._report()
        return 0

    def _records(self) -> Iterator[Record]:
        args = self._args
        records = islice(read(args.trace, args.trace_block_tokens), args.requests)
        # Before they are scaled: a block that is full afterwards need not have been.
        annotated = annotate(records, args.trace_block_tokens)
        return self._fitting(map(self._scale.apply, annotated))

    def _earlier(self) -> sink.Earlier | None:
        out = self._args.out
        if not self._args.resume:
            if out.exists():
                raise FileExistsError(f"{out} exists: pass --resume, or another --out")
            return None
        earlier = sink.resume(out, self._header)
        errors = Counter(o.error for o in earlier.outcomes.values() if o.error is not None)
        kinds = ", ".join(f"{count} {kind}" for kind, count in errors.most_common())
        fate = "are sent again" if self._args.retry_errors else "are not sent again either"
        self._console.print(
            f"{len(earlier.outcomes) - errors.total()} requests were answered before and are not "
            f"sent again"
            + (f"; {errors.total()} failed ({kinds}) and {fate}" if errors else "")
            + (f"; {earlier.torn_bytes} bytes of a torn line dropped" if earlier.torn_bytes else "")
        )
        return earlier

    def _report(self) -> None:
        outcomes = list(sink.load(self._args.out).outcomes.values())
        result = report(outcomes, self._settings.classes)
        late_s = self._args.late_ms / 1e3
        show(result, self._console, late_s)
        path = self._args.summary or self._args.out.with_suffix(".summary.json")
        write_summary(
            path,
            {
                **environment.describe(),
                "settings": self._header.settings,
                "trace_sha256": self._header.trace_sha256,
                "left_out": self._fitting.left_out,
                "report": result,
                "warnings": result.client.warnings(late_s),
            },
        )
        self._console.print(f"{self._args.out}, {path}")


# Whoever resumes with another value of these would get a file of two experiments.
_SETTINGS = (
    *("url", "prefill", "decode", "bootstrap_port", "requests", "block_tokens"),
    *("trace_block_tokens", "speed", "max_tokens", "dispatch", "think_seconds", "timeout"),
    *("seed", "classes"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic replay")
    add = parser.add_argument
    add("--url", type=_url, help="of a router, or of one server")
    add("--prefill", type=_url, help="without a router: URL of the prefill server,")
    add("--bootstrap-port", type=int, help="its bootstrap port,")
    add("--decode", type=_url, help="and URL of the decode server")
    add("--trace", type=Path, required=True, help="JSON lines in Mooncake's format")
    add("--requests", type=_positive, help="of the trace, from its start; default: all")
    add("--trace-block-tokens", type=_positive, default=BLOCK_TOKENS, help="of the file's blocks")
    add("--block-tokens", type=_positive, help="they are scaled to so many; default: not scaled")
    add("--speed", type=float, default=1.0, help="seconds of the trace in a second")
    add("--max-tokens", type=_positive, help="leaves out longer requests")
    add("--dispatch", choices=DISPATCH, default="trace", help="by trace time, or by think time")
    add("--think-seconds", type=float, help="between two turns; default: the recorded gap")
    add("--timeout", type=float, default=600.0, help="seconds, of each request")
    add("--model", type=Path, help="model folder, for the vocabulary that prompts draw from")
    add("--vocabulary", type=_range, default=range(1000, 30000), help="LOW:HIGH, without --model")
    add("--seed", type=int, default=0, help="of the prompts")
    default = Classes()
    add("--classes", choices=BY, default=default.by, help="new tokens by the trace, or as served")
    add("--medium-tokens", type=_positive, default=default.medium, help="WARM has fewer new ones")
    add("--heavy-tokens", type=_positive, default=default.heavy, help="HEAVY has more")
    add("--unscaled-classes", action="store_true", help="--block-tokens does not scale these two")
    add("--late-ms", type=float, default=50.0, help="warn if requests are sent later (p99)")
    add("--streams", type=_positive, default=2000, help="at once at most, checked against ulimit")
    add("--out", type=Path, default=Path("replay.jsonl"), help="JSON lines, one a request")
    add("--summary", type=Path, help="JSON; default: beside --out")
    add("--resume", action="store_true", help="go on with --out")
    add("--retry-errors", action="store_true", help="on resuming, send failed requests again")
    return parser


def _pair(args: argparse.Namespace) -> Target:
    host = urlsplit(args.prefill).hostname
    return Target(args.decode, args.prefill, host, args.bootstrap_port)


def _url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https"):
        raise argparse.ArgumentTypeError(f"{text!r} is no http URL")
    return text.rstrip("/")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _range(text: str) -> range:
    low, _, high = text.partition(":")
    if not int(low) < int(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
    return range(int(low), int(high))


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=1,  # rendering takes the interpreter from the event loop
    )

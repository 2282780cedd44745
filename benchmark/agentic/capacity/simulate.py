"""Replay a trace, or a closed loop over shared prefixes, against simulated pools.

python -m benchmark.agentic simulate --trace FILE --workers 8 --split 4 6
python -m benchmark.agentic simulate --generate 100000 --workers 1000 --rate 400 --split 700
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmark.agentic.capacity import costs as cost_files
from benchmark.agentic.capacity import trace
from benchmark.agentic.capacity.plot import lines
from benchmark.agentic.capacity.sim import policy
from benchmark.agentic.capacity.sim.decode import DecodeConfig
from benchmark.agentic.capacity.sim.fleet import Fleet, FleetConfig, Run
from benchmark.agentic.capacity.sim.jobs import Job, SharedPrefixes, from_trace
from benchmark.agentic.capacity.sim.outcome import Outcome, outcome
from benchmark.agentic.capacity.sim.prefill import PrefillConfig
from benchmark.harness import report
from benchmark.harness.command import status
from benchmark.traces.generate import AGENTIC, generate
from benchmark.traces.read import read
from benchmark.traces.record import BLOCK_TOKENS, Record


@dataclass(frozen=True)
class Arm:
    """A split of the fleet under one decode policy."""

    prefill_workers: int
    decode_workers: int
    radix: bool
    decode_policy: str

    @property
    def name(self) -> str:
        kept = "radix" if self.radix else "stock"
        return f"{self.prefill_workers}P {self.decode_workers}D {kept} {self.decode_policy}"


@dataclass(frozen=True)
class Row:
    """An arm and what came of it."""

    arm: Arm
    outcome: Outcome
    events: int
    wall_s: float
    """Of the simulation itself."""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console()
    return status(lambda: run(args, console), console)


def run(args: argparse.Namespace, console: Console) -> int:
    """One simulation an arm; a JSON line each, a table, and plots."""
    costs = cost_files.load(args.costs)
    records = _records(args)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    last: Run | None = None

    def progressed(task: TaskID) -> Callable[[Job], None]:
        return lambda job: progress.advance(task)

    with (
        Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
        (args.out / "simulate.jsonl").open("w") as out,
    ):
        for arm in _arms(args):
            task = progress.add_task(arm.name, total=len(records) if records else args.requests)
            began = time.perf_counter()
            last = Fleet(_config(args, arm), costs).run(
                _jobs(args, records),
                concurrency=None if records else args.concurrency,
                sample_s=args.sample_s,
                on_end=progressed(task),
            )
            row = Row(arm, outcome(last), last.events, time.perf_counter() - began)
            rows.append(row)
            out.write(msgspec.json.encode(row).decode() + "\n")
            out.flush()  # a long run that is stopped keeps what it has
    _print(rows, console)
    _draw(args, rows, last)
    console.print(f"simulate.jsonl and plots in {args.out}")
    return 0


def _records(args: argparse.Namespace) -> list[Record]:
    """The trace, at ``--rate``; none means a closed loop."""
    if args.trace:
        return _at_rate(list(islice(read(args.trace), args.limit)), args.rate)
    if not args.generate:
        return []
    shape = AGENTIC
    if args.rate:
        # More people, not faster ones: only what is left to the rate is taken from the clock.
        few = list(generate(min(args.generate, 20_000), args.seed, shape))
        more = args.rate / trace.facts(few).requests_per_s
        shape = replace(shape, families_per_s=shape.families_per_s * more)
    return _at_rate(list(generate(args.generate, args.seed, shape)), args.rate)


def _at_rate(records: list[Record], rate: float | None) -> list[Record]:
    if not rate or not records:
        return records
    stretch = trace.facts(records).requests_per_s / rate
    return [msgspec.structs.replace(r, timestamp=r.timestamp * stretch) for r in records]


def _jobs(args: argparse.Namespace, records: Sequence[Record]) -> Iterator[Job]:
    if records:
        return from_trace(records)
    return SharedPrefixes(
        args.requests,
        args.prefixes,
        args.prefix,
        args.suffix,
        args.output,
        args.suffix_spread,
        args.output_spread,
        args.block,
    ).jobs(args.seed)


def _arms(args: argparse.Namespace) -> Iterator[Arm]:
    for prefill in args.split or [args.workers // 2]:
        if not 0 < prefill < args.workers:
            raise ValueError(f"--split {prefill}: of {args.workers} workers, one must decode")
        for radix in {"both": (False, True), "off": (False,), "on": (True,)}[args.radix]:
            for name in args.decode_policy:
                # What decode holds is nothing to route by without the radix cache.
                if radix or name != "delta_kv":
                    yield Arm(prefill, args.workers - prefill, radix, name)


def _config(args: argparse.Namespace, arm: Arm) -> FleetConfig:
    return FleetConfig(
        PrefillConfig(args.prefill_pool or args.pool, args.chunk),
        DecodeConfig(
            args.pool,
            arm.radix,
            args.reserved,
            args.max_running,
            args.page,
            gentle=arm.radix and args.admission == "patchset",
        ),
        arm.prefill_workers,
        arm.decode_workers,
        args.prefill_policy,
        arm.decode_policy,
        block_tokens=BLOCK_TOKENS if args.trace or args.generate else args.block,
    )


def _print(rows: Sequence[Row], console: Console) -> None:
    columns = [
        "arm",
        "req/s",
        "TTFT p50, s",
        "p90, s",
        "ITL p50, ms",
        "running",
        "peak",
        "pool in use",
        "decode hit",
        "prefill hit",
        "prefill busy",
        "link busy",
        "retracted",
        "rejected",
        "events",
        "wall, s",
    ]
    report.print_table(
        "simulated; running, peak and pool are of one decode worker, in the middle half of the run",
        columns,
        [
            [
                row.arm.name,
                f"{o.requests_per_s:,.2f}",
                f"{o.ttft.p50:,.2f}",
                f"{o.ttft.p90:,.1f}",
                f"{1e3 * o.itl.p50:,.1f}",
                f"{o.middle_running:,.1f}",
                f"{o.peak_running:,}",
                f"{o.middle_in_use:.0%}",
                f"{o.decode_hit:.0%}",
                f"{o.prefill_hit:.0%}",
                f"{o.prefill_busy:.0%}",
                f"{o.link_busy:.0%}",
                f"{o.retracted:,}",
                f"{o.rejected:,}",
                f"{row.events:,}",
                f"{row.wall_s:.1f}",
            ]
            for row in rows
            for o in [row.outcome]
        ],
        console,
    )


def _draw(args: argparse.Namespace, rows: Sequence[Row], last: Run | None) -> None:
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kept = "radix" if row.arm.radix else "stock"
        kinds.setdefault(f"{kept} {row.arm.decode_policy}", []).append(row)
    splits = sorted({row.arm.prefill_workers for row in rows})
    if len(splits) > 1:
        pictures: list[tuple[str, str, Callable[[Outcome], float]]] = [
            ("ttft", "TTFT p90, s", lambda o: o.ttft.p90),
            ("rate", "requests/s", lambda o: o.requests_per_s),
            ("pool", "share of the decode pools in use", lambda o: o.middle_in_use),
        ]
        for name, title, of in pictures:
            series = {kind: [of(r.outcome) for r in of_kind] for kind, of_kind in kinds.items()}
            path = args.out / f"splits-{name}.png"
            lines(path, title, splits, series, (f"prefill workers of {args.workers}", title))
    if last is not None and last.samples:
        count = len(last.decode)
        lines(
            args.out / "timeline.png",
            f"{rows[-1].arm.name}, a decode worker on average",
            [s.at for s in last.samples],
            {
                "running": [s.running / count for s in last.samples],
                "waiting for pages": [s.queued / count for s in last.samples],
            },
            ("s", "requests"),
        )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic simulate")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, help="Mooncake format; a closed loop without it")
    source.add_argument("--generate", type=int, metavar="N", help="an agentic trace of N requests")
    parser.add_argument("--limit", type=int, help="only the trace's first requests")
    parser.add_argument(
        "--rate", type=float, help="requests/s: a trace stretched, or more sessions generated"
    )
    parser.add_argument("--requests", type=int, default=1000, help="closed loop: in all")
    parser.add_argument("--concurrency", type=int, default=128, help="closed loop: at once")
    parser.add_argument("--prefixes", type=int, default=20, help="closed loop: distinct ones")
    parser.add_argument("--prefix", type=int, default=50_000, help="tokens")
    parser.add_argument("--suffix", type=int, default=4500, help="tokens")
    parser.add_argument("--suffix-spread", type=float, default=500, help="standard deviation")
    parser.add_argument("--output", type=float, default=355.4, help="tokens")
    parser.add_argument("--output-spread", type=float, default=100, help="standard deviation")
    parser.add_argument("--block", type=int, default=500, help="closed loop: tokens of a block")
    parser.add_argument("--costs", default="qwen3-coder-30b-h20", help="a name, or a YAML file")
    parser.add_argument("--workers", type=int, default=8, help="of the fleet, both roles")
    parser.add_argument(
        "--split", type=int, nargs="+", metavar="P", help="prefill workers; one arm each"
    )
    parser.add_argument("--pool", type=int, default=415_061, help="tokens of a decode worker")
    parser.add_argument("--prefill-pool", type=int, help="the same of prefill; --pool without it")
    parser.add_argument("--chunk", type=int, default=8192, help="prefill tokens of a batch")
    parser.add_argument("--radix", choices=["both", "on", "off"], default="both")
    parser.add_argument(
        "--admission",
        choices=["patchset", "upstream"],
        default="patchset",
        help="with radix: what is reserved for answers; upstream reserves as stock does",
    )
    parser.add_argument("--reserved", type=int, default=512, help="--num-reserved-decode-tokens")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--page", type=int, default=64, help="tokens")
    parser.add_argument("--prefill-policy", choices=policy.PREFILL, default="cache_aware")
    parser.add_argument(
        "--decode-policy", choices=policy.DECODE, nargs="+", default=["least_tokens", "delta_kv"]
    )
    parser.add_argument("--sample-s", type=float, default=5.0, help="between two samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("simulate-results"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())

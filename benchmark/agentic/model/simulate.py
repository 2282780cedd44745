"""Replay a trace, or a closed loop over shared prefixes, against simulated pools.

python -m benchmark.agentic simulate --trace FILE --workers 8 --split 4 6
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmark.agentic.model import costs as cost_files
from benchmark.agentic.model.sim.decode import DecodeConfig
from benchmark.agentic.model.sim.fleet import Fleet, FleetConfig
from benchmark.agentic.model.sim.jobs import SharedPrefixes, from_trace
from benchmark.agentic.model.sim.outcome import Outcome, outcome
from benchmark.agentic.model.sim.prefill import PrefillConfig
from benchmark.agentic.model.sim.routing import POLICIES
from benchmark.harness import plot, report
from benchmark.harness.command import add_fields, replaced, reported
from benchmark.traces.read import read
from benchmark.traces.record import BLOCK_TOKENS, Record
from benchmark.traces.units import UnitCheck

LOOP = SharedPrefixes()
Rows = list[tuple[FleetConfig, Outcome]]


@reported
def main(argv: list[str]) -> int:
    """One simulation an arm; a JSON line each, a table, and a plot."""
    args, console = _arguments(argv), report.wide_console()
    costs, records = cost_files.load(args.costs), _records(args)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: Rows = []
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        Progress(*columns, console=console) as progress,
        (args.out / "simulate.jsonl").open("w") as out,
    ):
        for arm in _arms(args):
            task = progress.add_task(_name(arm), total=len(records) or args.requests)
            began = time.perf_counter()
            ended = Fleet(arm, costs).run(
                from_trace(records) if records else replaced(LOOP, args).jobs(args.seed),
                concurrency=None if records else args.concurrency,
                sample_s=args.sample_s,
                on_end=lambda job, task=task: progress.advance(task),  # type: ignore[misc]
            )
            took = time.perf_counter() - began
            rows.append((arm, outcome(ended, args.timeout_s)))
            row = {"arm": arm, "outcome": rows[-1][1], "events": ended.events, "wall_s": took}
            out.write(msgspec.json.encode(row).decode() + "\n")
            out.flush()  # a long run that is stopped keeps what it has
    title = "simulated; running, peak, pool: of a decode worker, in the middle half of the run"
    cells = [[_name(arm), *(cell(found) for cell in COLUMNS.values())] for arm, found in rows]
    report.print_table(title, ["arm", *COLUMNS], cells, console)
    _draw(args, rows)
    console.print(f"simulate.jsonl in {args.out}")
    return 0


def _records(args: argparse.Namespace) -> list[Record]:
    """The trace, at ``--rate``; none means a closed loop."""
    units = UnitCheck()
    records = list(units.watch(islice(read(args.trace), args.limit))) if args.trace else []
    for note in units.told(args.trace):
        print(note, file=sys.stderr)
    if not args.rate or not records:
        return records
    seconds = (records[-1].timestamp - records[0].timestamp) / 1000
    stretch = len(records) / seconds / args.rate
    return [msgspec.structs.replace(r, timestamp=r.timestamp * stretch) for r in records]


def _arms(args: argparse.Namespace) -> Iterator[FleetConfig]:
    """Splits of the fleet under each decode policy; without prefill workers all do both."""

    def arm(prefill: int, radix: bool, policy: str) -> FleetConfig:
        gentle = bool(radix and prefill and args.admission == "patchset")
        return FleetConfig(
            PrefillConfig(args.prefill_pool or args.pool, args.chunk),
            DecodeConfig(args.pool, radix, args.reserved, args.max_running, args.page, gentle),
            prefill,
            args.workers - prefill,
            args.prefill_policy,
            policy,
            block_tokens=BLOCK_TOKENS if args.trace else args.block,
        )

    if args.aggregated:
        yield from (arm(0, True, name) for name in args.decode_policy)
    for prefill in args.split or [args.workers // 2]:
        if not 0 < prefill < args.workers:
            raise ValueError(
                f"--split {prefill}: at least one of {args.workers} workers must decode"
            )
        for radix in {"both": (False, True), "off": (False,), "on": (True,)}[args.radix]:
            for name in args.decode_policy:
                # What decode holds is nothing to route by without the radix cache.
                if radix or name != "delta_kv":
                    yield arm(prefill, radix, name)


def _kind(arm: FleetConfig) -> str:
    """But for the split."""
    kept = "radix" if arm.decode.radix else "stock"
    return f"{kept if arm.prefill_workers else 'aggregated'} {arm.decode_policy}"


def _name(arm: FleetConfig) -> str:
    return f"{arm.prefill_workers}P {arm.decode_workers}D {_kind(arm)}"


#: Column -> cell.
COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "req/s": lambda o: f"{o.requests_per_s:,.2f}",
    "TTFT p50, s": lambda o: f"{o.ttft.p50:,.2f}",
    "p90, s": lambda o: f"{o.ttft.p90:,.1f}",
    "stalled by links, mean, s": lambda o: f"{o.stages['stalled'].mean:,.2f}",
    "ITL p50, ms": lambda o: f"{1e3 * o.itl.p50:,.1f}",
    "p99, ms": lambda o: f"{1e3 * o.itl.p99:,.1f}",
    "running": lambda o: f"{o.middle_running:,.1f}",
    "peak": lambda o: f"{o.peak_running:,}",
    "pool in use": lambda o: f"{o.middle_in_use:.0%}",
    "decode hit": lambda o: f"{o.decode_hit:.0%}",
    "prefill hit": lambda o: f"{o.prefill_hit:.0%}",
    "prefill busy": lambda o: f"{o.prefill_busy:.0%}",
    "link busy": lambda o: f"{o.link_busy:.0%}",
    "retracted": lambda o: f"{o.retracted:,}",
    "rejected": lambda o: f"{o.rejected:,}",
    "in time": lambda o: f"{o.in_time:.1%}",
}


def _draw(args: argparse.Namespace, rows: Rows) -> None:
    """TTFT over the split, a line a kind of arm."""
    curves: dict[str, dict[float, float]] = {}
    for arm, found in rows:
        if arm.prefill_workers:
            curves.setdefault(_kind(arm), {})[arm.prefill_workers] = found.ttft.p90
    if any(len(curve) > 1 for curve in curves.values()):
        labels = (f"prefill workers of {args.workers}", "TTFT p90, s")
        plot.lines(args.out / "splits-ttft.png", labels[1], curves, labels)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic simulate")
    add = parser.add_argument
    add("--trace", type=Path, help="trace in Mooncake format; default: a closed loop")
    add("--limit", type=int, help="use only the first requests of the trace")
    add("--rate", type=float, help="requests/s: stretch or compress the trace to this rate")
    add("--concurrency", type=int, default=128, help="closed loop: concurrent requests")
    add_fields(
        parser,
        LOOP,
        requests="closed loop: total requests",
        prefixes="closed loop: distinct prefixes",
        prefix="tokens",
        suffix="tokens",
        suffix_spread="standard deviation",
        output="tokens",
        output_spread="standard deviation",
        block="closed loop: tokens per block",
    )
    add("--costs", default="qwen3-coder-30b-h20", help="costs: a name, or a YAML file")
    add("--workers", type=int, default=8, help="workers of the fleet, both roles")
    add(
        "--split",
        type=int,
        nargs="+",
        metavar="P",
        help="numbers of prefill workers; one arm each",
    )
    add("--aggregated", action="store_true", help="add an arm of aggregated workers")
    add("--pool", type=int, default=415_061, help="KV pool of a decode worker, tokens")
    add("--prefill-pool", type=int, help="KV pool of a prefill worker; default: --pool")
    add("--chunk", type=int, default=8192, help="prefill tokens per batch")
    add("--radix", choices=["both", "on", "off"], default="both")
    add(
        "--admission",
        choices=["patchset", "upstream"],
        default="patchset",
        help="with radix: tokens reserved for outputs; upstream reserves as stock does",
    )
    add("--reserved", type=int, default=512, help="--num-reserved-decode-tokens")
    add("--max-running", type=int, default=256)
    add("--page", type=int, default=64, help="tokens")
    add("--prefill-policy", choices=POLICIES, default="least_pending")
    add("--decode-policy", choices=POLICIES, nargs="+", default=["least_tokens", "delta_kv"])
    add("--sample-s", type=float, default=5.0, help="seconds between two samples")
    add("--timeout-s", type=float, default=600.0, help="timeout of a client, seconds")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("simulate-results"))
    return parser.parse_args(argv)

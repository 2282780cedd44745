"""``python -m benchmark.kv_transfer <run>``; described in README.md in this folder."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmark.harness.command import retyped, status
from benchmark.harness.environment import describe
from benchmark.harness.ports import allocate_ports
from benchmark.harness.report import print_table, write_summary
from benchmark.kv_transfer import arm, shapes, summary
from benchmark.kv_transfer.runs import ARMS, BACKENDS, RUNS, TRANSPORTS, Round, Run, Setup


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part.replace("_", "")) for part in text.split(","))


def _arms(text: str) -> tuple[str, ...]:
    arms = tuple(text.split(","))
    if unknown := set(arms) - set(ARMS):
        raise argparse.ArgumentTypeError(f"{unknown.pop()}: choose from {', '.join(ARMS)}")
    return arms


def _shapes() -> list[str]:
    """Return the models that the ends can register: those without an index."""
    return [name for name, shape in shapes.table().items() if not shape.index_bytes]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.kv_transfer",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:8} {run.question}" for name, run in RUNS.items()),
    )
    add = parser.add_argument
    add("run", choices=RUNS)
    add("--backend", choices=BACKENDS, default="nixl")
    add("--shape", choices=_shapes(), default="qwen3-32b")
    add("--transport", choices=TRANSPORTS, help="UCX's; auto on a GPU, else shm (stall: tcp)")
    add("--arms", type=_arms, help=f"from {','.join(ARMS)}")
    add("--tokens", type=_numbers, help="tokens of a room; several: one load each")
    add("--page-size", type=int, help="tokens a page; 16, and 1 for send")
    add("--rooms", type=int, help="rooms in a round")
    add("--peers", type=int, help="decode processes")
    add("--rounds", type=int, help="measured rounds in a pass")
    add("--passes", type=int, help="times that every arm is started again")
    add("--out", type=Path, default=Path("out/kv_transfer"), help="folder of the results")
    return parser


def _measure(args: argparse.Namespace, console: Console) -> int:
    """Run, print, and write the results. Return non-zero if a bound does not hold."""
    import psutil
    import torch

    options = {name: value for name, value in vars(args).items() if value is not None}
    run = replace(RUNS[args.run], **{k: v for k, v in options.items() if k in Run.__annotations__})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, transport = shapes.load(args.shape), args.transport or "auto"
    if device == "cpu":  # fewer layers leave room for more tokens
        shape = msgspec.structs.replace(shape, layers=min(8, shape.layers))
        transport = run.transport
        wanted = (1 + run.peers) * run.pool_pages * run.page_size * shape.token_bytes
        if wanted > psutil.virtual_memory().available:
            raise ValueError(f"{wanted / 1e9:.1f} GB of pools are not free: fewer --tokens")
    machine, measured = describe(), defaultdict[tuple[str, int], list[Round]](list)
    idle: dict[str, dict[str, float]] = {}
    for turn in range(run.passes):
        # Change the first arm in each pass, because the machine may warm up or throttle.
        first = turn % len(run.arms)
        for name in [*run.arms[first:], *run.arms[:first]]:
            console.print(f"pass {turn + 1}, [bold]{name}[/]")
            rounds, idle[name] = arm.in_processes(
                Setup(
                    run=run,
                    arm=name,
                    backend=args.backend,
                    transport=transport,
                    shape=shape,
                    device=device,
                    ports=allocate_ports(2 + run.peers),
                )
            )
            for measured_round in rounds:
                measured[name, measured_round.tokens].append(measured_round)
    records = []
    for (name, tokens), rounds in measured.items():
        numbers = summary.summarize([r for r in rounds if not r.stopped])
        numbers |= summary.gaps(rounds) if run.work_s else {}
        numbers |= summary.stalls(rounds, run) if run.deadline_s else {}
        numbers |= {"idle_share_of_a_core": idle[name]} if run.idle_s else {}
        records.append({"arm": name, "tokens": tokens, **numbers})
    records.sort(key=lambda record: record["tokens"])
    bounds = summary.verdicts(args.run, {record["arm"]: record for record in records}, run)
    _print(run, records, console)
    console.print(*map(str, bounds), sep="\n")
    on_tcp = args.backend == "mooncake" and device == "cpu"
    settings = "".join(
        f"{name}={value} "
        for name, value in sorted(os.environ.items())
        if name.startswith("SGLANG_DISAGGREGATION_")
    )
    header = {
        **machine,
        "memory": "VRAM" if device == "cuda" else "DRAM",
        "backend": args.backend,
        "transport": "TCP" if on_tcp else f"UCX, {transport}",
        "shape": f"{shape.name} ({shape.layers} layers), {shape.token_bytes:,} bytes a token in "
        f"{shape.buffers} buffers",
        "command": f"{settings}python -m benchmark.kv_transfer {retyped(sys.argv[1:])}",
    }
    content = {"run": header, "results": records, "bounds": [str(bound) for bound in bounds]}
    write_summary(args.out / f"{args.run}-{args.backend}.json", content)
    return 0 if all(bound.holds for bound in bounds) else 1


def _print(run: Run, records: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print one row a quantity, and one column an arm and size."""
    columns = [f"{record['arm']}, {record['tokens']:,} tokens" for record in records]
    rows = []
    for key, value in list(records[0].items())[2:]:
        label = key.replace("_", " ")
        if isinstance(value, dict):
            label += ": " + " / ".join(value)
        rows.append([label, *(_cell(record[key]) for record in records)])
    load = f"{run.rooms} rooms, {run.in_flight} at once, {run.peers} peers, page {run.page_size}"
    print_table(f"{run.question} {load}", ["", *columns], rows, console)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(map(_cell, value.values()))
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    args, console = _parser().parse_args(), Console()
    return status(lambda: _measure(args, console), console)


if __name__ == "__main__":
    sys.exit(main())

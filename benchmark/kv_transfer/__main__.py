"""``python -m benchmark.kv_transfer <run>``; README.md beside it says more."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import retyped, status
from benchmark.harness.environment import describe
from benchmark.harness.report import plain, wide_console
from benchmark.kv_transfer import runs, shapes
from benchmark.kv_transfer.fleet import TRANSPORTS
from benchmark.kv_transfer.records import ARMS, BACKENDS
from benchmark.kv_transfer.runs import Case, Options


@dataclass(frozen=True)
class Run:
    """A run, and its load where none is given."""

    what: str
    arms: tuple[str, ...] = ("stock", "ours")
    rooms: int = 1
    in_flight: int = 1
    peers: int = 1
    tokens: int = 0
    rounds: int = 5
    #: Tokens of a room, one case each.
    sizes: tuple[int, ...] = ()


_ALL = ("stock", "ours", "radix")
_BUSY = {"rooms": 64, "in_flight": 64, "peers": 4, "tokens": 1024, "rounds": 3}
RUNS = {
    "send": Run(
        "What does a call of send cost the scheduler's thread?",
        rooms=20,
        in_flight=4,
        tokens=2048,
    ),
    "fleet": Run("How fast are many rooms on four peers?", _ALL, **_BUSY),
    "gap": Run("How long does prefill's loop stand still under load?", _ALL, **_BUSY),
    "delay": Run(
        "How much later is a room complete because workers pause between polls?",
        ("ours", "ours-spin"),
        10,
        sizes=(16, 256, 2048, 8192),
    ),
    "stall": Run("What becomes of the other rooms if one of four peers stops?", **_BUSY),
    "idle": Run(
        "How much CPU does an idle prefill process use?", rooms=4, in_flight=4, tokens=1024
    ),
}


def _numbers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.kv_transfer",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:8} {run.what}" for name, run in RUNS.items()),
    )
    add = parser.add_argument
    add("run", choices=RUNS)
    add("--backend", choices=BACKENDS, default="nixl")
    add("--shape", choices=shapes.names(), default="qwen3-32b")
    add("--layers", type=int, help="layers of the shape to move, so that more tokens fit")
    add("--transport", choices=TRANSPORTS, help="of UCX; auto on a GPU, else shm (stall: tcp)")
    add("--arms", type=_words, help=f"from {','.join(ARMS)}")
    add("--tokens", type=int, help="of a room; delay takes --sizes")
    add("--sizes", type=_numbers, help="delay: tokens of a room")
    add("--page-size", type=int, help="tokens a page; 16, and 1 for send")
    add("--rooms", type=int, help="of a round")
    add("--in-flight", type=int, help="rooms under way at once")
    add("--peers", type=int, choices=range(1, 5), help="decode peers")
    add("--chunks", type=int, default=1, help="chunks of a room")
    add("--rounds", type=int, help="measured rounds in a pass")
    add("--passes", type=int, default=2, help="times that every arm is started afresh")
    add("--pause-us", type=float, default=200, help="of prefill's loop between two looks")
    add("--work-us", type=float, default=500, help="gap: Python work in a turn of prefill's loop")
    add("--deadline", type=float, default=5.0, help="stall: seconds of a transfer")
    add("--seconds", type=float, default=10.0, help="idle: how long")
    add("--limit", type=float, default=120.0, help="seconds of a round, at most")
    add("--max-bytes", type=float, default=8e9, help="of all pools together")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("out/kv_transfer"), help="folder of the results")
    return parser


def _options(args: argparse.Namespace, console: Console) -> Options:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = RUNS[args.run]
    # Between processes on one host, shared memory lands without the peer, stopped or not.
    transport = "auto" if device == "cuda" else "tcp" if args.run == "stall" else "shm"
    arms = args.arms or list(default.arms)
    for arm in arms:
        if arm not in ARMS:
            raise ValueError(f"--arms {arm}: choose from {', '.join(ARMS)}")
    return Options(
        backend=args.backend,
        shape=shapes.load(args.shape).with_layers(args.layers or (8 if device == "cpu" else None)),
        arms=arms,
        transport=args.transport or transport,
        device=device,
        passes=args.passes,
        rounds=args.rounds or default.rounds,
        limit_s=args.limit,
        pause_s=args.pause_us * 1e-6,
        work_s=args.work_us * 1e-6 if args.run == "gap" else 0.0,
        max_bytes=int(args.max_bytes),
        decode_pause_s=5e-5 if args.run == "delay" else 1e-3,
        seed=args.seed,
        console=console,
    )


def _case(args: argparse.Namespace) -> Case:
    default = RUNS[args.run]
    return Case(
        tokens=args.tokens or default.tokens,
        page_size=args.page_size or (1 if args.run == "send" else 16),
        rooms=args.rooms or max(default.rooms, args.in_flight or 1),
        in_flight=args.in_flight or default.in_flight,
        peers=args.peers or default.peers,
        chunks=args.chunks,
    )


def _run(args: argparse.Namespace, options: Options, case: Case) -> runs.Answer:
    if args.run == "delay":
        sizes = args.sizes or RUNS["delay"].sizes
        return runs.run_loads(options, [replace(case, tokens=size) for size in sizes], "delay")[0]
    if args.run == "stall":
        return runs.run_stall(options, case, args.deadline)
    if args.run == "idle":
        return runs.run_idle(options, case, args.seconds)
    return {"send": runs.run_send, "fleet": runs.run_fleet, "gap": runs.run_gap}[args.run](
        options, case
    )


def main() -> int:
    args, console = _parser().parse_args(), wide_console()
    return status(lambda: _measure(args, console), console)


def _measure(args: argparse.Namespace, console: Console) -> int:
    """Runs, and writes the page; non-zero where a bound does not hold."""
    machine = describe()
    stem = f"{machine['date']}-{args.run}-{args.backend}"
    options = _options(args, console)
    answer = _run(args, options, _case(args))
    on_tcp = options.backend == "mooncake" and options.device == "cpu"
    header = {
        **machine,
        "memory": "VRAM" if options.device == "cuda" else "DRAM",
        "backend": options.backend,
        "transport": "TCP" if on_tcp else f"UCX, {options.transport}",
        "shape": f"{options.shape.name}, {options.shape.token_bytes:,} bytes a token in "
        f"{options.shape.buffers} buffers",
        "command": "python -m benchmark.kv_transfer " + retyped(sys.argv[1:]),
    }
    verdicts = [str(verdict) for verdict in answer.verdicts]
    for verdict in verdicts:
        console.print(verdict)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "run", **header}, *options.lines, {"kind": "verdicts", "verdicts": verdicts}]
    text = "".join(json.dumps(plain(line)) + "\n" for line in lines)
    (args.out / f"{stem}.jsonl").write_text(text)
    page = _page(f"{RUNS[args.run].what} ({args.backend})", header, verdicts, answer.parts)
    (args.out / f"{stem}.md").write_text(page)
    return 0 if all(verdict.holds for verdict in answer.verdicts) else 1


def _page(
    question: str, header: Mapping[str, str], verdicts: Sequence[str], parts: Sequence[str]
) -> str:
    """Markdown: the question, which bounds hold, the command, the machine, and the tables."""
    held = "\n".join(f"- {verdict}" for verdict in verdicts)
    facts = "\n".join(f"- {key}: {value}" for key, value in header.items() if key != "command")
    every = (f"# {question}", held, f"Command: `{header['command']}`", facts, *parts)
    return "\n\n".join(part.strip() for part in every if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())

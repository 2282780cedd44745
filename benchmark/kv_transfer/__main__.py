"""``python -m benchmark.kv_transfer <run>``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmark.kv_transfer import choice, delay, gaps, output, plot, runs, shapes
from benchmark.kv_transfer.cases import Case, Options
from benchmark.kv_transfer.fleet import TRANSPORTS, ArmFailed
from benchmark.kv_transfer.patterns import PATTERNS
from benchmark.kv_transfer.records import ARMS, BACKENDS

RUNS = {
    "sweep": "time and bandwidth against size",
    "send": "what a call of send costs the scheduler's thread",
    "fleet": "many rooms on four peers",
    "gap": "how long prefill's loop stands still under load",
    "delay": "how much later a room is complete because workers pause between looks",
    "stall": "the same with one of the peers stopped",
    "idle": "CPU use with nothing to do",
    "load": "CPU seconds for what is moved",
    "choice": "merged ranges, prepared lists or strided ones",
}


def _numbers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.kv_transfer",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:8} {what}" for name, what in RUNS.items()),
    )
    add = parser.add_argument
    add("run", choices=RUNS)
    add("--backend", choices=BACKENDS, default="nixl")
    add("--shape", choices=shapes.names(), default="qwen3-32b")
    add("--layers", type=int, help="layers of the shape to move, so that more tokens fit")
    add("--transport", choices=TRANSPORTS, help="of UCX; auto on a GPU, else shm (stall: tcp)")
    add("--arms", type=_words, help=f"from {','.join(ARMS)}")
    add("--tokens", type=int, help="of a room; sweep takes --sizes")
    add("--sizes", type=_numbers, default=list(shapes.SIZES), help="sweep: tokens of a room")
    add("--page-size", type=int, help="tokens a page; 16, and 1 for send")
    add("--page-sizes", type=_numbers, default=[16], help="sweep: several, such as 1,16,64")
    add("--patterns", type=_words, default=list(PATTERNS), help="sweep: of pages")
    add("--pattern", choices=PATTERNS, default="scattered")
    add("--rooms", type=int, help="of a round; sweep: as many as --in-flight")
    add("--in-flight", type=int, help="rooms under way at once")
    add("--peers", type=int, help="decode peers, 1 to 4")
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
    add("--out", type=Path, default=Path(__file__).parent / "results")
    return parser


_MAIN_ARMS = ARMS[:3]
#: Tokens of a room in ``delay``, unless others are given.
_SIZES = (16, 256, 2048, 8192)

#: Run -> arms, rooms, in flight, peers, tokens, rounds, layers where none are given.
_DEFAULTS = {
    "sweep": (_MAIN_ARMS, 1, 1, 1, 0, 5, 8),
    "send": (("stock", "ours"), 20, 4, 1, 2048, 5, 8),
    "fleet": (_MAIN_ARMS, 64, 64, 4, 1024, 3, 8),
    "gap": (_MAIN_ARMS, 64, 64, 4, 1024, 3, 8),
    "delay": (("ours", "ours-spin"), 10, 1, 1, 0, 5, 8),
    "stall": (("stock", "ours"), 64, 64, 4, 1024, 3, 8),
    "idle": (("stock", "ours"), 4, 4, 1, 1024, 1, 8),
    "load": (_MAIN_ARMS, 16, 8, 1, 4096, 3, 8),
    "choice": (("bare",), 1, 1, 1, 0, 5, 8),
}


def _options(args: argparse.Namespace, console: Console) -> tuple[Options, Case]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    arms, rooms, in_flight, peers, tokens, rounds, layers = _DEFAULTS[args.run]
    if args.peers is not None and not 1 <= args.peers <= 4:
        raise ValueError(f"--peers {args.peers}: 1 to 4")
    shape = shapes.load(args.shape)
    given = args.layers or (layers if device == "cpu" else None)
    options = Options(
        backend=args.backend,
        shape=shape.with_layers(given),
        arms=args.arms or list(arms),
        # Between processes on one host, shared memory lands without the peer, stopped or not.
        transport=args.transport
        or ("auto" if device == "cuda" else "tcp" if args.run == "stall" else "shm"),
        device=device,
        passes=args.passes,
        rounds=args.rounds or rounds,
        limit_s=args.limit,
        pause_s=args.pause_us * 1e-6,
        work_s=args.work_us * 1e-6 if args.run == "gap" else 0.0,
        max_bytes=int(args.max_bytes),
        decode_pause_s=5e-5 if args.run == "delay" else 1e-3,
        seed=args.seed,
        console=console,
    )
    for arm in options.arms:
        if arm not in ARMS:
            raise ValueError(f"--arms {arm}: choose from {', '.join(ARMS)}")
    case = Case(
        tokens=args.tokens or tokens,
        page_size=args.page_size or (1 if args.run == "send" else 16),
        pattern=args.pattern,
        rooms=args.rooms or max(rooms, args.in_flight or 1),
        in_flight=args.in_flight or in_flight,
        peers=args.peers or peers,
        chunks=args.chunks,
    )
    return options, case


def _sweep(
    args: argparse.Namespace, options: Options, case: Case, lines: output.Lines, stem: str
) -> runs.Answer:
    fit, left_out = shapes.fitting(
        options.shape, sorted(args.sizes), options.max_bytes, case.rooms, case.peers
    )
    notes = [
        f"Left out: {tokens:,} tokens, whose pools take {wanted / 1e9:.1f} GB; --max-bytes is "
        f"{options.max_bytes / 1e9:.1f} GB."
        for tokens, wanted in left_out
    ]
    for note in notes:
        options.console.print(note)
    cases = [
        Case(size, page_size, pattern, case.rooms, case.in_flight, case.peers, case.chunks)
        for page_size in args.page_sizes
        for pattern in args.patterns
        for size in fit
    ]
    answer = runs.run_loads(options, cases, lines, "sweep")
    curves: dict[str, list[tuple[int, runs.Summary]]] = {}
    for (arm, each), found in answer.summaries.items():
        label = f"{arm} {each.pattern}, pages of {each.page_size}"
        curves.setdefault(label, []).append((each.tokens, found))
    pictures = plot.draw(args.out, stem, curves)
    return runs.Answer([*answer.parts, *(f"![{p.stem}]({p.name})" for p in pictures), *notes])


def main() -> int:
    args = _parser().parse_args()
    console = Console()
    if console.width < 190:  # a table that is cut says nothing
        console = Console(width=190)
    try:
        options, case = _options(args, console)
        machine = output.machine()
        header = {
            **machine,
            "memory": "VRAM" if options.device == "cuda" else "DRAM",
            "backend": options.backend,
            "transport": "TCP" if options.backend == "mooncake" and options.device == "cpu"
            else f"UCX, {options.transport}",
            "shape": f"{options.shape.name}, {options.shape.token_bytes:,} bytes a token in "
            f"{options.shape.buffers} buffers",
            "command": "python -m benchmark.kv_transfer " + _command(sys.argv[1:]),
        }  # fmt: skip
        stem = f"{machine['date']}-{args.run}-{args.backend}"
        lines = output.Lines(args.out / f"{stem}.jsonl", header)
        if args.run == "sweep":
            answer = _sweep(args, options, case, lines, stem)
        elif args.run == "choice":
            answer = choice.run(options, lines)
        elif args.run == "delay":
            sizes = _SIZES if args.sizes == list(shapes.SIZES) else args.sizes
            answer = delay.run(options, [replace(case, tokens=size) for size in sizes], lines)
        elif args.run == "stall":
            answer = runs.run_stall(options, case, lines, args.deadline)
        elif args.run == "idle":
            answer = runs.run_idle(options, case, lines, args.seconds)
        else:
            run = {
                "send": runs.run_send,
                "fleet": runs.run_fleet,
                "gap": gaps.run,
                "load": runs.run_load,
            }[args.run]
            answer = run(options, case, lines)
    except (ArmFailed, ValueError) as failure:
        console.print(f"[red]{failure}[/]", markup=True, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    verdicts = [str(verdict) for verdict in answer.verdicts]
    for verdict in verdicts:
        console.print(verdict)
    lines.write({"kind": "verdicts", "verdicts": verdicts})
    lines.close()
    parts = [*answer.parts, "\n".join(f"- {verdict}" for verdict in verdicts)]
    title = f"{RUNS[args.run].capitalize()}: {args.backend}, {machine['date']}"
    output.write_page(args.out / f"{stem}.md", title, header, [p for p in parts if p])
    return 0 if all(verdict.holds for verdict in answer.verdicts) else 1


def _command(arguments: list[str]) -> str:
    """The arguments without the output folder, which is a path of this machine."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--out="):
            skip = False
        elif argument == "--out":
            skip = True
        else:
            kept.append(argument)
    return " ".join(kept)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmark.local_turns``; README.md beside it says more."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import status
from benchmark.local_turns.compare import run
from benchmark.local_turns.load import Load


def main() -> int:
    default = Load()
    parser = argparse.ArgumentParser(prog="python -m benchmark.local_turns")
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of all arms, in turn")
    add(
        "--arms",
        default="",
        help="only those whose names hold this pattern; no claims are checked then",
    )
    add("--talks", type=int, default=default.talks, help="at once")
    add("--turns", type=int, default=default.turns, help="of a talk beside cold prompts")
    add("--quiet-turns", type=int, default=default.quiet_turns, help="of a talk without them")
    add("--turn-tokens", type=int, default=default.turn_tokens, help="of a later turn's question")
    add("--cold-clients", type=int, nargs="+", default=default.cold_clients, help="a load each")
    add("--cold-tokens", type=int, default=default.cold_tokens, help="of a cold prompt")
    add("--local-tokens", type=int, default=default.local_tokens, help="the flag's value")
    add("--model", type=Path, help="model folder; a random one is made without it")
    add("--note", default="", help="about this run, for its readers")
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for JSON, the plot and the servers' logs",
    )
    args = parser.parse_args()
    console = Console()
    # Servers start sooner on a machine with no GPU (docs/advanced_features/cpu_standin.md).
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")

    def compare() -> int:
        load = Load(
            talks=args.talks,
            turns=args.turns,
            quiet_turns=args.quiet_turns,
            turn_tokens=args.turn_tokens,
            cold_clients=tuple(args.cold_clients),
            cold_tokens=args.cold_tokens,
            local_tokens=args.local_tokens,
        )
        return run(
            args.out,
            args.model,
            console,
            load,
            args.rounds,
            note=args.note,
            only=args.arms,
            command=_command(args, parser),
        )

    return status(compare, console)


def _command(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """What to type to repeat a run: the options that were not left as they are."""
    words = [parser.prog]
    for name, value in vars(args).items():
        if name not in ("out", "note", "model") and value != parser.get_default(name):
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmark.local_turns``; README.md beside it says more."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import add_common, add_fields, replaced, retyped, status
from benchmark.local_turns.compare import run
from benchmark.local_turns.load import Load


def main() -> int:
    load = Load()
    parser = argparse.ArgumentParser(prog="python -m benchmark.local_turns")
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of all arms, in turn")
    only = "only those whose names hold this pattern; no claims are checked then"
    add("--arms", default="", help=only)
    add_fields(
        parser,
        load,
        talks="at once",
        turns="of a talk",
        turn_tokens="of a later turn's question",
        cold_clients="a load each",
        cold_tokens="of a cold prompt",
        local_tokens="the flag's value",
    )
    add("--note", default="", help="about this run, for its readers")
    add_common(parser, Path(__file__).parent / "results")
    args, console = parser.parse_args(), Console()
    # Servers start sooner on a machine with no GPU (docs/advanced_features/cpu_standin.md).
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")
    command = f"{parser.prog} {retyped(sys.argv[1:])}".rstrip()
    notes = {"command": command, **({"note": args.note} if args.note else {})}
    load = replaced(load, args)
    return status(
        lambda: run(args.out, args.model, console, load, args.rounds, args.arms, notes), console
    )


if __name__ == "__main__":
    sys.exit(main())

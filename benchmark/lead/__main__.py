"""``python -m benchmark.lead``; README.md beside it says more."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import retyped, status
from benchmark.lead import measure
from benchmark.lead.arms import ARMS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.lead")
    add = parser.add_argument
    add("kind", choices=ARMS, help="kind of load")
    about = "rounds of all arms in turn, after those of OUT; 0: only what the answers must be"
    add("--rounds", type=int, default=3, help=about)
    about = "folder for rounds.jsonl, models and servers' logs; default: out/lead"
    add("--out", type=Path, default=Path("out/lead"), help=about)
    args, console = parser.parse_args(), Console()
    # Servers start sooner on a machine with no GPU (docs/advanced_features/cpu_standin.md).
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")
    notes = {"command": f"{parser.prog} {retyped(sys.argv[1:])}"}
    args.out.mkdir(parents=True, exist_ok=True)
    return status(
        lambda: measure.run(args.kind, args.out, args.rounds, notes, console),
        console,
    )


if __name__ == "__main__":
    sys.exit(main())

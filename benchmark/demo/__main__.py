"""``python -m benchmark.demo``: what the flag saves. ``--serve`` leaves the servers running."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmark.demo.play import PICTURE, play
from benchmark.demo.preflight import problems
from benchmark.demo.serve import serve
from benchmark.harness.environment import describe
from benchmark.harness.models import REPOSITORY, TINY_ARITH
from benchmark.harness.process import ServerFailed
from benchmark.harness.report import write_summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.demo", description=__doc__)
    add = parser.add_argument
    add("--serve", action="store_true", help="keep the servers running")
    add("--port", type=int, default=8000, help="port of the load balancer with --serve")
    add("--model", type=Path, default=TINY_ARITH, help="folder of a chat model")
    add(
        "--out",
        type=Path,
        default=REPOSITORY / "out" / "demo",
        help="folder for logs, table and picture",
    )
    args = parser.parse_args()
    # A pipe says no width, and 80 columns cut the table.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for problem in problems(args.port if args.serve else None, args.model):
        console.print(f"[red]Cannot start: {problem}[/]", highlight=False)
        return 2
    # Servers start sooner on a machine with no GPU (docs/advanced_features/cpu_standin.md).
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")
    began = time.monotonic()
    try:
        if args.serve:
            serve(args.model, args.port, args.out, console)
            return 0
        same = play(args.model, args.out, console)
    except ServerFailed as failure:
        console.print(f"[red]{failure.name}: {failure.diagnosis}[/]", highlight=False)
        console.print(f"The end of {failure.log}:\n{failure.tail}", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; all servers are stopped.")
        return 130
    seconds = time.monotonic() - began
    write_summary(args.out / "demo.summary.json", {**describe(), "seconds": seconds})
    console.print(f"Done in {seconds:.0f} s; logs in {args.out}", highlight=False)
    if not same:
        console.print("[red]The arms' outputs differ, or a request failed.[/]")
    print(f"Picture: {args.out / PICTURE}")  # as it is: a path may not be wrapped
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

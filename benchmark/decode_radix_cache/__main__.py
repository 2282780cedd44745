"""``python -m benchmark.decode_radix_cache {throughput,wire}``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmark.decode_radix_cache import throughput, wire
from benchmark.harness.command import status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.decode_radix_cache")
    parser.add_argument("question", choices=["throughput", "wire"], nargs="?", default="throughput")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for tables, JSON, the plot and the servers' logs",
    )
    parser.add_argument("--model", type=Path, help="model folder; a random one is made without it")
    parser.add_argument("--repeats", type=int, default=1, help="throughput: runs of each arm")
    parser.add_argument(
        "--spinning",
        action="store_true",
        help="throughput: one more arm, the flag with a progress thread that spins as in stock",
    )
    args = parser.parse_args()
    console = Console()

    def run() -> int:
        if args.question == "wire":
            return wire.run(args.out, args.model, console)
        return throughput.run(args.out, args.model, console, args.repeats, spinning=args.spinning)

    return status(run, console)


if __name__ == "__main__":
    sys.exit(main())

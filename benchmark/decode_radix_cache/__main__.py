"""``python -m benchmark.decode_radix_cache QUESTION``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from benchmark.decode_radix_cache import speculation, throughput, wire
from benchmark.harness.command import add_common, status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.decode_radix_cache")
    add = parser.add_argument
    questions = ["throughput", "wire", "speculation"]
    add("question", choices=questions, nargs="?", default=questions[0])
    add("--repeats", type=int, default=1, help="throughput: number of runs of each arm")
    add(
        "--spinning",
        action="store_true",
        help=(
            "throughput: add an arm with the flag and a progress thread that polls without a "
            "pause, as in stock"
        ),
    )
    add_common(parser)
    args, console = parser.parse_args(), Console()

    def run() -> int:
        if args.question == "wire":
            return wire.run(args.out, args.model, console)
        if args.question == "speculation":
            return speculation.run(args.out, console)
        return throughput.run(args.out, args.model, console, args.repeats, spinning=args.spinning)

    return status(run, console)


if __name__ == "__main__":
    sys.exit(main())

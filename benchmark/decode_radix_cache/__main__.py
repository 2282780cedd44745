"""``python -m benchmark.decode_radix_cache QUESTION``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from benchmark.decode_radix_cache import speculation, wire
from benchmark.harness.command import add_common, status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.decode_radix_cache")
    add = parser.add_argument
    questions = ["wire", "speculation"]
    add("question", choices=questions, nargs="?", default=questions[0])
    add_common(parser)
    args, console = parser.parse_args(), Console()

    def run() -> int:
        if args.question == "speculation":
            return speculation.run(args.out, console)
        return wire.run(args.out, args.model, console)

    return status(run, console)


if __name__ == "__main__":
    sys.exit(main())

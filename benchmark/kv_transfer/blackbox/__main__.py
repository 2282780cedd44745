"""``python -m benchmark.kv_transfer.blackbox``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import status
from benchmark.kv_transfer.blackbox.run import Load, run


def main() -> int:
    default = Load()
    parser = argparse.ArgumentParser(prog="python -m benchmark.kv_transfer.blackbox")
    parser.add_argument(
        "--sizes",
        type=lambda text: tuple(int(size) for size in text.split(",")),
        default=default.sizes,
        help="prompt lengths in tokens, with commas between them (default: 512 to 32768, doubling)",
    )
    parser.add_argument("--repeats", type=int, default=default.repeats, help="prompts of each size")
    parser.add_argument("--page-size", type=int, default=default.page_size)
    parser.add_argument(
        "--chunked-prefill-tokens", type=int, default=default.chunked_prefill_tokens
    )
    parser.add_argument("--model", type=Path, help="model folder; a random one is made without it")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for the requests, the summary, the plot and the servers' logs",
    )
    args = parser.parse_args()
    console = Console()
    load = Load(
        sizes=args.sizes,
        repeats=args.repeats,
        page_size=args.page_size,
        chunked_prefill_tokens=args.chunked_prefill_tokens,
    )
    return status(lambda: run(args.out, args.model, console, load), console)


if __name__ == "__main__":
    sys.exit(main())

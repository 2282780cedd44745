"""``python -m benchmark.hicache_buffer_only``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import status
from benchmark.hicache_buffer_only.compare import Load, run
from benchmark.hicache_buffer_only.memory import Split


def main() -> int:
    default, split = Load(), Split()
    parser = argparse.ArgumentParser(prog="python -m benchmark.hicache_buffer_only")
    add = parser.add_argument
    add("--trace", type=Path, help="a trace in Mooncake's format; without it one is generated")
    add("--requests", type=int, default=default.requests, help="of the trace, from its start")
    add("--block-tokens", type=int, default=default.block_tokens, help="512 are scaled to so many")
    add("--speed", type=float, default=default.speed, help="seconds of the trace in a second")
    add("--device-tokens", type=int, default=default.device_tokens, help="of a worker's pool")
    add("--ratio", type=float, default=split.ratio, help="host pool over device pool, cache arm")
    add("--store-share", type=float, default=split.store_share, help="store over pools, cache arm")
    add("--stage-share", type=float, default=split.stage_share, help="stage over host pool")
    add("--seed", type=int, default=default.seed, help="of the generated trace and all prompts")
    add("--model", type=Path, help="model folder; a random one is made without it")
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for JSON, the plot and the servers' logs",
    )
    args = parser.parse_args()
    console = Console()

    def compare() -> int:
        load = Load(
            requests=args.requests,
            block_tokens=args.block_tokens,
            speed=args.speed,
            device_tokens=args.device_tokens,
            seed=args.seed,
            split=Split(args.ratio, args.store_share, args.stage_share),
        )
        return run(args.out, args.model, args.trace, console, load)

    return status(compare, console)


if __name__ == "__main__":
    sys.exit(main())

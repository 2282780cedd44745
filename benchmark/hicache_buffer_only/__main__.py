"""``python -m benchmark.hicache_buffer_only``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import status
from benchmark.hicache_buffer_only.compare import AGENTS, CONVERSATION, TRACES, Load, compare
from benchmark.hicache_buffer_only.memory import Split


def main() -> int:
    default, split = Load(), Split()
    parser = argparse.ArgumentParser(prog="python -m benchmark.hicache_buffer_only")
    add = parser.add_argument
    add("--only", choices=TRACES, help="one of the two traces; both without it")
    add(
        "--trace",
        type=Path,
        help="conversations in Mooncake's format; without it they are generated",
    )
    add("--agents", type=Path, help="agents in Mooncake's format; without it they are generated")
    add("--requests", type=int, default=default.requests, help="of each trace, from its start")
    add("--rounds", type=int, default=default.rounds, help="every arm once in each")
    add("--block-tokens", type=int, default=default.block_tokens, help="512 are scaled to so many")
    add("--speed", type=float, default=default.speed, help="seconds of the trace in a second")
    add("--device-tokens", type=int, default=default.device_tokens, help="of a worker's pool")
    add("--ratio", type=float, default=split.ratio, help="host pool over device pool, cache arm")
    add("--store-share", type=float, default=split.store_share, help="store over pools, cache arm")
    add("--stage-share", type=float, default=split.stage_share, help="stage over host pool")
    add("--seed", type=int, default=default.seed, help="of generated traces and all prompts")
    add("--model", type=Path, help="model folder; a random one is made without it")
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for JSON, plots and the servers' logs; runs that are there are not made again",
    )
    args = parser.parse_args()
    console = Console()
    given = {CONVERSATION: args.trace, AGENTS: args.agents}
    traces = {name: path for name, path in given.items() if args.only in (None, name)}

    def run() -> int:
        load = Load(
            requests=args.requests,
            rounds=args.rounds,
            block_tokens=args.block_tokens,
            speed=args.speed,
            device_tokens=args.device_tokens,
            seed=args.seed,
            split=Split(
                ratio=args.ratio, store_share=args.store_share, stage_share=args.stage_share
            ),
        )
        return compare(args.out, args.model, traces, console, load)

    return status(run, console)


if __name__ == "__main__":
    sys.exit(main())

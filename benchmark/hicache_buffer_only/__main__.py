"""``python -m benchmark.hicache_buffer_only``; README.md beside it says more."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import add_common, add_fields, replaced, status
from benchmark.hicache_buffer_only.compare import (
    AGENTS,
    CONVERSATION,
    TRACES,
    UNSHARED,
    Load,
    compare,
)


def main() -> int:
    load = Load()
    parser = argparse.ArgumentParser(prog="python -m benchmark.hicache_buffer_only")
    add = parser.add_argument
    add("--only", choices=TRACES, help="one of the traces; default: all")
    add("--trace", type=Path, help="conversation trace in Mooncake's format; default: generated")
    add("--agents", type=Path, help="agent trace in Mooncake's format; default: generated")
    add_fields(
        parser,
        load,
        requests="requests of each trace, from its start",
        rounds="rounds, each with every arm once; rounds that --out already has are not repeated",
        block_tokens="tokens per block; blocks of 512 are scaled to this",
        speed="seconds of the trace per second",
        device_tokens="tokens of a worker's device pool",
        seed="seed of generated traces and all prompts",
    )
    add_fields(
        parser,
        load.split,
        ratio="host pool over device pool, cache arm",
        store_share="store over pools, cache arm",
        stage_share="staging buffer over host pool",
    )
    add_common(parser)
    args, console = parser.parse_args(), Console()
    given = {CONVERSATION: args.trace, AGENTS: args.agents, UNSHARED: None}
    traces = {name: path for name, path in given.items() if args.only in (None, name)}
    load = replace(replaced(load, args), split=replaced(load.split, args))
    return status(lambda: compare(args.out, args.model, traces, console, load), console)


if __name__ == "__main__":
    sys.exit(main())

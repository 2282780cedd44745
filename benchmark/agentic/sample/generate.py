"""Traffic as a trace, for machines with no trace at hand (``benchmark.traces.generate``).

python -m benchmark.agentic generate FILE [--shape NAME] [--requests N] [--seed N] [--no-sessions]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmark.agentic.sample.command import counted, reporting, whole
from benchmark.traces.generate import AGENTIC, CONVERSATION, TOOLS
from benchmark.traces.generate import generate as agentic
from benchmark.traces.read import write
from benchmark.traces.record import Record

__all__ = ["agentic", "main"]

SHAPES = {"agentic": AGENTIC, "conversation": CONVERSATION, "tools": TOOLS}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.agentic generate", description="Make a trace."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="agentic")
    parser.add_argument("--requests", type=whole, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-sessions", action="store_true", help="leave out session_id and turn, as Mooncake does"
    )
    args = parser.parse_args(argv)
    with reporting():
        records: Iterable[Record] = agentic(args.requests, args.seed, SHAPES[args.shape])
        if args.no_sessions:
            records = (msgspec.structs.replace(r, session_id=None, turn=None) for r in records)
        done = write(args.file, counted(records, "generating", args.requests))
        print(f"{done} requests")
    return 0

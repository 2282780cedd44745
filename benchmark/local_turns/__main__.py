"""``python -m benchmark.local_turns``; README.md beside it says more."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from rich.console import Console

from benchmark.harness.command import add_common, add_fields, replaced, retyped, status
from benchmark.local_turns.compare import run
from benchmark.local_turns.load import Load


def main() -> int:
    load = Load()
    parser = argparse.ArgumentParser(prog="python -m benchmark.local_turns")
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="rounds of all arms in turn")
    only = "only arms whose names match this pattern; then no claims are checked"
    add("--arms", default="", help=only)
    about = "the arms of the bound on inter-token latency: so many times the load beside 2 clients"
    add("--bounds", type=int, default=0, metavar="PLAYS", help=about)
    add_fields(
        parser,
        load,
        talks="concurrent sessions",
        turns="turns per session",
        turn_tokens="new tokens of a later turn",
        cold_clients="numbers of cold clients, one load each",
        cold_tokens="tokens of a cold prompt",
        local_tokens="value of --disaggregation-decode-local-tokens",
    )
    add("--note", default="", help="note about this run, for the page")
    add_common(parser)
    args, console = parser.parse_args(), Console()
    # Servers start sooner on a machine with no GPU (docs/advanced_features/cpu_standin.md).
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")
    command = f"{parser.prog} {retyped(sys.argv[1:])}".rstrip()
    notes = {"command": command, **({"note": args.note} if args.note else {})}
    load = replaced(load, args)
    if args.bounds:
        load = dataclasses.replace(load, cold_clients=(2,) * args.bounds)
    return status(
        lambda: run(
            args.out, args.model, console, load, args.rounds, args.arms, notes, bool(args.bounds)
        ),
        console,
    )


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmark demo``: show what the flags save. ``--serve`` keeps the servers running."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmark.harness.command import status
from benchmark.harness.models import REPOSITORY, TINY_ARITH
from benchmark.harness.ports import is_free
from benchmark.harness.report import print_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark demo", description=__doc__)
    add = parser.add_argument
    add("--serve", action="store_true", help="keep the servers of a chat model running")
    add("--whole", action="store_true", help="with --serve: add a shared store behind both servers")
    add("--port", type=int, default=8000, help="port of the load balancer with --serve")
    add("--model", type=Path, default=TINY_ARITH, help="folder of the chat model")
    about = "folder for logs and the page"
    add("--out", type=Path, default=REPOSITORY / "out" / "demo", help=about)
    args = parser.parse_args()
    # A pipe has no width, and the default of 80 columns would cut the table.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if args.whole and not args.serve:
        parser.error("--whole needs --serve")
    if args.serve and not is_free(args.port):
        console.print(f"[red]port {args.port} is taken: choose another with --port[/]")
        return 2
    if not args.serve:
        return play(args.out, console)
    from benchmark.demo.serve import serve

    return status(lambda: serve(args.model, args.port, args.out, console, args.whole), console)


def play(out: Path, console: Console) -> int:
    """Run the study `demo` and print its table. Return non-zero if the arms answer differently or a
    request fails."""
    from benchmark.agentic.report import page
    from benchmark.agentic.studies import cli

    began = time.monotonic()
    if code := cli.run(["demo", "--out", str(out)]):
        return code
    summary = json.loads((out / "summary.json").read_text())
    (arms,) = summary["loads"].values()
    compared, different = summary["answers"]
    shown = (*page.RESULTS, *page.COUNTED[:3])
    rows = [
        [column.head, *(column.shown(arm["numbers"]) for arm in arms.values())] for column in shown
    ]
    print_table(
        summary["study"]["question"].strip(), ["", *summary["titles"].values()], rows, console
    )
    failed, seconds = sum(arm["failed"] for arm in arms.values()), time.monotonic() - began
    console.print(
        f"{compared} requests were answered by several arms, {different or 'none'} of them "
        f"differently; {failed or 'none'} failed. Done in {seconds:.0f} s."
    )
    # Plain print: a path must not be wrapped.
    print(f"Page: {out / 'page.md'}\nPicture: {next(out.glob('*.svg'), 'none')}")
    return int(bool(different or failed))


if __name__ == "__main__":
    sys.exit(main())

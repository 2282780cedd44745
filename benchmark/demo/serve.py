"""Leaves a pair and its load balancer running for the user's own requests."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from benchmark.demo.play import configure
from benchmark.harness.pair import Pair

CURL = """curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{model}", "max_tokens": 120, "temperature": 0,
  "messages": [{{"role": "user", "content": "{question}"}}]
}}'"""
QUESTION = (
    "Clara has 26 pens. Then 5 friends bring 8 pens each, and 8 pens are sold. "
    "How many pens are left?"
)


def serve(model: Path, port: int, out: Path, console: Console) -> None:
    """Serves until interrupted.

    Raises:
        ServerFailed: a server did not start, or died later.
    """
    console.print("Starting prefill, decode and load balancer (about a minute)...")
    with Pair(configure(model, router_port=port), out / "serve") as pair:
        console.print("Serving, decode radix cache on. Send it a request:\n")
        url = pair.target.url
        # Plain print: what the user copies may not be wrapped.
        print(CURL.format(url=url, model=model.name, question=QUESTION), flush=True)
        console.print(
            f"\nIts counters: curl -s {pair.decode_url}/metrics | grep decode_prefix\nLogs: "
            f"{out / 'serve'}\nCtrl-C stops it.",
            highlight=False,
        )
        while all(process.alive for process in pair.processes.values()):
            time.sleep(1)
        raise next(p for p in pair.processes.values() if not p.alive).failure()

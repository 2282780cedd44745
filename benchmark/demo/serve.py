"""Leaves a pair and its load balancer running for the user's own requests, with a live view."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from rich.console import Console

from benchmark.demo import view
from benchmark.demo.play import LOCAL_TOKENS, configure
from benchmark.harness import metrics
from benchmark.harness.pair import Pair
from benchmark.harness.variants import local_turns
from benchmark.harness.workload import kv_bytes_per_token

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
    config = configure(model, local_turns(LOCAL_TOKENS), router_port=port)
    with Pair(config, out / "serve") as pair:
        console.print("Serving, with decode radix cache and local turns. Send it a request:\n")
        url = pair.target.url
        # Plain print: what the user copies may not be wrapped.
        print(CURL.format(url=url, model=model.name, question=QUESTION), flush=True)
        console.print(
            f"\nIts counters: curl -s {pair.decode_url}/metrics | grep decode_prefix\n"
            f"Logs: {out / 'serve'}\nCtrl-C stops it.\n",
            highlight=False,
        )
        view.show(_readings(pair), kv_bytes_per_token(model), console)
        raise next(p for p in pair.processes.values() if not p.alive).failure()


def _readings(pair: Pair) -> Iterator[view.Reading]:
    """One a second, while all servers live."""
    while all(process.alive for process in pair.processes.values()):
        yield {"prefill": read(pair.prefill_url), "decode": read(pair.decode_url)}
        time.sleep(1)


def read(url: str, timeout_s: float = 2.0) -> view.Values | None:
    """The samples of the server at ``url``; None if it does not answer."""
    try:
        return view.samples(metrics.page(url, timeout_s))
    except (OSError, HTTPException, ValueError):  # ValueError: not a metrics page
        return None

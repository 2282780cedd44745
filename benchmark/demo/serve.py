"""Leaves a pair and its load balancer running for the user's own requests, and shows what they do,
from the metrics of both servers: a table that is redrawn in a terminal, lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from http.client import HTTPException
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmark.harness import metrics
from benchmark.harness.fleet import Pair, PairConfig
from benchmark.harness.models import kv_bytes_per_token
from benchmark.harness.report import milliseconds, number
from benchmark.harness.servers import Sizes

LOCAL_TOKENS = 256
POOL_TOKENS = 3600
LINES_S = 10
"""Between two lines in a pipe."""
CURL = """curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{model}", "max_tokens": 120, "temperature": 0,
  "messages": [{{"role": "user", "content": "{question}"}}]
}}'"""
QUESTION = (
    "Clara has 26 pens. Then 5 friends bring 8 pens each, and 8 pens are sold. "
    "How many pens are left?"
)
Values = Mapping[str, float]


def serve(model: Path, port: int, out: Path, console: Console) -> int:
    """Serves until interrupted.

    Raises:
        ServerFailed: a server did not start, or died later.
    """
    console.print("Starting prefill, decode and load balancer (about a minute)...")
    name = ("--served-model-name", model.name)
    local = ("--disaggregation-decode-local-tokens", str(LOCAL_TOKENS))
    config = PairConfig(
        model,
        radix=True,
        router=True,
        router_port=port,
        prefill_sizes=Sizes(pool_tokens=16_000, max_running=32),
        decode_sizes=Sizes(POOL_TOKENS, max_running=32, reserved_decode_tokens=64),
        prefill_args=name,
        decode_args=(*name, *local, "--decode-log-interval", "1"),
    )
    with Pair(config, out / "serve") as pair:
        console.print("Serving, with decode radix cache and local turns. Send it a request:\n")
        # Plain print: what the user copies may not be wrapped.
        print(CURL.format(url=pair.target.url, model=model.name, question=QUESTION), flush=True)
        console.print(
            f"\nIts counters: curl -s {pair.decode_url}/metrics | grep decode_prefix\n"
            f"Logs: {out / 'serve'}\nCtrl-C stops it.\n",
            highlight=False,
        )
        _show(pair, kv_bytes_per_token(model), console)
        raise next(p for p in pair.processes.values() if not p.alive).failure()


def _show(pair: Pair, token_bytes: int, console: Console) -> None:
    """While all servers live: a table each second, or a line where something has changed."""
    first: Values | None = None
    said, next_line_at = "", 0.0
    redraws = console.is_terminal and not console.is_dumb_terminal
    with Live(console=console, auto_refresh=False) if redraws else nullcontext() as live:
        while all(process.alive for process in pair.processes.values()):
            prefill, decode = read(pair.prefill_url), read(pair.decode_url)
            first = decode if first is None else first
            cells = told(prefill, decode, first or {}, token_bytes)
            line = "; ".join(f"{name} {cell}" for name, cell in cells.items())
            if live is not None:
                table = Table("", "now, or since the start")
                for row in cells.items():
                    table.add_row(*row)
                live.update(table, refresh=True)
            elif time.monotonic() >= next_line_at and line != said:
                said, next_line_at = line, time.monotonic() + LINES_S
                stamp = time.strftime("%H:%M:%S")
                console.print(f"{stamp} {line}", soft_wrap=True, highlight=False, markup=False)
            time.sleep(1)


def read(url: str, timeout_s: float = 2.0) -> Values | None:
    """The samples of the server at ``url``, of turns by where they were computed; None if it does
    not answer.

    SGLang writes its counts of requests in the steps of the scheduler, and on an idle server every
    30 s. So they are 0 here while no request is open at the HTTP server.
    """
    try:
        page = metrics.page(url, timeout_s)
        found = metrics.parse(page)
    except (OSError, HTTPException, ValueError):  # ValueError: not a metrics page
        return None
    for (where, reason), count in metrics.by_labels(page, metrics.TURNS, "where", "reason").items():
        if reason != "not_shared":  # a probe of the load balancer, once a minute
            found[where] = found.get(where, 0.0) + count
    if not metrics.by_labels(page, metrics.OPEN_REQUESTS, "method").get(("POST",)):
        found |= dict.fromkeys(metrics.REQUESTS, 0.0)
    return found


def told(
    prefill: Values | None, decode: Values | None, first: Values, token_bytes: int
) -> dict[str, str]:
    """What is shown, by name; a dash for what is not known, since a server does not answer.

    ``first``: decode's first samples. ``token_bytes``: KV of one token. KV saved is exact where a
    page is one token: else the last page of each prompt makes it too small.
    """

    def now(of: Values | None, *names: str) -> str:
        return number(math.nan if of is None else sum(of.get(name, 0.0) for name in names), 0)

    def gained(name: str) -> float:
        return math.nan if decode is None else decode.get(name, 0.0) - first.get(name, 0.0)

    prompts, moved = gained(metrics.PROMPT_TOKENS), gained(metrics.REQUESTED_BYTES) / 1e6
    whole = prompts * token_bytes / 1e6
    ttft = gained(f"{metrics.TTFT}_sum") / (gained(f"{metrics.TTFT}_count") or math.nan)
    return {
        "running": now(decode, metrics.RUNNING),
        "waiting": f"{now(decode, metrics.PREALLOC_QUEUE, metrics.QUEUE)} on decode, "
        f"{now(decode, metrics.TRANSFER_QUEUE)} in transfer, "
        f"{now(prefill, metrics.BOOTSTRAP_QUEUE, metrics.QUEUE)} on prefill",
        "decode pool": f"{now(decode, metrics.USED_TOKENS)} used + "
        f"{now(decode, metrics.EVICTABLE_TOKENS)} evictable of "
        f"{now(decode, metrics.POOL_TOKENS)} tokens",
        "prefix hits": f"{number(gained(metrics.HIT_TOKENS), 0)} of {number(prompts, 0)} tokens",
        "KV saved": f"{number(whole - moved)} of {number(whole)} MB",
        "turns": f"{number(gained('local'), 0)} local, {number(gained('remote'), 0)} remote",
        "mean TTFT": milliseconds(ttft),
    }

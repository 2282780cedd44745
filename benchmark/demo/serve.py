"""Run a pair and its load balancer for the user's own requests, and print a line with the counters
when they change. With ``whole``, there is a store behind both servers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmark.harness import metrics, servers
from benchmark.harness.fleet import Fleet, Pair, PairConfig
from benchmark.harness.servers import Sizes

LOCAL_TOKENS = 256
POOL_TOKENS = 3600
PAGE_TOKENS = 16
"""Page size with a store, which transfers whole pages."""
STAGED_TOKENS = POOL_TOKENS // 2
SEGMENT = 64 << 20
"""Bytes that each server gives to the store."""
LINES_S = 5
"""Time between two lines."""
CURL = """curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{model}", "max_tokens": 120, "temperature": 0,
  "messages": [{{"role": "user", "content": "{question}"}}]
}}'"""
QUESTION = (
    "Clara has 26 pens. Then 5 friends bring 8 pens each, and 8 pens are sold. "
    "How many pens are left?"
)
Values = Mapping[str, float]


def serve(model: Path, port: int, out: Path, console: Console, whole: bool = False) -> int:
    """Serve until interrupted. ``whole``: with a store behind both servers.

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
    with ExitStack() as stack:
        if whole:
            master, about = servers.store()
            stack.enter_context(Fleet([master], out / "serve"))
            config = with_store(config, about)
        pair = stack.enter_context(Pair(config, out / "serve"))
        parts = "decode radix cache and local turns" + ", over a store" * whole
        console.print(f"Serving, with {parts}. Send it a request:\n")
        # Plain print: the command that the user copies must not be wrapped.
        print(CURL.format(url=pair.target.url, model=model.name, question=QUESTION), flush=True)
        console.print(
            f"\nCounters: curl -s {pair.decode_url}/metrics | grep decode_prefix\n"
            f"Logs: {out / 'serve'}\nCtrl-C stops it.\n",
            highlight=False,
        )
        before = pair.metrics()
        printed = told(before, before)
        while all(process.alive for process in pair.processes.values()):
            with suppress(OSError):  # a server is exiting: the next turn reports it
                line = told(before, pair.metrics())
                if line != printed:
                    console.print(f"{time.strftime('%H:%M:%S')} {line}", highlight=False)
                printed = line
            time.sleep(LINES_S)
        raise next(p for p in pair.processes.values() if not p.alive).failure()


def with_store(config: PairConfig, about: Mapping[str, object]) -> PairConfig:
    """Return the pair over the store that ``about`` describes: prefill reads and writes, decode
    writes."""
    client = (
        *servers.staged(STAGED_TOKENS // PAGE_TOKENS),
        *servers.stored(about, SEGMENT, PAGE_TOKENS),
    )
    return replace(
        config,
        prefill_sizes=replace(config.prefill_sizes, page_size=PAGE_TOKENS),
        decode_sizes=replace(config.decode_sizes, page_size=PAGE_TOKENS),
        prefill_args=(*config.prefill_args, *servers.HICACHE, *client),
        decode_args=(*config.decode_args, *servers.WRITES, *client),
        env={"MC_FORCE_TCP": "1"},  # otherwise Mooncake searches RDMA devices
    )


def told(before: tuple[Values, Values], now: tuple[Values, Values]) -> str:
    """Return the work of prefill and decode since ``before``, from their counters, as one line."""
    (prefill, decode), (prefill_now, decode_now) = before, now
    hits, prompts, local = (
        f"{decode_now.get(name, 0.0) - decode.get(name, 0.0):,.0f}"
        for name in (metrics.HIT_TOKENS, metrics.PROMPT_TOKENS, metrics.LOCAL_TOKENS)
    )
    line = f"prefix hits {hits} of {prompts} tokens; {local} tokens computed on decode"
    name = f"{metrics.CACHED_TOKENS} storage"
    if stored := prefill_now.get(name, 0.0) - prefill.get(name, 0.0):
        line += f"; {stored:,.0f} read from the store"
    return line

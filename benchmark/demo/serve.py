"""Leaves a pair and its load balancer running for the user's own requests, and says what they do: a
line when something has changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from benchmark.harness import metrics
from benchmark.harness.fleet import Pair, PairConfig
from benchmark.harness.servers import Sizes

LOCAL_TOKENS = 256
POOL_TOKENS = 3600
LINES_S = 5
"""Between two lines."""
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
        before = metrics.scrape(pair.decode_url)
        said = told(before, before)
        while all(process.alive for process in pair.processes.values()):
            with suppress(OSError):  # a server that ends: the next turn tells
                line = told(before, metrics.scrape(pair.decode_url))
                if line != said:
                    console.print(f"{time.strftime('%H:%M:%S')} {line}", highlight=False)
                said = line
            time.sleep(LINES_S)
        raise next(p for p in pair.processes.values() if not p.alive).failure()


def told(before: Values, now: Values) -> str:
    """What decode has done since ``before``, which are its counters like ``now``."""
    hits, prompts, local = (
        f"{now.get(name, 0.0) - before.get(name, 0.0):,.0f}"
        for name in (metrics.HIT_TOKENS, metrics.PROMPT_TOKENS, metrics.LOCAL_TOKENS)
    )
    return f"prefix hits {hits} of {prompts} tokens; {local} tokens computed on decode"

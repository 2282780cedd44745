"""Run a pair and its load balancer for the user's own requests, print a line with the counters when
they change, and start a server that has ended again. With ``whole``, there is a store behind both
servers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from benchmark.demo.restarts import Restarts
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
CHAT = ("--tool-call-parser", "qwen25", "--constrained-json-disable-any-whitespace")
"""Tool calls, and JSON without white space, which a small model would repeat without end."""
QUESTION = (
    "Clara has 26 pens. Then 5 friends bring 8 pens each, and 8 pens are sold. "
    "How many pens are left?"
)
ANSWER: dict[str, object] = {
    "type": "object",
    "properties": {
        "item": {"enum": ["pens", "books"]},
        "left": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["item", "left"],
    "additionalProperties": False,
}
"""Every value is bounded, because a model of this size may never end one by itself."""
RECORD = {"name": "record", "description": "Record the answer.", "parameters": ANSWER}
REQUESTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("Send it a request:", {}),
    (
        "JSON by a schema:",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": ANSWER},
            }
        },
    ),
    (
        "A tool call:",
        {
            "tools": [{"type": "function", "function": RECORD}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
)
"""Heading and fields of each request that is printed."""
Values = Mapping[str, float]


def serve(model: Path, port: int, out: Path, console: Console, whole: bool = False) -> int:
    """Serve until interrupted, which is no error. ``whole``: with a store behind both servers.

    Raises:
        ServerFailed: a server did not start, or ended early several times in a row.
    """
    console.print("Starting prefill, decode and load balancer (about a minute)...")
    name = ("--served-model-name", model.name, *CHAT)
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
        fleets: list[Fleet] = []
        if whole:
            master, about = servers.store()
            fleets.append(stack.enter_context(Fleet([master], out / "serve")))
            config = with_store(config, about)
        pair = stack.enter_context(Pair(config, out / "serve"))
        restarts = Restarts([*fleets, pair], console)
        parts = "decode radix cache and local turns" + ", over a store" * whole
        console.print(f"Serving, with {parts}.")
        for heading, fields in REQUESTS:
            # Plain print: a command that the user copies must not be wrapped.
            print(f"\n{heading}\n{curl(pair.target.url, model.name, fields)}", flush=True)
        console.print(
            f"\nCounters: curl -s {pair.decode_url}/metrics | grep decode_prefix\n"
            f"Logs: {out / 'serve'}\nCtrl-C stops it.\n",
            highlight=False,
        )
        with suppress(KeyboardInterrupt):
            _watch(pair, restarts, console)
    return 0


def _watch(pair: Pair, restarts: Restarts, console: Console) -> NoReturn:
    """Start ended servers again, and print the counters when they change."""
    before = pair.metrics()
    printed, is_new = told(before, before), False
    while True:
        is_new = bool(restarts.restart_ended()) or is_new
        with suppress(OSError, HTTPException):  # a server is ending: the next turn starts it
            now = pair.metrics()
            before = now if is_new else before  # a new server counts from zero
            is_new = False
            line = told(before, now)
            if line != printed:
                console.print(f"{time.strftime('%H:%M:%S')} {line}", highlight=False)
            printed = line
        time.sleep(LINES_S)


def curl(url: str, model: str, fields: Mapping[str, object]) -> str:
    """Return the command that asks the question with ``fields`` in its request."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": model, "max_tokens": 120, "temperature": 0, "messages": messages, **fields}
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )


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

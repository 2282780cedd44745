"""How many bytes cross the wire for a load of shared prefixes, counted by the kernel.

Prefill and decode talk over UCX on TCP, so that every byte of KV passes the loopback interface,
whose counter knows nothing of our accounting. The load's own HTTP traffic passes it too and is
subtracted (bodies; headers are some hundred bytes a request).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmark.decode_radix_cache import page
from benchmark.harness import report
from benchmark.harness.arm import Measured, on_fresh_pair
from benchmark.harness.client import Result
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.servers import Sizes
from benchmark.harness.variants import FLAG, variants
from benchmark.harness.workload import (
    SharedPrefixes,
    kv_bytes_per_token,
    pages_bytes,
    token_range,
)

LIMIT = 1.03
"""Bytes on the wire over bytes of the pages that decode did not hold, at most."""


@dataclass(frozen=True)
class Load(SharedPrefixes):
    """Lengths and pools in tokens."""

    requests: int = 48
    groups: int = 4
    prefix_tokens: int = 1500
    suffix_tokens: int = 130
    generated_tokens: int = 8
    pool: int = 24000
    page_size: int = 1


def run(out: Path, model: Path | None, console: Console) -> int:
    """Measures all arms; non-zero where the flag's ratio is above ``LIMIT`` or outputs differ."""
    load = Load()
    model = model or random_qwen3(out / "model-wire")
    token_bytes = kv_bytes_per_token(model)
    requests = load.sent(token_range(model))
    raw = out / "wire.requests.jsonl"
    raw.unlink(missing_ok=True)
    whole = pages_bytes([len(r.prompt) for r in requests], load.page_size, token_bytes)

    def send(pair: Pair) -> list[Result]:
        """One request of each prefix first: the others then find it on the decode server."""
        return pair.send(requests[: load.groups]) + pair.send(requests[load.groups :])

    arms: dict[str, Measured] = {}
    for variant in variants():
        console.print(f"[bold]{variant.name}[/]: starting fresh servers, UCX on TCP")
        sizes = Sizes(pool_tokens=load.pool, page_size=load.page_size)
        config = PairConfig.of(
            variant,
            model,
            prefill_sizes=sizes,
            decode_sizes=sizes,
            env={**variant.env, "UCX_TLS": "tcp,self"},
        )
        arms[variant.name] = on_fresh_pair(config, out / "logs" / f"wire-{variant.name}", send)
        report.write_requests(raw, variant.name, arms[variant.name].results)

    same = report.same_answers([m.results for m in arms.values()])
    wires = {name: carried(m, whole, token_bytes) for name, m in arms.items()}
    content = {**describe(), "load": load, "limit": LIMIT, "outputs_identical": same, "arms": wires}
    report.write_summary(out / "wire.summary.json", content)
    title = (
        f"{load.requests} requests, {load.groups} prefixes of {load.prefix_tokens:,} tokens, "
        f"suffixes of {load.suffix_tokens}; {token_bytes} bytes of KV a token; outputs are "
        f"{'' if same else 'NOT '}identical"
    )
    report.print_table(title, *page.wire(content), console)
    return 0 if same and wires[FLAG.name]["ratio"] <= LIMIT else 1


def carried(measured: Measured, whole: int, token_bytes: int) -> dict[str, float]:
    """Bytes that the loopback interface carried, the load's HTTP bodies taken off; bytes of the
    pages that decode did not hold when their requests were admitted; and their ratio. ``whole``:
    bytes of all prompts' pages, what a server without the tree does not hold."""
    unsent = whole - measured.traffic.hit_tokens * token_bytes
    wire = measured.loopback_bytes - sum(r.http_bytes for r in measured.results)
    return {"carried": wire, "unsent": unsent, "ratio": wire / unsent if unsent else float("inf")}

"""How many bytes cross the wire for a load of shared prefixes, counted by the kernel.

Prefill and decode talk over UCX on TCP, so that every byte of KV passes the loopback interface,
whose counter knows nothing of our accounting. The load's own HTTP traffic passes it too and is
subtracted (bodies; headers are some hundred bytes a request).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmark.harness import report
from benchmark.harness.arm import Measured, measure, warm_up
from benchmark.harness.client import Request, Result
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.servers import Sizes
from benchmark.harness.variants import FLAG, variants
from benchmark.harness.workload import (
    ideal_moved_tokens,
    kv_bytes_per_token,
    pages_bytes,
    shared_prefix,
    token_range,
)

LIMIT = 1.03
"""Bytes on the wire over bytes of the pages that decode did not hold, at most."""


@dataclass(frozen=True)
class Load:
    """Lengths and pools in tokens."""

    requests: int = 48
    groups: int = 4
    prefix_tokens: int = 1500
    suffix_tokens: int = 130
    generated_tokens: int = 8
    pool: int = 24000
    page_size: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Wire:
    """Bytes of one arm."""

    carried: int
    """By the loopback interface, the load's HTTP bodies taken off."""
    unsent: float
    """Of the pages that decode did not hold when the request was admitted."""

    @property
    def ratio(self) -> float:
        return self.carried / self.unsent if self.unsent else float("inf")


def run(out: Path, model: Path | None, console: Console, load: Load = Load()) -> int:  # noqa: B008
    """Measures all arms; non-zero where the flag's ratio is above ``LIMIT`` or outputs differ."""
    model = model or random_qwen3(out / "model-wire")
    vocabulary = token_range(model)
    token_bytes = kv_bytes_per_token(model)
    prompts = shared_prefix(
        vocabulary,
        groups=load.groups,
        requests=load.requests,
        prefix_tokens=load.prefix_tokens,
        suffix_tokens=load.suffix_tokens,
        seed=load.seed,
    )
    requests = [Request(p.ids, load.generated_tokens, label=p.label) for p in prompts]
    raw = out / "wire.requests.jsonl"
    raw.unlink(missing_ok=True)
    whole = pages_bytes([len(p.ids) for p in prompts], load.page_size, token_bytes)
    ideal = ideal_moved_tokens(prompts, load.prefix_tokens) * token_bytes

    arms: dict[str, Measured] = {}
    for variant in variants():
        name = variant.name
        console.print(f"[bold]{name}[/]: starting fresh servers, UCX on TCP")
        sizes = Sizes(pool_tokens=load.pool, page_size=load.page_size)
        config = PairConfig(
            model,
            stock=variant.stock,
            radix=variant.radix,
            prefill_sizes=sizes,
            decode_sizes=sizes,
            env={**variant.env, "UCX_TLS": "tcp,self"},
            decode_args=variant.decode_args,
        )
        with Pair(config, out / "logs" / f"wire-{name}") as pair:
            warm_up(pair, vocabulary)
            arms[name] = measure(pair, partial(_send, pair, requests, load.groups))
        report.write_requests(raw, name, arms[name].results)

    wires = {name: wire(m, whole, token_bytes) for name, m in arms.items()}
    same = report.same_answers([m.results for m in arms.values()])
    report.print_table(
        f"{load.requests} requests, {load.groups} prefixes of {load.prefix_tokens:,} tokens, "
        f"suffixes of {load.suffix_tokens}; {token_bytes} bytes of KV a token",
        ["", *arms],
        [
            ["on the wire, HTTP taken off", *(report.megabytes(w.carried) for w in wires.values())],
            ["pages decode did not hold", *(report.megabytes(w.unsent) for w in wires.values())],
            ["ratio", *(f"{w.ratio:.3f}" for w in wires.values())],
            ["counted by the servers"]
            + [report.megabytes(m.traffic.bytes_moved) for m in arms.values()],
            ["every prefix once, suffixes once", *[report.megabytes(ideal)] * len(arms)],
            ["tokens skipped", *(f"{m.traffic.skipped_tokens:,.0f}" for m in arms.values())],
            ["outputs identical", *["yes" if same else "NO"] * len(arms)],
        ],
        console,
    )
    report.write_summary(
        out / "wire.summary.json",
        {
            **describe(),
            "load": dataclasses.asdict(load),
            "limit": LIMIT,
            "outputs_identical": same,
            "arms": {n: {**dataclasses.asdict(w), "ratio": w.ratio} for n, w in wires.items()},
        },
    )
    return 0 if same and wires[FLAG.name].ratio <= LIMIT else 1


def _send(pair: Pair, requests: list[Request], groups: int) -> list[Result]:
    """One request of each prefix first: the others then find it on the decode server."""
    return pair.send(requests[:groups]) + pair.send(requests[groups:])


def wire(measured: Measured, whole: int, token_bytes: int) -> Wire:
    """``whole``: bytes of all prompts' pages, what a server without the tree does not hold."""
    moved = measured.traffic
    unsent = whole - moved.hit_tokens * token_bytes
    return Wire(measured.loopback_bytes - _http(measured.results), unsent)


def _http(results: list[Result]) -> int:
    return sum(r.http_bytes for r in results)

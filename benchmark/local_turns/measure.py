"""One arm on fresh servers: every load in turn, and what each cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmark.agentic.fleet.rig import layout
from benchmark.agentic.fleet.servers import ENGINES, warm_up
from benchmark.agentic.fleet.spec import Arm
from benchmark.agentic.load.prepare import PromptSource
from benchmark.harness import checks, metrics
from benchmark.harness.arm import traffic
from benchmark.harness.client import Target
from benchmark.harness.fleet import Fleet
from benchmark.harness.report import Spread, spread, summarize
from benchmark.harness.workload import token_range
from benchmark.local_turns.load import Load, Played, play

#: Of gaps between decode steps, on decode; its buckets end at the bounds, among others.
GAPS = "sglang:decode_itl_seconds_bucket"
BOUNDS_MS = (100, 50)
COMPUTED = ("sglang:realtime_tokens_total", "mode", "prefill_compute")


def arms(load: Load) -> list[Arm]:
    """All arms, in the order of the columns: two engines each, and SGLang's router before them."""
    aggregated: dict[str, Any] = {"policy": "sglang-router: cache_aware", "aggregated": 2}
    pair: dict[str, Any] = {"policy": "sglang-router: round_robin", "prefill": 1, "decode": 1}
    local = {**pair, "local_tokens": load.local_tokens}
    return [
        Arm("two aggregated", **aggregated),
        Arm("PD, stock", **pair),
        Arm("PD, remote", **pair, variant="radix"),
        Arm("PD, always local", **local, variant="local-always"),
        Arm("PD, chosen", **local, variant="local"),
    ]


def bounded_arms(load: Load) -> list[Arm]:
    """The arms of the bound on inter-token latency: without local turns, without a bound, with."""
    remote, chosen = (arm for arm in arms(load) if arm.title in ("PD, remote", "PD, chosen"))
    return [
        remote,
        chosen,
        *(
            msgspec.structs.replace(
                chosen, title=f"{chosen.title}, {ms} ms", variant=f"local-{ms}ms"
            )
            for ms in BOUNDS_MS
        ),
    ]


@dataclass(frozen=True)
class Measured:
    """A load on one arm. Times in seconds; requests are those of the sessions unless it says
    cold."""

    requests: int
    failed: int
    """Of talks and cold clients."""
    requests_per_s: float
    ttft_first_s: Spread
    ttft_later_s: Spread
    gap_s: Spread
    """From one token of an answer to the next."""
    latency_s: Spread
    cold_tokens_per_s: float
    """Prompt tokens of cold prompts answered while the talks ran, a second."""
    cold_ttft_s: Spread
    prompt_tokens: int
    """Of talks and cold prompts."""
    prefill_tokens: float
    """Those computed by the prefill server, or by aggregated servers."""
    local_tokens: float
    """Those computed by the decode server."""
    bytes_moved: float
    local_turns: float
    """Talks' and cold clients' requests that decode computed itself."""
    took_s: dict[str, float]
    """Mean time from admission to the first token, by ``expected SIDE`` and ``actual SIDE``."""
    reasons: dict[str, float]
    """Requests by who computed them and why, as the choice counts them."""
    gaps: dict[str, float]
    """The clients' gaps, from one token of an answer to the next: ``all``, and those above each
    bound, as ``50 ms``."""
    decode_gaps: dict[str, float]
    """Decode's own gaps between steps: ``chunk`` and ``plain`` for those with a chunk of local
    prefill in them and those without; ``chunk 50 ms``: of these, those above the bound."""


def run(
    arm: Arm, model: Path, load: Load, logs: Path, on_load: Callable[[int, Measured, Played], None]
) -> None:
    """Plays the loads in turn, each on emptied caches.

    Raises:
        ServerFailed: a server died, or failed SGLang's memory check.
        RunFailed: a warm-up request failed.
    """
    vocabulary = token_range(model)
    servers = layout(arm, model, load.pool_tokens, load.chunk_tokens)
    with Fleet(servers, logs) as fleet:
        url = fleet.layout[-1].url
        requests = 4 * max(arm.decode, arm.aggregated)
        warm_up(Target(url), PromptSource(vocabulary, block_tokens=16), requests)
        for clients in load.cold_clients:
            fleet.check()
            for server in fleet.layout[:-1]:
                checks.flush(server.url)
            before = _counters(fleet)
            played = play(Target(url), load, vocabulary, clients)
            fleet.check()  # also lets the last transfers be counted
            gained = {of: metrics.gained(before[of], now) for of, now in _counters(fleet).items()}
            on_load(clients, numbers(load, played, gained), played)


def numbers(load: Load, played: Played, gained: dict[str, dict[str, float]]) -> Measured:
    """``gained``: what the counters of each role gained, and ``computed``, ``turns``, ``times``
    and ``gaps``."""
    first = [r for r in played.talks if r.label.endswith(".0")]
    later = [r for r in played.talks if not r.label.endswith(".0")]
    answered = [r for r in played.talks if r.error is None]
    ended = max((r.finished_at for r in played.talks), default=0.0)
    cold = [
        r
        for r in played.cold
        if r.error is None and ended - played.seconds <= r.finished_at <= ended
    ]
    every = [*played.talks, *played.cold]
    gaps = [b - a for r in answered for a, b in pairwise(r.token_times)]
    above = {f"{ms} ms": sum(gap * 1e3 > ms for gap in gaps) for ms in BOUNDS_MS}
    return Measured(
        requests=len(played.talks),
        failed=sum(r.error is not None for r in every),
        requests_per_s=summarize(played.talks).requests_per_s,
        ttft_first_s=summarize(first).ttft_s,
        ttft_later_s=summarize(later).ttft_s,
        gap_s=spread(gaps),
        latency_s=summarize(played.talks).latency_s,
        cold_tokens_per_s=load.cold_tokens * len(cold) / max(played.seconds, 1e-9),
        cold_ttft_s=summarize(played.cold).ttft_s,
        prompt_tokens=sum(r.prompt_tokens for r in every),
        prefill_tokens=gained["computed"]["prefill"] + gained["computed"]["aggregated"],
        local_tokens=gained["computed"]["decode"],
        bytes_moved=traffic(gained["prefill"], gained["decode"]).bytes_moved,
        local_turns=sum(n for name, n in gained["turns"].items() if name.startswith("local")),
        took_s=_means(gained["times"]),
        reasons={name: n for name, n in gained["turns"].items() if n},
        gaps={"all": float(len(gaps)), **above},
        decode_gaps=_above(gained["gaps"]),
    )


def _above(buckets: Mapping[str, float]) -> dict[str, float]:
    """``buckets``: gaps up to ``LE``, by ``CHUNK LE``, as a histogram counts them."""
    found = {}
    for name, label in (("chunk", "true"), ("plain", "false")):
        found[name] = buckets.get(f"{label} +Inf", 0.0)
        for ms in BOUNDS_MS:
            found[f"{name} {ms} ms"] = found[name] - buckets.get(f"{label} {ms / 1e3}", 0.0)
    return found


def _counters(fleet: Fleet) -> dict[str, dict[str, float]]:
    """By role; and prompt tokens computed by each role, and turns by ``WHERE REASON``."""
    pages = {role: [metrics.page(url) for url in fleet.urls(role)] for role in ENGINES}
    name, label, mode = COMPUTED
    computed = {
        role: sum(metrics.by_labels(page, name, label).get((mode,), 0.0) for page in of)
        for role, of in pages.items()
    }
    turns = metrics.total(
        {
            " ".join(key): n
            for key, n in metrics.by_labels(page, metrics.TURNS, "where", "reason").items()
        }
        for page in pages["decode"]
    )
    times = metrics.total(
        {
            f"{kind} {side} {part}": seconds
            for kind in ("expected", "actual")
            for part in ("sum", "count")
            for (side,), seconds in metrics.by_labels(
                page, f"sglang:decode_turn_{kind}_seconds_{part}", "where"
            ).items()
        }
        for page in pages["decode"]
    )
    gaps = metrics.total(
        {" ".join(key): n for key, n in metrics.by_labels(page, GAPS, "chunk", "le").items()}
        for page in pages["decode"]
    )
    by_role = {role: metrics.total(map(metrics.parse, of)) for role, of in pages.items()}
    return {**by_role, "computed": computed, "turns": turns, "times": times, "gaps": gaps}


def _means(times: Mapping[str, float]) -> dict[str, float]:
    counts = {n.removesuffix(" count"): of for n, of in times.items() if n.endswith("count") and of}
    return {name: times[f"{name} sum"] / count for name, count in counts.items()}

"""The arms: SGLang's own mode and buffer-only, at equal host memory, on the same trace.

SGLang's mode is measured twice, with the stock release and with the patch set but none of its
flags: what differs between those two is not the mode's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from benchmark.harness import report
from benchmark.harness.client import Request, Target, send_all
from benchmark.harness.command import RunFailed
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.report import Summary
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import kv_bytes_per_token, token_range
from benchmark.hicache_buffer_only.fleet import FleetConfig, WorkersAndStore
from benchmark.hicache_buffer_only.master import ALLOCATED, EVICTED
from benchmark.hicache_buffer_only.memory import Memory, Split
from benchmark.hicache_buffer_only.plot import draw
from benchmark.hicache_buffer_only.replay import Replayed, replay
from benchmark.hicache_buffer_only.tiers import Hits
from benchmark.traces.generate import conversations
from benchmark.traces.prompts import Prompts
from benchmark.traces.read import read
from benchmark.traces.record import Record
from benchmark.traces.scale import Fitting, Scale
from benchmark.traces.sharing import endless_hit_rate

CACHE, PATCHED, BUFFER_ONLY = "cache", "cache, patched", "buffer_only"


@dataclass(frozen=True)
class Load:
    """The trace and the sizes, the same for all arms. Pools in tokens."""

    requests: int = 1000
    block_tokens: int = 16
    """A block of the trace's 512 tokens becomes so many, and a page of KV holds one."""
    speed: float = 2.0
    """Seconds of the trace in a second."""
    device_tokens: int = 32_768
    """Device pool of a worker."""
    workers: int = 2
    chunked_prefill_tokens: int = 1024
    max_running: int = 64
    lease_ms: int = 1000
    """How long the store keeps a key that was asked for from eviction. Mooncake's 10 s are for a
    store that turns over in minutes; this one does in seconds."""
    seed: int = 0
    split: Split = dataclasses.field(default_factory=Split)


@dataclass(frozen=True)
class Measured:
    """One arm."""

    memory: Memory
    summary: Summary
    hits: Hits
    late_s: float
    store: Mapping[str, float]
    """Bytes of the store at the end, by the names of Mooncake's metrics."""
    buffer: Mapping[str, float]
    """Our metrics, summed over the workers; none in SGLang's own mode."""


def run(
    out: Path,
    model: Path | None,
    trace: Path | None,
    console: Console,
    load: Load = Load(),  # noqa: B008
) -> int:
    """Measures all arms, writes the results and prints the table.

    Returns non-zero where outputs differ, requests failed, or buffer-only hit no more.
    """
    model = model or random_qwen3(out / "model-random")
    fitting = Fitting(load.device_tokens // 2)
    records = list(fitting(scaled(trace, load)))
    left_out = fitting.left_out
    endless = endless_hit_rate(records)
    console.print(
        f"{len(records)} requests ({left_out} too long for the device pool are left out); an "
        f"endless cache would hit {endless:.1%} of their blocks"
    )
    prompts = Prompts(token_range(model), load.block_tokens, load.seed)
    raw = out / "requests.jsonl"
    raw.unlink(missing_ok=True)

    arms: dict[str, Measured] = {}
    results = []
    for name, config in configurations(model, load).items():
        console.print(f"[bold]{name}[/]: starting a store and {load.workers} workers")
        measured, replayed = measure(
            config, out / "logs" / name.replace(", ", "-"), records, prompts
        )
        arms[name] = measured
        results.append(replayed.results)
        report.write_requests(raw, name, replayed.results)
        console.print(f"  {measured.hits.rate(measured.hits.cached):.1%} of prompt tokens cached")

    same = report.same_answers(results)
    source = "a generated trace" if trace is None else trace.name
    title = (
        f"{len(records)} requests of {source}, {load.block_tokens} tokens a block, at "
        f"{load.speed:g} times its speed; {load.workers} workers with a device pool of "
        f"{load.device_tokens:,} tokens each"
    )
    report.print_table(title, ["", *arms], rows(list(arms.values()), same), console)
    report.write_summary(
        out / "summary.json",
        {
            **describe(),
            "trace": source,
            "load": load,
            "left_out": left_out,
            "endless_hit_rate": endless,
            "outputs_identical": same,
            "arms": {name: {**report_of(m)} for name, m in arms.items()},
        },
    )
    draw(out / "comparison.png", arms)
    cache, buffer_only = (arms[name].hits for name in (CACHE, BUFFER_ONLY))
    better = buffer_only.rate(buffer_only.cached) > cache.rate(cache.cached)
    return 0 if same and better else 1


def scaled(trace: Path | None, load: Load) -> Iterator[Record]:
    """The first requests of the trace, or of a generated one, made to fit the machine."""
    records = conversations(load.requests, load.seed) if trace is None else read(trace)
    scale = Scale(block_tokens=load.block_tokens, speed=load.speed)
    return map(scale.apply, islice(records, load.requests))


def configurations(model: Path, load: Load) -> dict[str, FleetConfig]:
    """All arms; they differ in how host memory is split and in the patch set, in nothing else."""
    page_bytes = load.block_tokens * kv_bytes_per_token(model)
    cache = load.split.cache(load.device_tokens, load.block_tokens, page_bytes, load.workers)
    memories = {CACHE: cache, PATCHED: cache, BUFFER_ONLY: load.split.buffer_only(cache)}
    return {
        name: FleetConfig(
            model=model,
            memory=memory,
            sizes=Sizes(
                pool_tokens=load.device_tokens,
                page_size=load.block_tokens,
                chunked_prefill_tokens=load.chunked_prefill_tokens,
                max_running=load.max_running,
            ),
            stock=name == CACHE,
            buffer_only=name == BUFFER_ONLY,
            ratio=load.split.ratio,
            lease_ms=load.lease_ms,
            # SGLang's 256 tokens are half a block of the trace; less than a page is never fetched.
            prefetch_threshold=load.block_tokens,
        )
        for name, memory in memories.items()
    }


def measure(
    config: FleetConfig, logs: Path, records: Sequence[Record], prompts: Prompts
) -> tuple[Measured, Replayed]:
    """Replays the trace on fresh servers."""
    with WorkersAndStore(config, logs) as fleet:
        _warm_up(fleet)
        fleet.check_memory()
        before = fleet.hits()
        replayed = asyncio.run(replay(fleet.workers, records, prompts))
        fleet.settle()
        measured = Measured(
            memory=config.memory,
            summary=report.summarize(replayed.results),
            hits=fleet.hits().since(before),
            late_s=replayed.late_s,
            store=fleet.master.usage(),
            buffer=_sum_of_ours(fleet.counters()),
        )
    return measured, replayed


def _warm_up(fleet: WorkersAndStore) -> None:
    """A request a worker outside the load. Its prompt counts down, which no block does."""
    vocabulary = token_range(fleet.config.model)
    request = Request(list(vocabulary[:-65:-1]), 4, label="warm-up")
    for url in fleet.workers:
        (result,) = asyncio.run(send_all(Target(url), [request]))
        if result.error:
            raise RunFailed(f"{url}: {result.error}")
    fleet.settle()


def _sum_of_ours(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for now in workers for name in now if name.startswith("sglang:hicache_buffer_")}
    return {
        name: sum(now.get(name, 0.0) for now in workers)
        for name in sorted(names)
        if not name.endswith("_created")
    }


def rows(arms: Sequence[Measured], same: bool) -> list[list[str]]:
    """The table: a row a quantity, a column an arm."""

    def tokens(of: str) -> list[str]:
        counts = [(m.hits, getattr(m.hits, of)) for m in arms]
        return [f"{hits.rate(count):.1%}  ({count:,.0f})" for hits, count in counts]

    def times(of: str) -> list[list[str]]:
        spreads = [getattr(m.summary, of) for m in arms]
        return [[report.milliseconds(getattr(s, p)) for s in spreads] for p in ("p50", "p99")]

    ttft, latency = times("ttft_s"), times("latency_s")
    return [
        ["cache hit rate (prompt tokens)", *tokens("cached")],
        ["  from the device", *tokens("device")],
        ["  from the host pool", *tokens("host")],
        ["  from the store", *tokens("storage")],
        ["prompt tokens", *(f"{m.hits.prompt:,.0f}" for m in arms)],
        ["TTFT p50", *ttft[0]],
        ["TTFT p99", *ttft[1]],
        ["E2E p50", *latency[0]],
        ["E2E p99", *latency[1]],
        ["host memory pinned by workers", *(report.megabytes(m.memory.pinned_bytes) for m in arms)],
        ["store", *(report.megabytes(m.memory.store_bytes) for m in arms)],
        ["both", *(report.megabytes(m.memory.total_bytes) for m in arms)],
        ["store: in use at the end", *(report.megabytes(m.store[ALLOCATED]) for m in arms)],
        ["store: evicted", *(report.megabytes(m.store[EVICTED]) for m in arms)],
        ["a request was sent late by, at most", *(report.milliseconds(m.late_s) for m in arms)],
        ["failed requests", *(str(m.summary.failed) for m in arms)],
        ["outputs identical", *["yes" if same else "NO"] * len(arms)],
    ]


def report_of(measured: Measured) -> dict[str, object]:
    """What the summary holds of an arm."""
    hits, memory = measured.hits, measured.memory
    return {
        **dataclasses.asdict(measured),
        "hit_rate": hits.rate(hits.cached),
        "pinned_bytes": memory.pinned_bytes,
        "store_bytes": memory.store_bytes,
        "total_bytes": memory.total_bytes,
    }

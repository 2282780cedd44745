"""The arms at equal host memory: SGLang's own mode, the same with host pools as small as it takes
them, buffer-only, and buffer-only that fetches every hit whether that is faster or not.

A *run* is one arm on one trace, with fresh servers and an empty store. Runs are interleaved: a
round has every arm once, each round in another order, so that what changes on the machine meanwhile
is not taken for a difference between arms. Each run is written to ``runs.jsonl`` when it has ended;
those that are there already are not made again, so that a comparison may be made in pieces.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmark.harness import metrics, report
from benchmark.harness.client import Request, Result, Target, send_all
from benchmark.harness.command import RunFailed
from benchmark.harness.environment import commit, describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.report import spread
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import kv_bytes_per_token, token_range
from benchmark.hicache_buffer_only import page
from benchmark.hicache_buffer_only.fleet import FleetConfig, WorkersAndStore
from benchmark.hicache_buffer_only.memory import Memory, Split
from benchmark.hicache_buffer_only.replay import replay
from benchmark.traces import generate, scale
from benchmark.traces.prompts import Prompts
from benchmark.traces.read import read
from benchmark.traces.record import Record
from benchmark.traces.sharing import endless_hit_rate

CACHE, SMALL, BUFFER_ONLY, ALWAYS = ARMS = (
    "cache",
    "cache, small",
    "buffer_only",
    "buffer_only, always fetch",
)
#: How the names of the mode's metrics begin.
OURS = ("sglang:hicache_buffer_", "sglang:storage_")
ALWAYS_FETCH = {"SGLANG_HICACHE_BUFFER_ALWAYS_FETCH": "1"}

#: Where a request found the largest part of what it did not compute.
CLASSES = ("device", "host", "store", "miss")
CONVERSATION, AGENTS, UNSHARED = TRACES = ("conversation", "agents", "unshared")
#: Of generated ones.
SHAPES = {
    CONVERSATION: generate.CONVERSATION,
    AGENTS: generate.TOOLS,
    UNSHARED: generate.UNSHARED,
}


@dataclass(frozen=True)
class Load:
    """The traces and the sizes, the same for all arms. Pools in tokens."""

    requests: int = 1000
    """Of each trace."""
    rounds: int = 5
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
class Outcome:
    """One request. Times in seconds; ``itl_s`` is its mean gap between two tokens."""

    ttft_s: float
    latency_s: float
    itl_s: float | None
    found: str
    """One of ``CLASSES``."""
    answer: str
    """A digest of its tokens; empty where it failed."""

    @classmethod
    def of(cls, result: Result) -> Outcome:
        """Of what a client saw."""
        answer = "" if result.error else hashlib.sha256(repr(result.answer).encode()).hexdigest()
        return cls(result.ttft_s, result.latency_s, result.itl_s, found_in(result), answer[:12])


def found_in(result: Result) -> str:
    """Where most of a request's cached tokens came from; a tie counts for the slower place.

    A request that has anything from the store waited for the store, so that it counts there.
    """
    tokens = result.cached_by_source
    if tokens.get("storage"):
        return "store"
    device, host = tokens.get("device", 0), tokens.get("host", 0)
    return "miss" if not device + host else "host" if host >= device else "device"


@dataclass(frozen=True)
class Run:
    """One arm on one trace, once."""

    trace: str
    arm: str
    round: int
    memory: Memory
    hits: Mapping[str, float]
    late_s: float
    """The longest that a request was sent after its time."""
    store: Mapping[str, float]
    """Bytes of the store at the end, by the names of Mooncake's metrics."""
    buffer: Mapping[str, float]
    """Our metrics, summed over the workers; none in SGLang's own mode."""
    outcomes: tuple[Outcome, ...]
    """In the order of the trace."""
    commit: str = ""


def of_arm(runs: Sequence[Run]) -> dict[str, Any]:
    """All rounds of one arm on one trace, as the summary has it: hits summed over the rounds, times
    of all requests that were answered, store and buffer the mean of the rounds."""
    outcomes = [each for run in runs for each in run.outcomes]
    good = [each for each in outcomes if each.answer]
    classes = {name: [each for each in good if each.found == name] for name in CLASSES}

    def mean(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: value / len(rounds) for name, value in metrics.total(rounds).items()}

    return {
        "rounds": len(runs),
        "memory": runs[0].memory,
        "hits": metrics.total(run.hits for run in runs),
        "times": {
            "ttft_s": spread(each.ttft_s for each in good),
            "latency_s": spread(each.latency_s for each in good),
            "itl_s": spread(each.itl_s for each in good),
            "ttft_by_class": {
                name: spread(one.ttft_s for one in some) for name, some in classes.items()
            },
            "latency_by_class": {
                name: spread(one.latency_s for one in some) for name, some in classes.items()
            },
        },
        "ttft_mean_of_rounds_s": [
            spread(one.ttft_s for one in run.outcomes if one.answer).mean for run in runs
        ],
        "failed": len(outcomes) - len(good),
        "late_s": max(run.late_s for run in runs),
        "store": mean([run.store for run in runs]),
        "buffer": mean([run.buffer for run in runs]),
    }


def compare(
    out: Path,
    model: Path | None,
    traces: Mapping[str, Path | None],
    console: Console,
    load: Load = Load(),  # noqa: B008
) -> int:
    """Make the runs that are missing, write the results and print a table for each trace.

    ``traces``: the files of traces by name; None where it is generated. Returns non-zero where
    outputs differ or requests failed.
    """
    model = model or random_qwen3(out / "model-random")
    prompts = Prompts(token_range(model), load.block_tokens, load.seed)
    records = {name: fitting(name, path, load) for name, path in traces.items()}
    done = finished(out / "runs.jsonl", load)
    made = {(run.trace, run.arm, run.round) for run in done}
    for round_, trace, arm in order(tuple(traces), load.rounds):
        if (trace, arm, round_) in made:
            continue
        console.print(f"[bold]{trace}, {arm}[/]: round {round_ + 1} of {load.rounds}")
        config = configurations(model, load)[arm]
        run = measure(trace, arm, round_, config, out / "logs", records[trace], prompts)
        with (out / "runs.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(run) + b"\n")
        done.append(run)
        console.print(f"  {page.cached(run.hits):.1%} of prompt tokens cached")
    return write(out, traces, records, done, console, load)


def order(traces: Sequence[str], rounds: int) -> Iterator[tuple[int, str, str]]:
    """Every arm on every trace in each round; the arm that begins is another one each time."""
    for round_ in range(rounds):
        shift = round_ % len(ARMS)
        for trace in traces:
            for arm in (*ARMS[shift:], *ARMS[:shift]):
                yield round_, trace, arm


def finished(path: Path, load: Load) -> list[Run]:
    """The runs that are there already.

    Raises:
        RunFailed: they were made with another load.
    """
    stamp = path.with_name("load.json")
    mine = json.dumps(asdict(dataclasses.replace(load, rounds=0)))
    if path.exists() and (not stamp.exists() or stamp.read_text() != mine):
        raise RunFailed(f"{path} has runs of another load: remove it, or use another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(mine)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Run) for line in lines]


def fitting(name: str, path: Path | None, load: Load) -> list[Record]:
    """The requests of a trace that fit into the device pool."""
    half = load.device_tokens // 2
    return [record for record in scaled(name, path, load) if scale.fits(record, half)]


def scaled(name: str, path: Path | None, load: Load) -> Iterator[Record]:
    """The first requests of a trace in a file, or of a generated one, made to fit the machine."""
    if path is not None:
        records: Iterator[Record] = iter(read(path))
    else:
        records = generate.generate(load.requests, load.seed, SHAPES[name])
    some = islice(records, load.requests)
    return (scale.scaled(record, load.block_tokens, load.speed) for record in some)


def configurations(model: Path, load: Load) -> dict[str, FleetConfig]:
    """All arms; they differ in how host memory is split and in the patch set, in nothing else."""
    page_bytes = load.block_tokens * kv_bytes_per_token(model)
    split, page = load.split, load.block_tokens
    cache = split.cache(load.device_tokens, page, page_bytes, load.workers)
    stage = split.buffer_only(cache)
    memories = {
        CACHE: cache,
        SMALL: split.small_cache(cache, load.device_tokens, page),
        BUFFER_ONLY: stage,
        ALWAYS: stage,
    }
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
            stock=name in (CACHE, SMALL),
            buffer_only=name in (BUFFER_ONLY, ALWAYS),
            ratio=split.small_ratio if name == SMALL else split.ratio,
            lease_ms=load.lease_ms,
            # SGLang's 256 tokens are half a block of the trace; less than a page is never fetched.
            prefetch_threshold=load.block_tokens,
            env=ALWAYS_FETCH if name == ALWAYS else {},
        )
        for name, memory in memories.items()
    }


def measure(
    trace: str,
    arm: str,
    round_: int,
    config: FleetConfig,
    logs: Path,
    records: Sequence[Record],
    prompts: Prompts,
) -> Run:
    """Replays the trace on fresh servers."""
    folder = logs / f"{trace}-{arm.replace(', ', '-').replace(' ', '-')}-{round_}"
    with WorkersAndStore(config, folder) as fleet:
        _warm_up(fleet)
        fleet.check_memory()
        before = fleet.hits()
        replayed = asyncio.run(replay(fleet.workers, records, prompts))
        fleet.settle()
        return Run(
            trace,
            arm,
            round_,
            config.memory,
            metrics.gained(before, fleet.hits()),
            replayed.late_s,
            fleet.master.usage(),
            _sum_of_ours(fleet.counters()),
            tuple(map(Outcome.of, replayed.results)),
            commit(),
        )


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
    return {
        name: value
        for name, value in sorted(metrics.total(workers).items())
        if name.startswith(OURS) and not name.endswith("_created")
    }


# ---- results ----


def write(
    out: Path,
    traces: Mapping[str, Path | None],
    records: Mapping[str, Sequence[Record]],
    runs: Sequence[Run],
    console: Console,
    load: Load,
) -> int:
    """Tables, ``summary.json`` and the picture; the exit status.

    Traces that ``runs`` has and ``traces`` has not keep their place in ``summary.json``.
    """
    summary = kept(out / "summary.json", {run.trace for run in runs} - set(traces))
    good = True
    for trace, path in traces.items():
        of_trace = [run for run in runs if run.trace == trace]
        arms = {
            name: of_arm([run for run in of_trace if run.arm == name])
            for name in ARMS
            if any(run.arm == name for run in of_trace)
        }
        same = same_answers(of_trace)
        good = good and same
        found = {
            "source": "a generated trace" if path is None else path.name,
            "requests": len(records[trace]),
            "endless_hit_rate": endless_hit_rate(records[trace]),
            "outputs_identical": same,
            "commits": list(dict.fromkeys(run.commit for run in of_trace if run.commit)),
            "arms": arms,
        }
        summary[trace] = report.plain(found)
        title = (
            f"{trace}: {len(records[trace])} requests, {load.block_tokens} tokens a block, at "
            f"{load.speed:g} times their speed; {load.workers} workers with a device pool of "
            f"{load.device_tokens:,} tokens each; an endless cache would hit "
            f"{found['endless_hit_rate']:.1%}; outputs are {'' if same else 'NOT '}identical"
        )
        report.print_table(title, *page.table(summary[trace]), console)
        page.draw(out / f"{trace}.png", summary[trace])
    report.write_summary(out / "summary.json", {**describe(), "load": load, "traces": summary})
    return 0 if good else 1


def kept(path: Path, traces: set[str]) -> dict[str, Any]:
    """What the summary at ``path`` says of ``traces``: each may be compared by a command of its
    own."""
    there = json.loads(path.read_bytes()).get("traces", {}) if path.exists() else {}
    return {name: found for name, found in there.items() if name in traces}


def same_answers(runs: Sequence[Run]) -> bool:
    """Whether every run answered every request, and all with the same tokens."""
    answers = [[each.answer for each in run.outcomes] for run in runs]
    return all(all(some) and some == answers[0] for some in answers)

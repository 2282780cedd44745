"""One arm: fresh servers, the replay, and what it cost them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmark.agentic.replay.classes import Classes
from benchmark.agentic.replay.outcome import Outcome
from benchmark.agentic.replay.prepare import PromptSource
from benchmark.agentic.replay.report import Report, report
from benchmark.agentic.replay.run import Settings, replay
from benchmark.agentic.report.arms import Arm, layout
from benchmark.agentic.report.load import Load, Trace
from benchmark.harness import metrics
from benchmark.harness.arm import Traffic, traffic
from benchmark.harness.client import Request, Target, send_all
from benchmark.harness.command import RunFailed
from benchmark.harness.fleet import Fleet
from benchmark.harness.pair import peak_running
from benchmark.harness.workload import token_range

ENGINES = ("prefill", "decode", "aggregated")


@dataclass(frozen=True)
class Measured:
    """An arm after its replay."""

    arm: Arm
    report: Report
    traffic: Traffic
    peak_running: tuple[int, ...]
    """Largest batch of each server that decodes, requests."""
    peak_usage: tuple[float, ...]
    """Largest share of each such server's pool that was in use, as its log says."""
    outcomes: list[Outcome]


def run(
    arm: Arm,
    model: Path,
    trace: Trace,
    load: Load,
    classes: Classes,
    logs: Path,
    on_outcome: Callable[[Outcome], None],
) -> Measured:
    """Raises ServerFailed where a server died, or failed SGLang's memory check afterwards."""
    vocabulary = token_range(model)
    with Fleet(layout(arm, model, load), logs) as fleet:
        url = fleet.layout[-1].url
        warm_up(url, vocabulary, pairs=max(1, arm.decodes, arm.colocated))
        fleet.check()
        before = {role: total(fleet.scrape(role)) for role in ENGINES}
        prompts = PromptSource(vocabulary, load.block_tokens, load.seed)
        # Nobody asks the next question before the answer: sent by the compressed trace's times, a
        # turn would often come before its conversation's last one has its first token.
        settings = Settings(dispatch="think", classes=classes)
        outcomes = asyncio.run(replay(url, trace.records, prompts, settings, on_outcome=on_outcome))
        fleet.check()  # also lets the last transfers be counted
        gained = {role: metrics.gained(before[role], total(fleet.scrape(role))) for role in ENGINES}
        decoding = [
            process.log_text()
            for name, process in fleet.processes.items()
            if name.startswith(("decode", "aggregated"))
        ]
    return Measured(
        arm,
        report(outcomes, classes),
        traffic(gained["prefill"], gained["decode"]),
        tuple(map(peak_running, decoding)),
        tuple(map(peak_usage, decoding)),
        outcomes,
    )


def peak_usage(log: str) -> float:
    """The largest ``token usage`` of a decode batch in a server's log, 0 to 1."""
    found = re.findall(r"Decode batch.*?token usage: ([\d.]+)", log)
    return max(map(float, found), default=0.0)


def total(servers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counters of several servers, summed by name."""
    summed: Counter[str] = Counter()
    for values in servers:
        summed.update(values)
    return dict(summed)


def warm_up(url: str, vocabulary: range, pairs: int) -> None:
    """Some requests outside the load, until each server is likely to have had one.

    The first transfer between two servers pays for their connection. The prompts count down, which
    no block of a trace does, and differ from each other.
    """
    requests = [
        Request(vocabulary[: -33 - i : -1][i:], 4, label=f"warm-up {i}") for i in range(4 * pairs)
    ]
    for result in asyncio.run(send_all(Target(url), requests, concurrency=2 * pairs)):
        if result.error:
            raise RunFailed(f"{result.label} failed: {result.error}")

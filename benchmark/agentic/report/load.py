"""The trace of a run: sampled by window and thinning, then scaled to the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.agentic.sample.describe import Description, describe
from benchmark.agentic.sample.generate import agentic
from benchmark.agentic.sample.select import Plan, chosen, window_and_thin
from benchmark.agentic.sample.survey import survey
from benchmark.agentic.sample.window import requests_of
from benchmark.traces.read import read
from benchmark.traces.record import BLOCK_TOKENS, Record
from benchmark.traces.scale import Fitting, Scale
from benchmark.traces.sessions import annotate

GENERATED = 20_000
"""Requests of a generated trace, before it is sampled."""


@dataclass(frozen=True)
class Load:
    """How a trace becomes the load of a run. Lengths and pools in tokens."""

    requests: int = 240
    """To replay, about: sampling keeps whole sessions."""
    seconds: float = 60.0
    """From the first request to the last: the trace's speed is chosen so."""
    window_s: float = 600.0
    """Of the trace, its densest."""
    max_single_turn: float = 0.3
    """Most of the sessions that may have a single turn."""
    block_tokens: int = 16
    """A block of the trace's 512 tokens becomes so many."""
    pool_tokens: int = 8800
    """KV pool of every server. 281,600 tokens of the trace: an H20 with Qwen3-Coder-30B-A3B had
    281,888 in the report that this suite follows."""
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("requests", "seconds", "block_tokens", "pool_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0")


@dataclass(frozen=True)
class Trace:
    """What is replayed, and where it comes from."""

    source: str
    records: list[Record]
    """Scaled."""
    described: Description
    """The sampled records before they were scaled."""
    speed: float
    """Seconds of the trace in a second."""
    ratio: float
    """Of the window's sessions, what thinning kept."""
    left_out: int
    """Requests that no server's pool could hold."""


def prepare(path: Path | None, load: Load) -> Trace:
    """Reads the trace, or generates one.

    Raises:
        ValueError: the file is no trace, or nothing of it is left.
    """
    whole = list(agentic(GENERATED, load.seed) if path is None else annotate(read(path)))
    source = "a generated trace" if path is None else path.name
    sampled, ratio = sample(whole, load)
    span_s = (sampled[-1].timestamp - sampled[0].timestamp) / 1000
    speed = max(span_s / load.seconds, 1e-3)
    scale = Scale(load.block_tokens, speed)
    fitting = Fitting(load.pool_tokens // 2)
    records = list(fitting(map(scale.apply, sampled)))
    if not records:
        raise ValueError(f"--pool-tokens {load.pool_tokens} holds no request of {source}")
    described = describe(survey(sampled, BLOCK_TOKENS))
    return Trace(source, records, described, speed, ratio, fitting.left_out)


def sample(whole: Sequence[Record], load: Load) -> tuple[list[Record], float]:
    """About ``load.requests`` requests in whole sessions, and the share of sessions kept."""
    found = survey(whole, BLOCK_TOKENS)
    plan = Plan(window_s=load.window_s, max_single_turn=load.max_single_turn, seed=load.seed)
    everything = window_and_thin(found, dataclasses.replace(plan, ratio=1.0))
    ratio = min(1.0, load.requests / requests_of(found.columns, everything.sessions))
    selection = window_and_thin(found, dataclasses.replace(plan, ratio=ratio))
    return list(chosen(whole, selection)), ratio

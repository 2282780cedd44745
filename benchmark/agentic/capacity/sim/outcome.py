"""A run as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmark.agentic.capacity.sim.fleet import Run


@dataclass(frozen=True)
class Spread:
    """A quantity over requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Outcome:
    """A simulated run. Times in seconds, from a request's arrival."""

    requests: int
    rejected: int
    """Do not fit into an empty pool."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Spread
    itl: Spread
    """A request's mean gap between tokens."""
    latency: Spread
    peak_running: int
    """Of the fullest decode worker."""
    mean_running: float
    """Of a decode worker, over the run."""
    middle_running: float
    """The same over the middle half of the run; NaN without samples."""
    middle_in_use: float
    """Share of the decode pools then that requests hold."""
    decode_hit: float
    """Share of prompt tokens that decode held."""
    prefill_hit: float
    moved_tokens: int
    retracted: int
    prefill_busy: float
    """Share of the run's time that a prefill worker computed."""
    link_busy: float
    """The same for a prefill worker's link."""


def outcome(run: Run) -> Outcome:
    """The numbers of a run."""
    good = [job for job in run.jobs if not job.rejected]
    prompts = sum(job.prompt for job in good) or 1
    seconds = run.duration_s or 1.0
    middle = [s for s in run.samples if 0.25 <= s.at / seconds <= 0.75]
    decoders, prefillers = len(run.decode), len(run.prefill)
    return Outcome(
        requests=len(run.jobs),
        rejected=len(run.jobs) - len(good),
        duration_s=run.duration_s,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=sum(job.output for job in good) / seconds,
        ttft=spread([job.first_token - job.arrival for job in good]),
        itl=spread(
            [(job.finished - job.first_token) / (job.output - 1) for job in good if job.output > 1]
        ),
        latency=spread([job.finished - job.arrival for job in good]),
        peak_running=max(w.peak_running for w in run.decode),
        mean_running=sum(w.running_seconds for w in run.decode) / seconds / decoders,
        middle_running=_mean([s.running / decoders for s in middle]),
        middle_in_use=_mean([s.in_use for s in middle]),
        decode_hit=sum(job.decode_hit for job in good) / prompts,
        prefill_hit=sum(job.prefill_hit for job in good) / prompts,
        moved_tokens=sum(job.moved for job in good),
        retracted=sum(job.retracted for job in good),
        prefill_busy=sum(w.busy_seconds for w in run.prefill) / seconds / prefillers,
        link_busy=sum(w.link_seconds for w in run.prefill) / seconds / prefillers,
    )


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles; NaN of nothing."""
    if not values:
        return Spread(*[float("nan")] * 4)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Spread(float(np.mean(values)), float(p50), float(p90), float(p99))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")

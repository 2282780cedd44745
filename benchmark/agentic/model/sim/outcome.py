"""A run as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmark.agentic.model.sim.decode import AggregatedWorker
from benchmark.agentic.model.sim.fleet import Run
from benchmark.harness.report import Spread, spread


@dataclass(frozen=True)
class Outcome:
    """A simulated run. Times in seconds, from a request's arrival."""

    requests: int
    rejected: int
    """Do not fit into an empty pool."""
    duration_s: float
    requests_per_s: float
    ttft: Spread
    itl: Spread
    """A request's mean gap between tokens."""
    latency: Spread
    stages: dict[str, Spread]
    """What a TTFT is made of: waiting for decode's pages, for prefill and its computing, for a link
    and on it (``stalled``: of that, waiting), for the batch."""
    peak_running: int
    """Of the fullest decode worker."""
    middle_running: float
    """Of a decode worker, in the middle half of the run; NaN without samples."""
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
    in_time: float
    """Share of the requests whose answer was complete within the limit. Later ones go on all the
    same, where clients would have given up."""


def outcome(run: Run, timeout_s: float = 600.0) -> Outcome:
    """The numbers of a run. ``timeout_s``: what a client waits for an answer."""
    good = [job for job in run.jobs if not job.rejected]
    prompts = sum(job.prompt for job in good) or 1
    seconds = run.duration_s or 1.0
    middle = [s for s in run.samples if 0.25 <= s.at / seconds <= 0.75]
    decoders = len(run.decode)
    prefill = run.prefill or [w for w in run.decode if isinstance(w, AggregatedWorker)]
    return Outcome(
        requests=len(run.jobs),
        rejected=len(run.jobs) - len(good),
        duration_s=run.duration_s,
        requests_per_s=len(good) / seconds,
        ttft=spread([job.first_token - job.arrival for job in good]),
        itl=spread(
            [(job.finished - job.first_token) / (job.output - 1) for job in good if job.output > 1]
        ),
        latency=spread([job.finished - job.arrival for job in good]),
        stages={
            "pages": spread(job.admitted - job.arrival for job in good),
            "prefill": spread(job.prefilled - job.admitted for job in good),
            "transfer": spread(job.landed - job.prefilled for job in good),
            "stalled": spread(job.stalled for job in good),
            "batch": spread(job.first_token - job.landed for job in good),
        },
        peak_running=max(w.peak_running for w in run.decode),
        middle_running=_mean([s.running / decoders for s in middle]),
        middle_in_use=_mean([s.in_use for s in middle]),
        decode_hit=sum(job.decode_hit for job in good) / prompts,
        prefill_hit=sum(job.prefill_hit for job in good) / prompts,
        moved_tokens=sum(job.moved for job in good),
        retracted=sum(job.retracted for job in good),
        prefill_busy=sum(w.busy_seconds for w in prefill) / seconds / len(prefill),
        link_busy=sum(w.link_seconds for w in prefill) / seconds / len(prefill),
        in_time=_mean([0 <= job.finished - job.arrival <= timeout_s for job in run.jobs]),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")

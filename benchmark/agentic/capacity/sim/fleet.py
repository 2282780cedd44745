"""Prefill and decode workers, the links between them, and the clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.agentic.capacity.costs import Costs
from benchmark.agentic.capacity.sim import policy
from benchmark.agentic.capacity.sim.decode import DecodeConfig, DecodeWorker
from benchmark.agentic.capacity.sim.jobs import Job
from benchmark.agentic.capacity.sim.pool import Pool
from benchmark.agentic.capacity.sim.prefill import PrefillConfig, PrefillWorker


@dataclass(frozen=True)
class FleetConfig:
    """A fleet; workers of a role are alike."""

    prefill: PrefillConfig
    decode: DecodeConfig
    prefill_workers: int = 1
    decode_workers: int = 1
    prefill_policy: str = "cache_aware"
    decode_policy: str = "round_robin"
    block_tokens: int = 512
    """Unit of all caches."""

    def __post_init__(self) -> None:
        if min(self.prefill_workers, self.decode_workers) < 1:
            raise ValueError("a fleet needs a prefill and a decode worker")
        for flag, name, known in (
            ("--prefill-policy", self.prefill_policy, policy.PREFILL),
            ("--decode-policy", self.decode_policy, policy.DECODE),
        ):
            if name not in known:
                raise ValueError(f"{flag} {name}: choose from {', '.join(known)}")


@dataclass
class Sample:
    """The fleet at one time."""

    at: float
    running: int
    queued: int
    """Wait for pages of a decode worker."""
    in_use: float
    """Share of the decode pools, idle blocks not counted."""
    prefilling: int
    """Prefill workers at work."""


@dataclass
class Run:
    """What happened."""

    jobs: list[Job]
    """All of them, in the order in which they ended."""
    duration_s: float
    samples: list[Sample]
    prefill: list[PrefillWorker]
    decode: list[DecodeWorker]
    events: int


@dataclass
class _Events:
    heap: list[tuple[float, int, Callable[[Any], None], Any]] = field(default_factory=list)
    order: count[int] = field(default_factory=count)
    now: float = 0.0

    def call(self, at: float, function: Callable[[Any], None], argument: Any) -> None:
        # Rounding may put an event a little into the past.
        heapq.heappush(self.heap, (max(at, self.now), next(self.order), function, argument))


class Fleet:
    """One run: ``Fleet(config, costs).run(jobs)``. No randomness of its own."""

    def __init__(self, config: FleetConfig, costs: Costs) -> None:
        self.config, self.costs = config, costs
        self._events = _Events()
        self._prefill_index: dict[int, int] = {}
        self._decode_index: dict[int, int] = {}
        size, call = config.block_tokens, self._events.call
        self.prefill = [
            PrefillWorker(
                i,
                config.prefill,
                costs,
                Pool(config.prefill.pool, size, self._prefill_index, i),
                call,
                self._send,
            )
            for i in range(config.prefill_workers)
        ]
        self.decode = [
            DecodeWorker(
                i,
                config.decode,
                costs,
                Pool(config.decode.pool, size, self._decode_index, i),
                call,
                self._admitted,
                self._ended,
            )
            for i in range(config.decode_workers)
        ]
        self._pending = np.zeros(config.prefill_workers)
        """Tokens that a prefill worker was said to compute."""
        self._ongoing = np.zeros(config.decode_workers)
        """Tokens that a decode worker was said to hold."""
        self._turn = count()
        self._jobs: Iterator[Job] = iter(())
        self._closed = False
        self._done: list[Job] = []
        self._samples: list[Sample] = []
        self._on_end: Callable[[Job], None] = lambda job: None

    def run(
        self,
        jobs: Iterable[Job],
        concurrency: int | None = None,
        sample_s: float = 0.0,
        on_end: Callable[[Job], None] | None = None,
    ) -> Run:
        """Run all jobs to their end.

        ``concurrency``: so many at once, the next when one ends, whatever their times; None sends
        each at its time. ``sample_s``: seconds between samples, 0 for none.
        """
        if self._events.now or self._done:
            raise RuntimeError("a fleet runs once")
        self._jobs, self._closed = iter(jobs), concurrency is not None
        self._on_end = on_end or self._on_end
        for _ in range(1 if concurrency is None else concurrency):
            self._next()
        if sample_s > 0:
            self._events.call(0.0, self._sample, sample_s)
        heap, events = self._events.heap, 0
        while heap:
            self._events.now, _, function, argument = heapq.heappop(heap)
            events += 1
            function(argument)
        waiting = sum(len(w.queue) + len(w.retracted) + len(w.ready) for w in self.decode)
        waiting += sum(len(w.queue) for w in self.prefill)
        if waiting:
            raise RuntimeError(f"the simulation stopped with {waiting} requests waiting")
        end = max((job.finished for job in self._done), default=0.0)
        return Run(self._done, end, self._samples, self.prefill, self.decode, events)

    # --- events -------------------------------------------------------------------------------

    def _next(self) -> None:
        job = next(self._jobs, None)
        if job is None:
            return
        if self._closed:
            job.arrival = self._events.now
        self._events.call(job.arrival, self._arrive, job)

    def _arrive(self, job: Job) -> None:
        if not self._closed:
            self._next()
        self._route(job)
        worker = self.decode[job.decode]
        if not worker.fits(job) or job.prompt > self.config.prefill.pool:
            job.rejected = True
            self._ended(job)
            return
        worker.submit(self._events.now, job)

    def _admitted(self, job: Job) -> None:
        self.prefill[job.prefill].submit(self._events.now, job)

    def _send(self, job: Job, computed: int, last: bool) -> None:
        """A chunk is ready: all up to its end goes, less what went before or decode holds."""
        begin = max(job.decode_hit + job.moved, 0)
        tokens = max(job.position - begin, 0)
        job.moved += tokens
        source, target = self.prefill[job.prefill], self.decode[job.decode]
        self._pending[job.prefill] -= min(computed, job.expected)
        job.expected -= min(computed, job.expected)
        if not tokens and not last:
            return
        began = max(self._events.now, source.link_free, target.link_free)
        seconds = self.costs.transfer_s(tokens)
        source.link_free = target.link_free = began + seconds
        source.link_seconds += seconds
        if last:
            self._pending[job.prefill] -= job.expected
            job.expected = 0
            ended = began + seconds + self.costs.transfer.latency_s
            self._events.call(ended, self._landed, job)

    def _landed(self, job: Job) -> None:
        now = self._events.now
        job.landed = now
        self.prefill[job.prefill].release(now, job)
        self.decode[job.decode].land(now, job)

    def _ended(self, job: Job) -> None:
        self._ongoing[job.decode] -= job.load
        self._pending[job.prefill] -= job.expected
        job.blocks = ()
        self._done.append(job)
        self._on_end(job)
        if self._closed:
            self._next()

    def _sample(self, interval: float) -> None:
        pool = self.config.decode.pool * len(self.decode)
        self._samples.append(
            Sample(
                self._events.now,
                sum(len(w.running) for w in self.decode),
                sum(len(w.queue) for w in self.decode),
                sum(w.pool.in_use for w in self.decode) / pool,
                sum(w.busy for w in self.prefill),
            )
        )
        if self._events.heap:
            self._events.call(self._events.now + interval, self._sample, interval)

    # --- routing ------------------------------------------------------------------------------

    def _route(self, job: Job) -> None:
        config, turn = self.config, next(self._turn)
        held: NDArray[np.int64] = np.zeros(len(self.prefill), dtype=np.int64)
        if config.prefill.radix:
            held = policy.hits(self._prefill_index, job.blocks, len(held)) * config.block_tokens
        job.prefill = policy.choose(config.prefill_policy, turn, self._pending, held)
        job.expected = job.prompt - int(held[job.prefill])
        self._pending[job.prefill] += job.expected
        held = np.zeros(len(self.decode), dtype=np.int64)
        if config.decode.radix and config.decode_policy == "delta_kv":
            held = policy.hits(self._decode_index, job.blocks, len(held)) * config.block_tokens
        job.decode = policy.choose(config.decode_policy, turn, self._ongoing, held)
        job.load = job.prompt + job.output - int(held[job.decode])
        self._ongoing[job.decode] += job.load

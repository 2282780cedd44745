"""Prefill and decode workers, the links between them, and the clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmark.agentic.model.costs import Costs
from benchmark.agentic.model.sim.decode import AggregatedWorker, DecodeConfig, DecodeWorker
from benchmark.agentic.model.sim.jobs import Job
from benchmark.agentic.model.sim.pool import Pool
from benchmark.agentic.model.sim.prefill import PrefillConfig, PrefillWorker
from benchmark.agentic.model.sim.routing import POLICIES, Routing


@dataclass(frozen=True)
class FleetConfig:
    """A fleet; workers of a role are alike. Without prefill workers the others do both."""

    prefill: PrefillConfig
    decode: DecodeConfig
    prefill_workers: int = 1
    decode_workers: int = 1
    prefill_policy: str = "least_pending"
    decode_policy: str = "round_robin"
    block_tokens: int = 512
    """Unit of all caches."""

    def __post_init__(self) -> None:
        if self.prefill_workers < 0 or self.decode_workers < 1:
            raise ValueError("a fleet needs a worker that decodes")
        for flag, name in (
            ("--prefill-policy", self.prefill_policy),
            ("--decode-policy", self.decode_policy),
        ):
            if name not in POLICIES:
                raise ValueError(f"{flag} {name}: choose from {', '.join(POLICIES)}")


@dataclass
class Sample:
    """The fleet at one time."""

    at: float
    running: int
    in_use: float
    """Share of the decode pools, idle blocks not counted."""


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
        size, call = config.block_tokens, self._events.call
        prefill, decode = config.prefill, config.decode
        self._to_prefill = Routing(
            config.prefill_policy, config.prefill_workers, prefill.pool, size, cache=True
        )
        self._to_decode = Routing(
            config.decode_policy, config.decode_workers, decode.pool, size, decode.radix
        )
        self.prefill = [
            PrefillWorker(
                i, prefill, costs, Pool(prefill.pool, size, self._to_prefill.index, i), call,
                self._send,
            )
            for i in range(config.prefill_workers)
        ]  # fmt: skip
        kind = DecodeWorker if self.prefill else AggregatedWorker
        self.decode = [
            kind(
                i, decode, costs, Pool(decode.pool, size, self._to_decode.index, i), call,
                self._admitted, self._ended,
            )
            for i in range(config.decode_workers)
        ]  # fmt: skip
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
        if not worker.fits(job) or (self.prefill and job.prompt > self.config.prefill.pool):
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
        self._computed(job, computed)
        if not tokens and not last:
            return
        began = max(self._events.now, source.link_free, target.link_free)
        seconds = self.costs.transfer_s(tokens)
        job.stalled += began - self._events.now
        source.link_free = target.link_free = began + seconds
        source.link_seconds += seconds
        if last:
            ended = began + seconds + self.costs.transfer.latency_s
            self._events.call(ended, self._landed, job)

    def _computed(self, job: Job, tokens: int) -> None:
        tokens = min(tokens, job.pending)
        self._to_prefill.computed(job.prefill, tokens)
        job.pending -= tokens

    def _landed(self, job: Job) -> None:
        now = self._events.now
        job.landed = now
        self._leave_prefill(job)
        self._to_decode.computed(job.decode, job.prompt - job.said[1])
        self.prefill[job.prefill].release(now, job)
        self.decode[job.decode].land(now, job)

    def _leave_prefill(self, job: Job) -> None:
        self._computed(job, job.pending)
        self._to_prefill.leave(job.prefill, job, job.said[0], 0)

    def _ended(self, job: Job) -> None:
        if self.prefill and job.rejected:
            self._leave_prefill(job)
        if job.rejected or not self.prefill:
            self._to_decode.computed(job.decode, job.prompt - job.said[1])
        self._to_decode.leave(job.decode, job, job.said[1], self.config.decode.reserved)
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
                sum(w.pool.in_use for w in self.decode) / pool,
            )
        )
        if self._events.heap:
            self._events.call(self._events.now + interval, self._sample, interval)

    # --- routing ------------------------------------------------------------------------------

    def _route(self, job: Job) -> None:
        found = 0
        if self.prefill:
            job.prefill, found = self._to_prefill.take(job, 0)
            job.pending = job.prompt - found
        job.decode, held = self._to_decode.take(job, self.config.decode.reserved)
        job.said = (found, held)

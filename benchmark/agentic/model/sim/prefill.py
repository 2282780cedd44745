"""A prefill worker: requests in order of arrival, chunk by chunk, behind a prefix cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmark.agentic.model.costs import Costs
from benchmark.agentic.model.sim.jobs import Job
from benchmark.agentic.model.sim.pool import Pool


@dataclass(frozen=True)
class PrefillConfig:
    """A prefill worker. Tokens."""

    pool: int
    chunk: int = 8192
    """New tokens of a batch, at most."""

    def __post_init__(self) -> None:
        if min(self.pool, self.chunk) < 1:
            raise ValueError(f"pool and chunk must be 1 or more: {self}")


class PrefillWorker:
    """``send(job, tokens, last)`` is called with the prompt's tokens that a chunk completed."""

    def __init__(
        self,
        number: int,
        config: PrefillConfig,
        costs: Costs,
        pool: Pool,
        call: Callable[[float, Callable[[float], None], float], None],
        send: Callable[[Job, int, bool], None],
    ) -> None:
        self.number, self.config, self.costs, self.pool = number, config, costs, pool
        self._call, self._send = call, send
        self.queue: deque[Job] = deque()
        self.busy_seconds = 0.0
        self.link_free = 0.0
        self.link_seconds = 0.0
        self.busy = False
        self._batch: list[tuple[Job, int]] = []

    def submit(self, now: float, job: Job) -> None:
        """Decode has pages for it."""
        self.queue.append(job)
        self._start(now)

    def release(self, now: float, job: Job) -> None:
        """Decode has all of it."""
        self.pool.unlock(job.blocks[: job.prefill_locked])
        self.pool.release(job.prefill_private)
        job.prefill_private = job.prefill_locked = 0
        self._start(now)

    def _start(self, now: float) -> None:
        if self.busy or not self.queue:
            return
        budget, seconds = self.config.chunk, self.costs.prefill_batch_s
        for job in self.queue:
            if not job.position and not self._begin(job):
                break
            take = min(budget, job.prompt - job.position)
            seconds += self.costs.prefill_s(take, job.position)
            self._batch.append((job, take))
            budget -= take
            if not budget:
                break
        if not self._batch:
            return
        self.busy = True
        self.busy_seconds += seconds
        self._call(now + seconds, self._end, now + seconds)

    def _begin(self, job: Job) -> bool:
        """Lock what the cache has and take memory for the rest; the last token is always new."""
        size = self.pool.block_tokens
        found = min(self.pool.match(job.blocks), (job.prompt - 1) // size)
        self.pool.lock(job.blocks[:found])
        if not self.pool.allocate(job.prompt - found * size):
            self.pool.unlock(job.blocks[:found])
            return False
        job.prefill_locked, job.prefill_private = found, job.prompt - found * size
        job.position = job.prefill_hit = found * size
        return True

    def _end(self, now: float) -> None:
        batch, self._batch, self.busy = self._batch, [], False
        size = self.pool.block_tokens
        for job, take in batch:
            job.position += take
            last = job.position == job.prompt
            new = job.blocks[job.prefill_locked : job.position // size]
            self.pool.commit(new)
            job.prefill_locked += len(new)
            job.prefill_private -= len(new) * size
            if last:
                self.queue.popleft()
                job.prefilled = now
            self._send(job, take, last)
        self._start(now)

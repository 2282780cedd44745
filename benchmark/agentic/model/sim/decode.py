"""Workers that decode: requests wait for pages, get their KV, join the batch, and leave it.
Those of a fleet without prefill workers compute prompts too.

Between two changes of the batch nothing happens but steps of a known length, so the worker has one
event for the next change and none for a token.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmark.agentic.model.costs import Costs
from benchmark.agentic.model.sim.jobs import Job
from benchmark.agentic.model.sim.pool import Pool


@dataclass(frozen=True)
class DecodeConfig:
    """A decode worker. Tokens unless said otherwise."""

    pool: int
    radix: bool = False
    """Keep prompts, and take only what is missing of a new one."""
    reserved: int = 512
    """``--num-reserved-decode-tokens``."""
    max_running: int = 256
    """Requests of a batch."""
    page: int = 1
    gentle: bool = False
    """Reserve what a running request can still generate, at most ``reserved``, and half of that
    for one that does not run yet, and wait for a prefix that is arriving: this patch set's
    admission. Otherwise ``reserved`` for every request in sight: the stock release's."""

    def __post_init__(self) -> None:
        if min(self.pool, self.reserved, self.max_running, self.page) < 1:
            raise ValueError(f"pool, reserved, max_running and page must be 1 or more: {self}")

    @property
    def slots(self) -> int:
        """Requests that may hold pages at once: SGLang gives small batches thrice their number."""
        return self.max_running * 3 if self.max_running <= 32 else self.max_running


class DecodeWorker:
    """``admit(job)`` is called when a job has pages, ``end(job)`` when it is finished.

    ``call(at, function, argument)`` calls the function at that time.
    """

    def __init__(
        self,
        number: int,
        config: DecodeConfig,
        costs: Costs,
        pool: Pool,
        call: Callable[[float, Callable[[int], None], int], None],
        admit: Callable[[Job], None],
        end: Callable[[Job], None],
    ) -> None:
        self.number, self.config, self.costs, self.pool = number, config, costs, pool
        self._call, self._admit, self._end = call, admit, end
        self.queue: deque[Job] = deque()
        self.retracted: deque[Job] = deque()
        self.ready: deque[Job] = deque()
        """Their KV is here; they wait for the batch."""
        self.running: list[tuple[int, int, Job]] = []
        """Heap by (step of the end, number)."""
        self.arriving = 0
        self.link_free = 0.0
        self.peak_running = 0
        self._arriving_blocks: dict[int, int] = {}
        self._entering = 0  # outputs of requests that hold pages and do not run, capped
        self._steps = 0
        self._at = 0.0  # when the step after `_steps` began
        self._context = 0
        self._plan = 0  # number of the planned change; older ones are void
        self._target = 0

    # --- from outside -------------------------------------------------------------------------

    def fits(self, job: Job) -> bool:
        """Whether an empty pool could hold it to its end."""
        room = max(job.output, self.config.reserved)
        return self._pages(job.prompt) + room <= self.config.pool

    def submit(self, now: float, job: Job) -> None:
        """A new request."""
        self.queue.append(job)
        self.settle(now)

    def land(self, now: float, job: Job) -> None:
        """All of its KV is here."""
        self.arriving -= 1
        if self.config.radix:
            for block in job.blocks[job.locked :]:
                if self._arriving_blocks[block] > 1:
                    self._arriving_blocks[block] -= 1
                else:
                    del self._arriving_blocks[block]
            self._share(job)
        self.ready.append(job)
        self.settle(now)

    # --- the clock ----------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Bring the batch up to ``now``, let in what fits, and plan the next change."""
        if self.running:
            batch = len(self.running)
            steps = self.costs.steps_in(max(now - self._at, 0.0), batch, self._context)
            # The last step before the planned change is left to `_wake`, which does not round.
            self._advance(min(steps, self._target - self._steps - 1))
        self._change(now)

    def _wake(self, plan: int) -> None:
        if plan == self._plan:
            # The planned number of steps, whatever rounding says about the time.
            self._advance(self._target - self._steps)
            self._change(self._at)

    def _advance(self, steps: int) -> None:
        if steps <= 0:
            return
        batch = len(self.running)
        self._at += self.costs.steps_s(steps, batch, self._context)
        self._steps += steps
        self._context += steps * batch
        if not self.pool.allocate(steps * batch):
            raise RuntimeError(f"decode worker {self.number} grew beyond its pool")

    def _change(self, now: float) -> None:
        """At ``now``; the batch itself changes only at the end of a step."""
        if not self.running:
            self._at = max(self._at, now)
        boundary = not self.running or self._at >= now
        if boundary:
            self._finish()
            self._fill()
        self._let_in(now)
        if boundary and not self.running:
            self._fill()
        self._schedule()

    def _schedule(self) -> None:
        self._plan += 1
        if not self.running:
            self._target = self._steps
            return
        batch = len(self.running)
        steps = min(self.running[0][0] - self._steps, self.pool.available // batch)
        if self._must_look():
            steps = 1
        self._target = self._steps + max(steps, 1)
        span = self.costs.steps_s(self._target - self._steps, batch, self._context)
        self._call(self._at + span, self._wake, self._plan)

    def _must_look(self) -> bool:
        """Whether somebody could join the batch at the next step."""
        return bool(self.ready) and len(self.running) < self.config.max_running

    # --- the batch ----------------------------------------------------------------------------

    def _finish(self) -> None:
        while self.running and self.running[0][0] <= self._steps:
            job = heapq.heappop(self.running)[2]
            self._context -= job.prompt + job.output - 1
            self._free(job, self._steps - job.joined_step)
            job.finished = self._at
            self._end(job)

    def _fill(self) -> None:
        """Who is ready joins; who then has no room for a step is retracted, and others may join."""
        while True:
            self._join()
            self._retract()
            if self.running or not self.ready:
                return

    def _join(self) -> None:
        while self.ready and len(self.running) < self.config.max_running:
            job = self.ready.popleft()
            self._entering -= self._cap(job)
            if job.first_token < 0:
                job.first_token = self._at
                job.left = job.output - 1
            if not job.left:  # the first token was the last
                self._free(job, 0)
                job.finished = self._at
                self._end(job)
                continue
            job.joined_step = self._steps
            job.finish_step = self._steps + job.left
            self._context += job.prompt + job.output - 1 - job.left
            heapq.heappush(self.running, (job.finish_step, job.number, job))
        self.peak_running = max(self.peak_running, len(self.running))

    def _retract(self) -> None:
        """The youngest give their memory back until the others can take a step."""
        while self.running and self.pool.available < len(self.running):
            youngest = max(self.running, key=lambda entry: (entry[2].joined_step, entry[1]))
            self.running.remove(youngest)
            heapq.heapify(self.running)
            job = youngest[2]
            ran = self._steps - job.joined_step
            job.left -= ran
            self._context -= job.prompt + job.output - 1 - job.left
            self._free(job, ran)
            job.retracted += 1
            self.retracted.append(job)

    def _free(self, job: Job, grown: int) -> None:
        self.pool.release(job.private + grown)
        self.pool.unlock(job.blocks[: job.locked])
        job.private = job.locked = 0

    # --- admission ----------------------------------------------------------------------------

    def _let_in(self, now: float) -> None:
        while self.retracted and self._reserve(self.retracted[0], resumes=True):
            self.ready.append(self.retracted.popleft())
        if self.retracted:
            return
        passed: list[Job] = []
        while self.queue and self._held() < self.config.slots:
            job = self.queue[0]
            if self._prefix_arrives(job):
                passed.append(self.queue.popleft())
                continue
            if not self._reserve(job):
                break
            self.queue.popleft()
            job.admitted = now
            self.arriving += 1
            if self.config.radix:
                for block in job.blocks[job.locked :]:
                    self._arriving_blocks[block] = self._arriving_blocks.get(block, 0) + 1
            self._admit(job)
        self.queue.extendleft(reversed(passed))

    def _held(self) -> int:
        return len(self.running) + self.arriving + len(self.ready)

    def _prefix_arrives(self, job: Job) -> bool:
        if not (self.config.gentle and self.config.radix and self._arriving_blocks):
            return False
        found = self.pool.match(job.blocks)
        return found < len(job.blocks) and job.blocks[found] in self._arriving_blocks

    def _reserve(self, job: Job, resumes: bool = False) -> bool:
        generated = job.output - 1 - job.left if resumes else 0
        found = self.pool.match(job.blocks) if self.config.radix else 0
        self.pool.lock(job.blocks[:found])
        needed = self._pages(job.prompt - found * self.pool.block_tokens) + generated
        if resumes:  # room like a running one, or it would be retracted again at once
            margin = min(self.config.reserved, job.left)
        else:
            margin = self._cap(job) if self.config.gentle else self.config.reserved
        if needed + margin > self.pool.available - self._reserved() or not self.pool.allocate(
            needed
        ):
            self.pool.unlock(job.blocks[:found])
            return False
        job.locked, job.private = found, needed
        if resumes and self.config.radix:  # what was copied back is shared again
            self._share(job)
        elif not resumes:
            job.decode_hit = found * self.pool.block_tokens
        self._entering += self._cap(job)
        return True

    def _share(self, job: Job) -> None:
        """Its prompt's blocks are the tree's now."""
        new = job.blocks[job.locked :]
        self.pool.commit(new)
        job.private -= len(new) * self.pool.block_tokens
        job.locked = len(job.blocks)

    def _reserved(self) -> int:
        """Tokens kept for what requests that hold pages will generate."""
        if not self.config.gentle:
            return self.config.reserved * self._held()
        cap = self.config.reserved
        return self._entering + sum(min(cap, end - self._steps) for end, _, _ in self.running)

    def _cap(self, job: Job) -> int:
        return min(self.config.reserved, job.output) // 2 if self.config.gentle else 0

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page) * self.config.page


class AggregatedWorker(DecodeWorker):
    """Computes prompts itself, in order of arrival and before any step, as SGLang does without
    mixed chunks: whoever fits is prefilled between two steps, and the batch waits."""

    link_seconds = 0.0
    busy_seconds = 0.0
    _blocked = False

    def _let_in(self, now: float) -> None:
        if self.running and self._at < now:
            return  # within a step
        entered = True
        while entered:  # who needs no step leaves room for others
            entered = self._enter()
            self._fill()
            if self.running:
                break
        self._blocked = bool(self.queue)

    def _enter(self) -> bool:
        """Whoever fits, one prompt after another; whether anybody did."""
        before = len(self.ready)
        while self.retracted and self._reserve(self.retracted[0], resumes=True):
            self.ready.append(self.retracted.popleft())
        while not self.retracted and self.queue and self._held() < self.config.max_running:
            job = self.queue[0]
            if not self._reserve(job):
                break
            self.queue.popleft()
            job.admitted = self._at
            job.prefill_hit = job.decode_hit
            new = max(job.prompt - job.decode_hit, 1)
            seconds = self.costs.request_prefill_s(new, job.prompt - new)
            self._at += seconds
            self.busy_seconds += seconds
            job.prefilled = job.landed = job.first_token = self._at
            job.left = job.output - 1
            if self.config.radix:
                self._share(job)
            self.ready.append(job)
        return len(self.ready) > before

    def _must_look(self) -> bool:
        return super()._must_look() or (bool(self.queue) and not self._blocked)

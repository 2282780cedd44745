"""A server that does both: whoever fits is prefilled between two steps, and the batch waits."""

from __future__ import annotations

from benchmark.agentic.capacity.sim.decode import DecodeWorker


class AggregatedWorker(DecodeWorker):
    """A decode worker that computes prompts itself, in order of arrival and before any step, as
    SGLang does without mixed chunks."""

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

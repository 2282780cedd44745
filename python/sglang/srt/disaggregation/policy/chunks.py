"""Chunks of one rank's local turns: when the next one runs, its size, its time and its metrics.

The local turns of either release (``LocalTurns`` on 0.5.10.post1, ``QueuedTurns`` on 0.5.23) add
the batches.

Contract: scheduler thread, no lock; all ranks call the same methods in the same steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any  # Any: SGLang's requests, batches, results and scheduler

from sglang.srt.disaggregation.policy.chunk_times import (
    NOT_MEASURED,
    OTHERS_CHUNK,
    VOTES,
    Measured,
    StepTimes,
    agreed_costs,
)
from sglang.srt.disaggregation.policy.pace import Limits, Pace

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.observability import Telemetry


class Chunks(ABC):
    """Chunks that run between the decode steps of one rank."""

    def __init__(
        self, limits: Limits, telemetry: Telemetry, clock: Callable[[], float], *, blocking: bool
    ) -> None:
        """``clock``: seconds, monotonic; ``blocking``: see ``StepTimes``."""
        self.limits, self.telemetry, self._clock = limits, telemetry, clock
        self.measured = Measured(limits.max_itl)
        self.pace = Pace(limits)
        self.times = StepTimes(self.measured, blocking)
        #: True if other data parallel ranks may run requests, which a chunk here would delay: they
        #: ran a batch in the last step, or this rank ran a chunk in it and cannot tell.
        self.others_run = False

    @property
    @abstractmethod
    def beside(self) -> int:
        """Number of requests that a chunk delays."""

    @property
    @abstractmethod
    def delays(self) -> bool:
        """True if a chunk delays the next token of a running request, or of a turn whose first
        token is known, at the latest by the launched chunk. The bound on inter-token latency
        applies then."""

    def take_over(self, votes: Sequence[int]) -> Sequence[int]:
        """Use the times that the ranks agreed on; return the rest of the agreed votes."""
        self.pace.costs = agreed_costs(votes[:VOTES])
        return votes[VOTES:]

    def fits(self, left: int) -> bool:
        """Return True if the next chunk of a turn with ``left`` tokens keeps the bound."""
        return self.pace.fits(left, self.delays)

    def next_chunk(self, left: int) -> int:
        """Return the tokens of the chunk that may run now, or 0; ``left``: tokens of the first
        turn."""
        return self.pace.next_chunk(left, self.beside, self.delays)

    def chunk_launched(self, tokens: int) -> None:
        """Note the launch of a chunk."""
        self.pace.chunk(tokens, self.beside)
        self.times.launched(tokens, self._clock())

    def stepped(self, batch: Any) -> None:
        """Note that ``batch`` is about to run: a decode step, or with data parallel attention an
        empty batch while other ranks run. A chunk of another rank delays requests here as one of
        this rank does, so no chunk follows in the next step."""
        if batch.is_extend_in_batch:
            self.pace.others_chunk()
            tokens = OTHERS_CHUNK
        else:
            self.pace.step()
            tokens = 0 if batch.forward_mode.is_decode() else NOT_MEASURED
        self.times.launched(tokens, self._clock())

    def hook(self) -> None:
        """Note that the loop called a hook (``StepTimes``)."""
        self.times.hook(self._clock())

    def result(self, batch: Any, result: Any, scheduler: Any) -> None:
        """Wait for the result of a step, as SGLang does next, and measure the step. After a decode
        step, measure the gap before it; its tokens are sent next."""
        self.hook()
        if getattr(result, "copy_done", None) is not None:
            result.copy_done.synchronize()
        elif scheduler.server_args.device != "cpu":  # without overlap
            scheduler.device_module.current_stream().synchronize()
        now = self._clock()
        self.times.result(now)
        if batch.forward_mode.is_decode():
            rids = frozenset(req.rid for req in batch.reqs if not req.finished())
            gap = self.measured.gaps.step(now, rids, self.fits(self.limits.least))
            if gap is not None:
                observe_gap(self.telemetry, *gap, self.limits.max_itl)


def observe_gap(stats: Telemetry, seconds: float, has_chunk: bool, bound: float | None) -> None:
    """Observe the gap between two decode steps; ``bound``: longest gap with a chunk."""
    if bound and has_chunk and seconds > bound:
        stats.count("decode_itl_breaches")
    stats.observe("decode_itl_seconds", seconds, chunk=str(has_chunk).lower())


def own_first_drafts(batch: Any) -> None:
    """Store the inputs of the first draft of each request of a computed ``batch`` on the request,
    as prefill's metadata would. The request drafts from them again when it resumes."""
    start = batch.spec_info
    # To the host, because SGLang stacks the hidden states of requests from prefill and of resumed
    # ones without moving them to one device.
    probabilities, tokens = start.topk_p.cpu(), start.topk_index.cpu()
    hidden_states = start.hidden_states.cpu()
    for index, req in enumerate(batch.reqs):
        req.output_topk_p = probabilities[index].clone()
        req.output_topk_index = tokens[index].clone()
        req.hidden_states_tensor = hidden_states[index].clone()

"""Why a request was computed where it was, what it hit and moved, and how long it waited.

The values are numbers and texts only, because SGLang 0.5.23 takes nothing else in
``cached_tokens_details``, the part of an answer's ``meta_info`` that has them. The same values are
in the event log (``observability.Ended``) and on the spans of SGLang's tracing.

Contract: the scheduler's thread only; a value of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar  # Any: SGLang's SchedulerReqTimeStats

if TYPE_CHECKING:
    from sglang.srt.disaggregation.local_prefill.policy import Decision

#: Stage of a request (the text of ``request.Stage``) -> name of the time that it spent in it.
#: SGLang's spans have the other stages.
WAITS = {
    "handshake": "handshake",
    "in line": "memory",
    "in transfer": "transfer",
    "in local prefill": "local_prefill",
    "committed": "start",
    "retracted": "retracted",
}


@dataclass(slots=True)
class Explanation:
    """The explanation of one request, filled in during its life."""

    #: SGLang's times of the request, which have its trace; None in a test.
    time_stats: Any = None
    #: Side that computes the new tokens ("local", "remote"); empty until the request is admitted.
    where: str = ""
    #: Why that side; empty on a server without local turns.
    reason: str = ""
    #: Tokens queued on decode and on the prefill server, if they were compared.
    queued_tokens: tuple[int, int] | None = None
    prompt_tokens: int = 0
    #: Tokens of the prompt that were in the tree at admission.
    hit_tokens: int = 0
    #: Bytes of KV and state that this rank requested from prefill.
    requested_bytes: int = 0
    #: Reasons of refused admissions. Each is counted once in the metric.
    refused_for: set[str] = field(default_factory=set)
    #: When the request entered its stage, on SGLang's clock of spans.
    since: float = field(default_factory=lambda: Explanation.clock())
    #: Seconds in the stages that it has left, by the names in ``WAITS``.
    seconds: dict[str, float] = field(default_factory=dict)

    clock: ClassVar[Callable[[], float]] = time.perf_counter

    def placed(self, prompt_tokens: int, hit_tokens: int, decision: Decision | None) -> None:
        """Note the admission. ``decision``: None on a server without local turns."""
        self.prompt_tokens, self.hit_tokens, self.requested_bytes = prompt_tokens, hit_tokens, 0
        self.where, self.reason, self.queued_tokens = "remote", "", None
        if decision is not None:
            self.where, self.reason, load = decision.where, decision.reason, decision.load
            self.queued_tokens = None if load is None else (load.queued, load.remote)

    def left(self, stage: str) -> None:
        """Note the end of a stage, and add a span if SGLang traces the request."""
        now, since = Explanation.clock(), self.since
        self.since = now
        if (wait := WAITS.get(stage)) is None:
            return
        self.seconds[wait] = self.seconds.get(wait, 0.0) + now - since
        if self.time_stats is not None and self.time_stats.trace_ctx.tracing_enable:
            from sglang.srt.observability.req_time_stats import RequestStageConfig

            span = RequestStageConfig(f"disagg_{wait}", level=1)
            self.time_stats.trace_slice(span, since, now, self._choice())

    def values(self) -> dict[str, int | str]:
        """Return the explanation as it is now."""
        waits = {f"{wait}_ms": round(1e3 * spent) for wait, spent in self.seconds.items()}
        return {**self._choice(), **waits}

    def _choice(self) -> dict[str, int | str]:
        values: dict[str, int | str] = {}
        if self.where:
            new_tokens = self.prompt_tokens - self.hit_tokens
            local_tokens = new_tokens if self.where == "local" else 0
            values = {
                "turn": self.where,
                "decode_hit_tokens": self.hit_tokens,
                "local_tokens": local_tokens,
                "requested_tokens": new_tokens - local_tokens,
                "requested_bytes": self.requested_bytes,
            }
        if self.reason:
            values["turn_reason"] = self.reason
        if self.queued_tokens is not None:
            values["decode_queued_tokens"], values["prefill_queued_tokens"] = self.queued_tokens
        if self.refused_for:
            values["refused_for"] = ",".join(sorted(self.refused_for))
        return values

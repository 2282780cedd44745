"""Where turns were computed and why; how long that was expected to take, and took."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping

from sglang.srt.disaggregation.delta.decode.turn_choice import Decision
from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.disaggregation.delta.observability import STATS


class TurnMetrics:
    """Where turns were computed and why, and how long that was expected to take and took. Counted
    also where metrics are off."""

    def __init__(self) -> None:
        #: Turns by (where, reason).
        self.turns: Counts[tuple[str, str]] = Counts()
        self._labels: dict[str, object] = {}

    def bind(self, labels: Mapping[str, object]) -> None:
        """Mirror everything to Prometheus under ``labels`` from now on."""
        self._labels = dict(labels)

    def decided(self, decision: Decision) -> None:
        """A turn was taken or announced."""
        self.turns[decision.where, decision.reason] += 1
        if self._labels:
            own = {"where": decision.where, "reason": decision.reason}
            METRICS["decode_turns"].child(self._labels, **own).inc()

    def done(self, decision: Decision, seconds: float) -> None:
        """A turn's first token is here, so long after its admission."""
        times = {"expected": decision.expected, "actual": seconds}
        for name, value in times.items():
            if self._labels and value is not None:
                metric = METRICS[f"decode_turn_{name}_seconds"]
                metric.child(self._labels, where=decision.where).observe(value)

    def gap(self, seconds: float, has_chunk: bool, bound: float | None) -> None:
        """Requests waited so long from one decode step to the next; ``bound``: on that."""
        if bound and has_chunk and seconds > bound:
            STATS.add("decode_itl_breaches", 1)
        if self._labels:
            metric = METRICS["decode_itl_seconds"]
            metric.child(self._labels, chunk=str(has_chunk).lower()).observe(seconds)

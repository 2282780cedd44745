"""Metrics of local turns, by the names that they have on SGLang 0.5.10.post1."""

from __future__ import annotations

from sglang.srt.disaggregation.delta.decode.turn_metrics import TurnMetrics
from sglang.srt.disaggregation.delta.metrics import METRICS


class LocalMetrics(TurnMetrics):
    """Beside the choices and their times, the prompt tokens computed here."""

    def computed(self, tokens: int) -> None:
        """A chunk was launched."""
        if self._labels:
            METRICS["decode_local_tokens"].child(self._labels).inc(tokens)

    def gap(self, seconds: float, has_chunk: bool, bound: float | None) -> None:
        """As on that release, where the scheduler mirrors the counter."""
        super().gap(seconds, has_chunk, bound)
        if self._labels and bound and has_chunk and seconds > bound:
            METRICS["decode_itl_breaches"].child(self._labels).inc()

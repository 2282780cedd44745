"""Where turns were computed and why; how long that was expected to take, and took."""

from __future__ import annotations

from sglang.srt.disaggregation.delta.decode.turn_choice import Decision
from sglang.srt.disaggregation.delta.observability import Telemetry


def decided(stats: Telemetry, decision: Decision) -> None:
    """A turn was taken or announced."""
    stats.count("decode_turns", where=decision.where, reason=decision.reason)


def done(stats: Telemetry, decision: Decision, seconds: float) -> None:
    """A turn's first token is here, so long after its admission."""
    if decision.expected is not None:
        stats.observe("decode_turn_expected_seconds", decision.expected, where=decision.where)
    stats.observe("decode_turn_actual_seconds", seconds, where=decision.where)


def gap(stats: Telemetry, seconds: float, has_chunk: bool, bound: float | None) -> None:
    """Requests waited so long from one decode step to the next; ``bound``: on that."""
    if bound and has_chunk and seconds > bound:
        stats.count("decode_itl_breaches")
    stats.observe("decode_itl_seconds", seconds, chunk=str(has_chunk).lower())

"""Where turns were computed and why; how long that was expected to take, and took."""

from __future__ import annotations

from sglang.srt.disaggregation.delta.decode.turn_choice import Decision
from sglang.srt.disaggregation.delta.observability import STATS


def decided(decision: Decision) -> None:
    """A turn was taken or announced."""
    STATS.count("decode_turns", where=decision.where, reason=decision.reason)


def done(decision: Decision, seconds: float) -> None:
    """A turn's first token is here, so long after its admission."""
    if decision.expected is not None:
        STATS.observe("decode_turn_expected_seconds", decision.expected, where=decision.where)
    STATS.observe("decode_turn_actual_seconds", seconds, where=decision.where)


def gap(seconds: float, has_chunk: bool, bound: float | None) -> None:
    """Requests waited so long from one decode step to the next; ``bound``: on that."""
    if bound and has_chunk and seconds > bound:
        STATS.count("decode_itl_breaches")
    STATS.observe("decode_itl_seconds", seconds, chunk=str(has_chunk).lower())

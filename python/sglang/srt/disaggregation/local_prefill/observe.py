"""Metrics and log lines of local prefill."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any  # Any: SGLang's requests of either release

from sglang.srt.disaggregation.local_prefill.policy import Decision

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.observability import Telemetry

logger = logging.getLogger(__name__)


def record_choice(stats: Telemetry, req: Any, decision: Decision) -> None:
    """Count and log a turn that decode has taken or announced to prefill."""
    stats.count("decode_turns", where=decision.where, reason=decision.reason)
    logger.debug(
        "request %s (bootstrap_room=%s): %s new tokens are computed %s (%s); %s",
        req.rid,
        req.bootstrap_room,
        decision.tokens,
        decision.where,
        decision.reason,
        decision.load,
    )


def observe_gap(stats: Telemetry, seconds: float, has_chunk: bool, bound: float | None) -> None:
    """Observe the gap between two decode steps; ``bound``: longest gap with a chunk."""
    if bound and has_chunk and seconds > bound:
        stats.count("decode_itl_breaches")
    stats.observe("decode_itl_seconds", seconds, chunk=str(has_chunk).lower())

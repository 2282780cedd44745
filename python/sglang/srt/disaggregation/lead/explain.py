"""Why a turn was computed where it was, in ``cached_tokens_details`` of its answer's ``meta_info``.

Contract: scheduler thread; a value of one rank.
"""

from __future__ import annotations

from typing import Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.decode.request import Explanation
from sglang.srt.disaggregation.lead.attach import Function, Wraps
from sglang.srt.disaggregation.policy.choice import Decision


def note(req: Any, hit_tokens: int, decision: Decision) -> None:
    """Note that ``req`` was taken here or announced to prefill, with ``hit_tokens`` in the tree."""
    explanation = Explanation()
    explanation.placed(len(req.origin_input_ids), hit_tokens, decision)
    req.lead_explained = explanation.values()
    # SGLang makes the announcement, so its bytes are not known here.
    del req.lead_explained["requested_bytes"]


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    @wrap(SchedulerOutputStreamer, "get_cached_tokens_details", "(self, req)")
    def get_cached_tokens_details(stock: Function, self: Any, req: Any) -> Any:
        details, explained = stock(req), getattr(req, "lead_explained", None)
        if explained is None or not req.finished():
            return details
        return {"device": 0, "host": 0, **(details or {}), **explained}

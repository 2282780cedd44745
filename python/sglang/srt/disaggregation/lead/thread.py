"""NIXL's progress thread waits for events instead of spinning.

NIXL's Python binding sets no pause, so each prefill and decode process has a thread that takes a
whole core. With a pause the thread waits for the transport's events, and polls once a pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.nixl.agent import pausing_agents

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function, Wraps


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    @wrap(
        NixlKVManager,
        "__init__",
        "(self, args, disaggregation_mode, server_args, is_mla_backend=False)",
    )
    def __init__(stock: Function, self: Any, *given: Any, **named: Any) -> None:
        with pausing_agents():
            stock(*given, **named)

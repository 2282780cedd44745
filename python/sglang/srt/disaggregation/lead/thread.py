"""NIXL's progress thread waits for events instead of spinning, and NIXL's threads are nicer.

NIXL's Python binding asks for no pause, so that each prefill and each decode process has a thread
that takes a whole core. With a pause it waits for the transport's events, and polls once a pause.
A sending agent's other threads spin while anything is under way; where cores are scarce, they get a
smaller share than SGLang's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.nixl.agent import pausing_agents

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function, Wraps


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager
    from sglang.srt.disaggregation.utils import DisaggregationMode

    @wrap(
        NixlKVManager,
        "__init__",
        "(self, args, disaggregation_mode, server_args, is_mla_backend=False)",
    )
    def __init__(
        stock: Function, self: Any, args: Any, disaggregation_mode: Any, *more: Any, **rest: Any
    ) -> None:
        with pausing_agents(sends=disaggregation_mode == DisaggregationMode.PREFILL):
            stock(args, disaggregation_mode, *more, **rest)

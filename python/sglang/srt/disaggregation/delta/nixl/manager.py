"""The thin override of SGLang's NIXL manager: one class, of which a server uses one half."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.nixl import agent
from sglang.srt.disaggregation.delta.nixl.decode import NixlDecode
from sglang.srt.disaggregation.delta.nixl.prefill import NixlPrefill
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Settings

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.server_args import ServerArgs


class DeltaNixlManager(NixlPrefill, NixlDecode):
    """Moves deltas; its agent is made for the threads that use it."""

    moves_deltas = True

    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:  # fmt: skip
        from sglang.srt.disaggregation.utils import DisaggregationMode

        sends = disaggregation_mode == DisaggregationMode.PREFILL
        with agent.configured_agents(Settings.read().workers if sends else 0):
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)

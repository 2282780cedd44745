"""SGLang's NIXL manager: what is set up once, and prefill's half (decode's: ``NixlDecode``)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.disaggregation.delta.nixl import agent
from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend
from sglang.srt.disaggregation.delta.nixl.conn import NixlAnnouncements, NixlPeers, cut_chunk
from sglang.srt.disaggregation.delta.nixl.decode import NixlDecode
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferSettings

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.server_args import ServerArgs


class DeltaNixlManager(NixlDecode):
    """SGLang's NIXL manager, of which a server uses one half. Configures the agent for the threads
    that use it."""

    moves_deltas = True

    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:  # fmt: skip
        from sglang.srt.disaggregation.utils import DisaggregationMode

        sends = disaggregation_mode == DisaggregationMode.PREFILL
        with agent.configured_agents(TransferSettings.read().queues if sends else 0):
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)

    @override
    def make_backend(self, settings: TransferSettings) -> NixlBackend:
        return NixlBackend(
            self.agent,
            self.peers,
            Layout(self.rank, self.get_mla_kv_ptrs_with_pp, self.get_mha_kv_ptrs_with_pp),
            writer=self.rank.writer_id,
        )

    @cached_property
    def peers(self) -> NixlPeers:
        """The decode ranks that this prefill rank knows."""
        return NixlPeers(self.agent, self.decode_kv_args_table)

    cut = staticmethod(cut_chunk)

    @override
    def _start_bootstrap_thread(self) -> None:
        self.start_prefill()

    @override
    def announcements(self) -> NixlAnnouncements:
        """Return what takes registrations and announcements."""
        return NixlAnnouncements(
            self.rank,
            self.rooms,
            self.decode_ranks,
            self.decode_kv_args_table,
            self.peers.add,
        )

    @override
    def forget_peer(self, peer: str) -> None:
        self.peers.forget(peer)

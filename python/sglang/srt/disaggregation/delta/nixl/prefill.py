"""NIXL's part of a prefill rank: its half of SGLang's manager, and the sender.

Chunks are queued for transfer workers, which also tell NIXL of the decode ranks that registered.
Those ranks' messages are checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: page indices in each of SGLang's forms

import numpy as np
from typing_extensions import Self, override

from sglang.srt.disaggregation.delta.nixl import agent
from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend
from sglang.srt.disaggregation.delta.nixl.decode import NixlDecode
from sglang.srt.disaggregation.delta.nixl.descriptors import ChunkPayload, Destination
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.nixl.peers import Peers
from sglang.srt.disaggregation.delta.pages import DeltaMismatch, Pages
from sglang.srt.disaggregation.delta.peer_messages import (
    Announcements,
    BadMessage,
    DeltaTransferInfo,
    check_registration,
)
from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaSender
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Settings
from sglang.srt.disaggregation.delta.prefill.transfer_pool import PooledManager

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo, NixlKVManager, NixlKVSender
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.server_args import ServerArgs
else:
    NixlKVManager = NixlKVSender = object

_REGISTRATION_FRAMES = 12


@dataclasses.dataclass
class NixlTransferInfo(DeltaTransferInfo):
    """A decode rank's announcement of a room, as NIXL's prefill ranks get it."""

    #: Of a later release's message without pages: nothing goes to it from here, not even metadata.
    is_left_out: bool = False

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info = super().from_zmq(msg)
        # SGLang makes a list of the array, which the scheduler's thread would have to read.
        info.dst_state_indices = np.array(info.dst_state_indices, np.int32)
        return info

    @override
    def is_dummy(self) -> bool:
        if self.delta is not None:
            # No pages is a full prefix hit, not a dummy: it still gets its metadata.
            return self.delta.is_dummy
        if self.later_prefix_len:
            return self.is_left_out
        return self.delta_error is None and bool(super().is_dummy())


def cut_chunk(
    room: int,
    announcements: Iterable[NixlTransferInfo],
    pages: Pages,
    index_slice: slice,
    chunk_id: int,
    metadata_slot: int | None,
    state_pages: Sequence[Any] | None,
) -> ChunkPayload:
    """Cut one chunk out of what the decode ranks of ``room`` announced.

    ``pages`` are copied: SGLang's may be a view of its own table, which changes while the chunk is
    in a queue. ``index_slice`` is the chunk's place among the room's destination pages.

    Raises:
        DeltaMismatch: a rank listed another number of pages there.
    """
    own = _copy(pages)
    destinations = {}
    for info in announcements:
        if info.is_dummy():
            continue
        listed = info.dst_kv_indices[index_slice]
        if len(listed) != len(own):
            raise DeltaMismatch(
                f"room {room}: chunk {chunk_id} has {len(own)} pages, and decode rank "
                f"{info.agent_name} listed {len(listed)} for it"
            )
        frame = info.delta
        destinations[info.agent_name] = Destination(
            pages=listed,
            state_pages=_copy(info.dst_state_indices if state_pages is not None else ()),
            metadata_slot=info.dst_aux_index,
            pool_pages=(frame.pool_pages or None) if frame else None,
            metadata_slots=(frame.metadata_slots or None) if frame else None,
            takes_metadata=bool(frame and frame.takes_metadata),
        )
    return ChunkPayload(
        chunk_id=chunk_id,
        pages=own,
        metadata_slot=metadata_slot,
        state_pages=_copy(state_pages if state_pages is not None else ()),
        destinations=destinations,
    )


def _copy(pages: Sequence[Any] | Pages) -> Pages:
    """SGLang gives lists of numbers, arrays, and lists of arrays."""
    own = np.array(pages, np.int32).reshape(-1)
    own.setflags(write=False)
    return own


class NixlAnnouncements(Announcements):
    """SGLang's NIXL messages begin with a guard."""

    peer_name = "agent_name"

    def take(self, frames: list[bytes]) -> None:
        """Take one message of a decode rank; raises as ``take_message`` does."""
        from sglang.srt.disaggregation.nixl import conn

        if not frames or frames[0] != conn.GUARD:
            raise BadMessage("it does not start like a NIXL message of SGLang")
        self.take_message(conn, frames[1:], _REGISTRATION_FRAMES, self._register)

    def _register(self, info: KVArgsRegisterInfo) -> None:
        check_registration(
            self._rank,
            kv_buffers=len(info.dst_kv_ptrs),
            state_buffers=len(info.dst_state_data_ptrs),
            aux_buffers=len(info.dst_aux_ptrs),
            tp_size=info.decode_tp_size,
            tp_rank=info.decode_tp_rank,
            item_len=info.dst_kv_item_len,
        )
        self._keep(info)

    @override
    def _announce(self, info: NixlTransferInfo) -> None:
        rank, registered = self._rank, self._registered.get(info.agent_name)
        if registered is not None and info.later_prefix_len and not len(info.dst_kv_indices):
            # A full hit looks the same there. Of latent KV the first rank of a group sends all.
            group = max(rank.tp_size // registered.decode_tp_size, 1)
            info.is_left_out = rank.is_mla and rank.tp_rank % group != 0
        super()._announce(info)


class NixlPrefill(PooledManager, NixlKVManager):
    """The manager of a prefill rank: queues what the plan left over."""

    def make_backend(self, settings: Settings) -> NixlBackend:
        return NixlBackend(
            self.agent,
            self.peers,
            Layout(self.rank, self.get_mla_kv_ptrs_with_pp, self.get_mha_kv_ptrs_with_pp),
            writer=self.rank.writer_id,
        )

    @cached_property
    def peers(self) -> Peers:
        """The decode ranks that this prefill rank knows."""
        return Peers(self.agent, self.decode_kv_args_table)

    cut = staticmethod(cut_chunk)

    # ---- messages from decode ranks ----

    @override
    def _start_bootstrap_thread(self) -> None:
        self.start_prefill()

    def announcements(self) -> NixlAnnouncements:
        """Takes what decode ranks register and announce."""
        return NixlAnnouncements(
            self.rank,
            self.rooms,
            self.decode_ranks,
            self.decode_kv_args_table,
            self.peers.add,
        )

    def forget_peer(self, peer: str) -> None:
        self.peers.forget(peer)


class DeltaNixlManager(NixlPrefill, NixlDecode):
    """Moves deltas: one class, of which a server uses one half. Its agent is made for the threads
    that use it."""

    moves_deltas = True

    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:  # fmt: skip
        from sglang.srt.disaggregation.utils import DisaggregationMode

        sends = disaggregation_mode == DisaggregationMode.PREFILL
        with agent.configured_agents(Settings.read().queues if sends else 0):
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)


class DeltaNixlSender(DeltaSender, NixlKVSender):
    """Queues a room's chunks, and says what became of them."""

    def clear(self) -> None:
        """Forget the room: called by the scheduler once the request left the in-flight queue."""
        self.end()

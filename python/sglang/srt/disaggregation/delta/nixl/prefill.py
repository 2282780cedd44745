"""NIXL's part of a prefill rank: its half of SGLang's manager, and the sender.

Chunks are queued for transfer workers, which also tell NIXL of the decode ranks that registered.
Those ranks' messages are checked.
"""

from __future__ import annotations

import atexit
import dataclasses
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: page indices in each of SGLang's forms

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, override

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend
from sglang.srt.disaggregation.delta.nixl.descriptors import ChunkPayload, Destination
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.nixl.peers import Peers
from sglang.srt.disaggregation.delta.observability import TransferReport
from sglang.srt.disaggregation.delta.pages import DeltaMismatch, Pages, share_of_chunk
from sglang.srt.disaggregation.delta.peer_messages import (
    Announcements,
    BadMessage,
    DeltaTransferInfo,
    check_registration,
)
from sglang.srt.disaggregation.delta.prefill.room import Room
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, Settings
from sglang.srt.disaggregation.delta.prefill.transfer_pool import TransferPool, Watchdog
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo, NixlKVManager, NixlKVSender
else:
    NixlKVManager = NixlKVSender = object

_REGISTRATION_FRAMES = 12

#: A process that ends waits so long for what is under way.
_DRAIN_S = 1.0


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

    def take(self, frames: list[bytes]) -> None:
        """Take one message of a decode rank; raises as ``take_message`` does."""
        from sglang.srt.disaggregation.nixl import conn

        if not frames or frames[0] != conn.GUARD:
            raise BadMessage("it does not start like a NIXL message of SGLang")
        self.take_message(conn, frames[1:], _REGISTRATION_FRAMES)

    @override
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
    def _peer(self, info: NixlTransferInfo) -> str:
        return str(info.agent_name)

    @override
    def _announce(self, info: NixlTransferInfo) -> None:
        rank, registered = self._rank, self._registered.get(info.agent_name)
        if registered is not None and info.later_prefix_len and not len(info.dst_kv_indices):
            # A full hit looks the same there. Of latent KV the first rank of a group sends all.
            group = max(rank.tp_size // registered.decode_tp_size, 1)
            info.is_left_out = rank.is_mla and rank.tp_rank % group != 0
        super()._announce(info)


class NixlPrefill(NixlKVManager):
    """The manager of a prefill rank: queues what the plan left over."""

    def start_transfers(self) -> None:
        """Start the transfer workers of this prefill rank.

        Raises:
            ValueError: a variable is set to something that cannot be; the message names it.
        """
        #: Seconds that a chunk may take, from the queue to its end.
        self.transfer_s = environment.TRANSFER_TIMEOUT.read()
        self.transfer_report = TransferReport(environment.TRANSFER_LOG_INTERVAL.read())
        backend = NixlBackend(
            self.agent,
            self.peers,
            Layout(self.rank, self.get_mla_kv_ptrs_with_pp, self.get_mha_kv_ptrs_with_pp),
            writer=self.rank.writer_id,
            costs=descriptors.Costs(*environment.DESCRIPTOR_COSTS.read()),
        )
        self.transfers = TransferPool(
            backend,
            self.rooms,
            Settings.read(),
            self.transfer_report,
            prepare_thread=self._prepare_thread,
        )
        self.watchdog = Watchdog(self.transfers, self.rooms)
        self.transfers.start()
        atexit.register(self.transfers.stop, _DRAIN_S)

    @override
    def room_stopped(self, room: Room, kind: Reason) -> None:
        self.transfers.cancel(room)

    def _prepare_thread(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(self.kv_args.gpu_id)

    @cached_property
    def peers(self) -> Peers:
        """The decode ranks that this prefill rank knows."""
        return Peers(self.agent, self.decode_kv_args_table)

    @override
    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Pages, index_slice: slice, is_last: bool,
        chunk_id: int, aux_index: int | None = None, state_indices: Sequence[int] | None = None,
    ) -> list[object]:  # fmt: skip
        """Queue one chunk. Nothing is handed out: what becomes of it is in the room table.

        Raises:
            DeltaMismatch: a decode rank listed another number of pages for it, or none is known.
        """
        announcements = self.rooms.destinations(bootstrap_room)
        if not announcements:
            raise DeltaMismatch(f"room {bootstrap_room}: no decode rank's pages are known for it")
        payload = cut_chunk(
            bootstrap_room, announcements, kv_indices, index_slice, chunk_id, aux_index,
            state_indices,
        )  # fmt: skip
        now = time.monotonic()
        self.transfers.submit(
            Chunk(
                room=bootstrap_room,
                peers=tuple(payload.destinations),
                payload=payload,
                is_last=is_last,
                deadline=now + self.transfer_s,
                enqueued_at=now,
            )
        )
        return []

    # ---- messages from decode ranks ----

    @override
    def _start_bootstrap_thread(self) -> None:
        self.start_transfers()
        self.start_reader(self.announcements().take, self._tick)

    def announcements(self) -> NixlAnnouncements:
        """Takes what decode ranks register and announce."""
        return NixlAnnouncements(
            self.rank,
            self.rooms,
            self.decode_ranks,
            self.decode_kv_args_table,
            self.peers.add,
            self.take_announcement,
        )

    def _tick(self) -> None:
        self.transfer_report.tick()
        self.watchdog.tick()
        self.forget_silent_peers()

    def forget_peer(self, peer: str) -> None:
        self.peers.forget(peer)


class DeltaNixlSender(NixlKVSender):
    """Queues a room's chunks, and says what became of them. Holds no transfer itself."""

    curr_idx: int  # of the upstream class; named for the type checker
    has_sent: bool

    def __init__(
        self, mgr: NixlPrefill, bootstrap_addr: str, bootstrap_room: int,
        dest_tp_ranks: list[int], pp_rank: int,
    ) -> None:  # fmt: skip
        #: Another rank of the context parallel group sends all of it, and this one is done.
        self._is_left_out = False
        super().__init__(mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks, pp_rank)
        if not self.is_stopped:
            mgr.transfers.open(self._room)

    @override
    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        if self.is_stopped:
            return
        manager, room = self.kv_mgr, self.bootstrap_room
        part = slice(self.curr_idx, self.curr_idx + len(kv_indices))
        self.curr_idx = part.stop
        is_last = part.stop == self.num_kv_indices
        if manager.enable_all_cp_ranks_for_transfer:
            group = manager.attn_cp_rank, manager.attn_cp_size
            kv_indices, part = share_of_chunk(kv_indices, part, *group)
        elif manager.is_dummy_cp_rank:  # another rank of the context parallel group sends all
            self._is_left_out |= is_last
            self.has_sent |= is_last
            return
        try:
            manager.add_transfer_request(
                room, kv_indices, part, is_last, self.chunk_id,
                self.aux_index if is_last else None, state_indices if is_last else None,
            )  # fmt: skip
        except DeltaMismatch as error:
            self.fail(Reason.MISMATCH, str(error))
            return
        self.chunk_id += 1
        self.has_sent = is_last

    @override
    def poll(self) -> KVPoll:
        room = self._room  # without a lock: the scheduler asks of every request, in every step
        if room.delivered or self._is_left_out:
            return KVPoll.Success  # also if it was stopped after that: decode has it
        if self.is_due:
            return KVPoll.WaitingForInput
        if not room.is_stopped:
            if self.has_sent:
                return KVPoll.WaitingForInput
            self.fail_if_unannounced()
        if room.is_stopped:
            # While its pages are read, they must not be freed.
            return KVPoll.Failed if room.is_over else KVPoll.Transferring
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status == KVPoll.Bootstrapping and self.is_initialised:
            return KVPoll.WaitingForInput
        return status

    @override
    def failure_exception(self) -> None:
        self.fail_with_others()  # unless it failed here
        reason, cause = self.failure, self._room.error
        self.clear()
        raise RuntimeError(reason) from cause

    def clear(self) -> None:
        """Forget the room: called by the scheduler once the request left the in-flight queue."""
        self.kv_mgr.transfers.forget(self._room)
        self.forget()

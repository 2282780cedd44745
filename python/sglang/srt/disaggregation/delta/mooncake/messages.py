"""What peers send over Mooncake's sockets, and what a decode rank makes of it.

To a prefill rank: registrations and rooms' announcements. To a decode rank: how a room ended for
one writer, and metadata that the engine cannot carry:

<room> <status> <writer>                                     KVPoll.Success or KVPoll.Failed
AUX_DATA <room> <buffer> <slot> <length, 4 bytes> <data>
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from typing import TYPE_CHECKING

from typing_extensions import Self, override

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.peer_messages import (
    Announcements,
    BadMessage,
    DeltaTransferInfo,
    check_registration,
)
from sglang.srt.disaggregation.delta.wire import metadata_fit

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.mooncake.manager import DeltaMooncakeManager
    from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo

logger = logging.getLogger(__name__)


_REGISTRATION_FRAMES = 10
_AUX_DATA = b"AUX_DATA"


@dataclasses.dataclass
class RoomProgress:
    """Mooncake's writers say one thing each: that all they had to send has arrived."""

    #: Prefill ranks that delivered everything.
    delivered: set[int] = dataclasses.field(default_factory=set)
    #: Prefill ranks that said that they write no more, whatever they have written.
    stopped: set[int] = dataclasses.field(default_factory=set)
    #: The metadata slot that was announced; None before that.
    slot: int | None = None

    def deliver(self, writer: int) -> int:
        """All that ``writer`` had to send has arrived; returns how many writers that holds for."""
        self.delivered.add(writer)
        return len(self.delivered)

    # ---- decode/deferred_free.py: Progress ----

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""
        self.stopped.add(writer)

    def is_drained(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""
        return len(self.delivered | self.stopped) >= writers


@dataclasses.dataclass
class MooncakeTransferInfo(DeltaTransferInfo):
    """A decode rank's announcement of a room, as Mooncake's prefill ranks get it."""

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info = super().from_zmq(msg)
        if info.delta is not None:
            # Stock calls two empty frames a dummy; a full prefix hit lists no pages either.
            info.is_dummy = info.delta.is_dummy
        return info


class MooncakeAnnouncements(Announcements):
    """Feeds one prefill rank's manager; a decode rank's name is its Mooncake session."""

    def take(self, frames: list[bytes]) -> None:
        """Take one message of a decode rank; raises as ``take_message`` does."""
        from sglang.srt.disaggregation.mooncake import conn

        self.take_message(conn, frames, _REGISTRATION_FRAMES)

    @override
    def _register(self, info: KVArgsRegisterInfo) -> None:
        session = info.mooncake_session_id
        # SGLang chooses the queue by the port of the session.
        _, colon, port = session.rpartition(":")
        if not (colon and port.isdigit()):
            raise BadMessage(f"Mooncake session {session[:80]!r} does not end with a port")
        check_registration(
            self._rank,
            kv_buffers=len(info.dst_kv_ptrs),
            state_buffers=len(info.dst_state_data_ptrs),
            aux_buffers=len(info.dst_aux_ptrs),
            tp_size=info.dst_attn_tp_size,
            tp_rank=info.dst_tp_rank,
            item_len=None if info.enable_hisparse else info.dst_kv_item_len,
        )
        self._keep(info)

    @override
    def _peer(self, info: MooncakeTransferInfo) -> str:
        return str(info.mooncake_session_id)

    @override
    def _announce(self, info: MooncakeTransferInfo) -> None:
        if not info.is_dummy and info.dst_aux_index is None:
            raise BadMessage(f"room {info.room}: it names no metadata slot")
        super()._announce(info)


class MooncakeStatuses:
    """Feeds one manager with SGLang's own kinds of messages, from the reader thread."""

    def __init__(self, manager: DeltaMooncakeManager) -> None:
        self._manager = manager

    def take(self, frames: list[bytes]) -> None:
        """Take one message.

        Raises:
            BadMessage: it cannot be served; any other exception: it cannot even be parsed.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        if frames and frames[0] == _AUX_DATA:
            self._take_metadata(frames)
            return
        if len(frames) != 3:
            raise BadMessage(f"{len(frames)} frames, a status has 3")
        room, status, writer = (int(frame) for frame in frames)
        if writer < 0 or status not in (KVPoll.Success, KVPoll.Failed):
            raise BadMessage(f"room {room}: status {status} of writer {writer} is invalid")
        if status == KVPoll.Success:
            self._delivered(room, writer)
        else:
            self._manager.servers.fail(
                room, Reason.PEER_FAILED, f"room {room}: prefill could not deliver it (its log "
                f"says why)",
            )  # fmt: skip

    def _delivered(self, room: int, writer: int) -> None:
        """Everything of one writer is here; the last one completes the room."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager = self._manager
        delivered = manager.servers.progress_of(room).deliver(writer)
        wanted = manager.required_prefill_response_num_table.get(room)
        if wanted is None:
            logger.debug("late completion of room %s by writer %s", room, writer)
        elif delivered >= wanted:
            manager.statuses.advance(room, KVPoll.Success)

    def _take_metadata(self, frames: list[bytes]) -> None:
        """Write one metadata buffer of a room, if it is the room's own slot and of its size."""
        from sglang.srt.disaggregation.mooncake.conn import AuxDataCodec

        if len(frames) != 6:
            raise BadMessage(f"metadata of {len(frames)} frames, 6 expected")
        room, buffer, slot = (int(frame) for frame in frames[1:4])
        (length,) = struct.unpack(">I", frames[4])
        manager, data, ours = self._manager, frames[5], self._manager.kv_args
        if not 0 <= buffer < len(ours.aux_data_ptrs):
            raise BadMessage(f"room {room}: metadata buffer {buffer} of {len(ours.aux_data_ptrs)}")
        item_len = ours.aux_item_lens[buffer]
        if not 0 <= slot < ours.aux_data_lens[buffer] // item_len:
            raise BadMessage(f"room {room}: there is no metadata slot {slot}")
        if len(data) != length or not metadata_fit(buffer, length, item_len):
            raise BadMessage(
                f"room {room}: {len(data)} bytes of metadata, {length} were sent, {item_len} "
                "expected"
            )
        progress = manager.progress(room)
        if room not in manager.request_status or progress.slot != slot:
            logger.debug("late metadata of room %s for slot %s", room, slot)
            return
        AuxDataCodec.deserialize_data_to_buffer(ours, buffer, slot, data)

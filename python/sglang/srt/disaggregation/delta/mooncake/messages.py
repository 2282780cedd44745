"""What has arrived for a room on a decode rank, writer by writer.

What decode servers send to a Mooncake prefill rank: registrations and rooms' announcements.

What prefill ranks send to a Mooncake decode rank: how a room ended, and metadata over TCP.

<room> <status> <writer>                                     KVPoll.Success or KVPoll.Failed
AUX_DATA <room> <buffer> <slot> <length, 4 bytes> <data>     where the engine cannot carry it
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, override

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.mooncake import staging
from sglang.srt.disaggregation.delta.peer_messages import (
    BadMessage,
    check_announcement,
    check_registration,
)

logger = logging.getLogger(__name__)


@dataclass
class RoomProgress:
    """Mooncake's writers say one thing each: that all they had to send has arrived."""

    #: Prefill ranks that delivered everything.
    delivered: set[int] = field(default_factory=set)
    #: Prefill ranks that said that they write no more, whatever they have written.
    stopped: set[int] = field(default_factory=set)
    #: The metadata slot that was announced; None before that.
    slot: int | None = None

    def deliver(self, writer: int) -> int:
        """All that ``writer`` had to send has arrived; returns how many writers that holds for."""
        self.delivered.add(writer)
        return len(self.delivered)

    # ---- delta/watch.py: Progress ----

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""
        self.stopped.add(writer)

    def is_quiet(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""
        return len(self.delivered | self.stopped) >= writers


if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo
else:
    TransferInfo = object

_ANNOUNCEMENT_FRAMES = 8
_REGISTRATION_FRAMES = 10


@dataclasses.dataclass
class DeltaTransferInfo(TransferInfo):
    """A decode rank's announcement, with its delta frame where it sent one."""

    delta: wire.DeltaFrame | None = None
    #: Why the frame could not be read. Kept for the sender, which fails the room: raising here
    #: would leave the room unanswered.
    delta_error: str | None = None
    #: Tokens that a decode rank of a later release holds; None where it is of another.
    later_prefix_len: int | None = None

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info: Self = super().from_zmq(msg)
        info.later_prefix_len = wire.later_prefix_len(msg)
        try:
            info.delta = wire.find_frame(msg)
        except wire.DeltaFrameError as error:
            info.delta_error = str(error)
        if info.delta is not None:
            # Stock calls two empty frames a dummy; a full prefix hit lists no pages either.
            info.is_dummy = info.delta.is_dummy
        return info

    @property
    def is_ours(self) -> bool:
        """Whether its decode rank sent a delta frame, readable or not."""
        return self.delta is not None or self.delta_error is not None


class MooncakeAnnouncements:
    """Feeds one manager with SGLang's own kinds of messages, from the reader thread."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def take(self, frames: list[bytes]) -> None:
        """Take one message.

        Raises:
            BadMessage: it cannot be served; any other exception: it cannot even be parsed.
        """
        from sglang.srt.disaggregation.mooncake import conn

        manager = self._manager
        if frames and frames[0] in staging.MESSAGES:
            staging.take(manager, frames)
            return
        if len(frames) < _ANNOUNCEMENT_FRAMES:
            raise BadMessage(f"{len(frames)} frames, at least {_ANNOUNCEMENT_FRAMES} wanted")
        if frames[0] == b"None":
            if len(frames) < _REGISTRATION_FRAMES:
                raise BadMessage(
                    f"a registration of {len(frames)} frames, {_REGISTRATION_FRAMES} wanted"
                )
            self._register(conn.KVArgsRegisterInfo.from_zmq(frames))
        else:
            self._announce(conn.TransferInfo.from_zmq(frames))

    def _register(self, info: Any) -> None:
        manager, session = self._manager, info.mooncake_session_id
        # SGLang chooses the queue by the port of the session.
        _, colon, port = session.rpartition(":")
        if not (colon and port.isdigit()):
            raise BadMessage(f"Mooncake session {session[:80]!r} does not end with a port")
        check_registration(
            manager,
            kv_buffers=len(info.dst_kv_ptrs),
            state_buffers=len(info.dst_state_data_ptrs),
            aux_buffers=len(info.dst_aux_ptrs),
            tp_size=info.dst_attn_tp_size,
            tp_rank=info.dst_tp_rank,
            item_len=None if info.enable_hisparse else info.dst_kv_item_len,
        )
        manager.decode_kv_args_table[session] = info
        manager.trust(session)

    def _announce(self, info: Any) -> None:
        """Record one decode rank's announcement; the last one of a room makes it ready."""
        manager, session = self._manager, info.mooncake_session_id
        check_announcement(info)
        if not info.is_dummy and info.dst_aux_index is None:
            raise BadMessage(f"room {info.room}: no metadata slot is named")
        if session not in manager.decode_kv_args_table:
            if info.is_ours:
                manager.rooms.refuse_stranger(info)
            raise BadMessage(f"room {info.room}: decode rank {session!r} never registered")
        manager.transfer_infos.setdefault(info.room, {})[session] = info
        # Where it ended here already, decode was just told and the entry is gone.
        if manager.rooms.announce(info.room, session, info):
            manager.take_announcement(info.room)


_AUX_DATA = b"AUX_DATA"


class MooncakeStatuses:
    """Feeds one manager with SGLang's own kinds of messages, from the reader thread."""

    def __init__(self, manager: Any) -> None:
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
            raise BadMessage(f"{len(frames)} frames, not a status of 3")
        room, status, writer = (int(frame) for frame in frames)
        if writer < 0 or status not in (KVPoll.Success, KVPoll.Failed):
            raise BadMessage(f"room {room}: status {status} of writer {writer} cannot be")
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
            manager.advance(room, KVPoll.Success)

    def _take_metadata(self, frames: list[bytes]) -> None:
        """Write one metadata buffer of a room, if it is the room's own slot and of its size."""
        from sglang.srt.disaggregation.mooncake.conn import AuxDataCodec

        if len(frames) != 6:
            raise BadMessage(f"metadata of {len(frames)} frames, 6 wanted")
        room, buffer, slot = (int(frame) for frame in frames[1:4])
        (length,) = struct.unpack(">I", frames[4])
        manager, data, ours = self._manager, frames[5], self._manager.kv_args
        if not 0 <= buffer < len(ours.aux_data_ptrs):
            raise BadMessage(f"room {room}: metadata buffer {buffer} of {len(ours.aux_data_ptrs)}")
        item_len = ours.aux_item_lens[buffer]
        if not 0 <= slot < ours.aux_data_lens[buffer] // item_len:
            raise BadMessage(f"room {room}: there is no metadata slot {slot}")
        if not len(data) == length == item_len:
            raise BadMessage(
                f"room {room}: {len(data)} bytes of metadata, {length} were sent, {item_len} wanted"
            )
        progress = manager.progress(room)
        if room not in manager.request_status or progress.slot != slot:
            logger.debug("late metadata of room %s for slot %s", room, slot)
            return
        AuxDataCodec.deserialize_data_to_buffer(ours, buffer, slot, data)

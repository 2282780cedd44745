"""What decode servers send to a Mooncake prefill rank: registrations and rooms' announcements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, override

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.reader import (
    BadMessage,
    check_announcement,
    check_registration,
)
from sglang.srt.disaggregation.mooncake_delta import staging

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

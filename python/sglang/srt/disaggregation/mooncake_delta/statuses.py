"""What prefill ranks send to a Mooncake decode rank: how a room ended, and metadata over TCP.

<room> <status> <writer>                                     KVPoll.Success or KVPoll.Failed
AUX_DATA <room> <buffer> <slot> <length, 4 bytes> <data>     where the engine cannot carry it
"""

from __future__ import annotations

import logging
import struct
from typing import Any

from sglang.srt.disaggregation.delta.failures import Reason
from sglang.srt.disaggregation.delta.reader import BadMessage

logger = logging.getLogger(__name__)

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

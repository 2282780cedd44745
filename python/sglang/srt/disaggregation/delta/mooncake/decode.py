"""Mooncake's part of a decode rank: what prefill ranks send.

They say how a room ended for one writer, and send metadata that the engine cannot carry:

<room> <status> <writer>                                     KVPoll.Success or KVPoll.Failed
AUX_DATA <room> <buffer> <slot> <length, 4 bytes> <data>
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.transfer_queue import Progress
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.peer_messages import BadMessage
from sglang.srt.disaggregation.delta.wire import metadata_fit

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
else:
    MooncakeKVManager = object

logger = logging.getLogger(__name__)

_AUX_DATA = b"AUX_DATA"


class MooncakeDecode(MooncakeKVManager):
    """The manager of a decode rank: keeps what each writer of a room has said."""

    @override
    def start_decode_thread(self) -> None:
        if self.servers is None:
            self.transfer_statuses = self.prefill_response_tracker
            super().start_decode_thread()
            return
        self.transfer_statuses = {}
        self.start_decode(self.take_status)

    def take_status(self, frames: list[bytes]) -> None:
        """Take one message of a prefill rank, of SGLang's own kinds, on the reader thread.

        Raises:
            BadMessage: it cannot be served; any other exception: it cannot even be parsed.
        """
        if frames and frames[0] == _AUX_DATA:
            self._take_metadata(frames)
            return
        if len(frames) != 3:
            raise BadMessage(f"{len(frames)} frames, a status has 3")
        room, status, writer = (int(frame) for frame in frames)
        if writer < 0 or status not in (KVPoll.Success, KVPoll.Failed):
            raise BadMessage(f"room {room}: status {status} of writer {writer} is invalid")
        if status == KVPoll.Failed:
            self.servers.fail(
                room, Reason.PEER_FAILED, f"room {room}: prefill could not deliver it (its log "
                f"says why)",
            )  # fmt: skip
            return
        # Everything of this writer is here; the last one completes the room.
        delivered = self.servers.progress_of(room).done_writers
        delivered.add(writer)
        wanted = self.required_prefill_response_num_table.get(room)
        if wanted is None:
            logger.debug("late completion of room %s by writer %s", room, writer)
        elif len(delivered) >= wanted:
            self.statuses.advance(room, KVPoll.Success)

    def _take_metadata(self, frames: list[bytes]) -> None:
        """Write one metadata buffer of a room, if it is the room's own slot and of its size."""
        from sglang.srt.disaggregation.mooncake.conn import AuxDataCodec

        if len(frames) != 6:
            raise BadMessage(f"metadata of {len(frames)} frames, 6 expected")
        room, buffer, slot = (int(frame) for frame in frames[1:4])
        (length,) = struct.unpack(">I", frames[4])
        data, ours = frames[5], self.kv_args
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
        if room not in self.request_status or self.progress(room).metadata_slot != slot:
            logger.debug("late metadata of room %s for slot %s", room, slot)
            return
        AuxDataCodec.deserialize_data_to_buffer(ours, buffer, slot, data)

    @property
    def peer_name(self) -> str:
        return str(self.get_session_id())

    @override
    def progress(self, room: int) -> Progress:
        # Nothing is kept for a room that is not announced.
        return self.transfer_statuses.get(room) or Progress()

    @override
    def expect_metadata(self, room: int, slot: int) -> bool:
        self.transfer_statuses[room] = Progress(metadata_slot=slot)
        return False

"""Mooncake's part of a decode rank: what prefill ranks send, and the receiver.

They say how a room ended for one writer, and send metadata that the engine cannot carry:

<room> <status> <writer>                                     KVPoll.Success or KVPoll.Failed
AUX_DATA <room> <buffer> <slot> <length, 4 bytes> <data>
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.peer_messages import BadMessage
from sglang.srt.disaggregation.delta.wire import metadata_fit

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVReceiver
else:
    MooncakeKVManager = MooncakeKVReceiver = object

logger = logging.getLogger(__name__)

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

    # ---- decode/transfer_queue.py: Progress ----

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""
        self.stopped.add(writer)

    def is_drained(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""
        return len(self.delivered | self.stopped) >= writers


class MooncakeDecode(MooncakeKVManager):
    """The manager of a decode rank: keeps what each writer of a room has said."""

    @override
    def start_decode_thread(self) -> None:
        if self.servers is None:
            super().start_decode_thread()
            return
        self._progress: dict[int, RoomProgress] = {}
        self.start_reader(self.take_status)
        self.servers.start_heartbeat(self.heartbeat_interval, self.max_failures)

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
        delivered = self.servers.progress_of(room).deliver(writer)
        wanted = self.required_prefill_response_num_table.get(room)
        if wanted is None:
            logger.debug("late completion of room %s by writer %s", room, writer)
        elif delivered >= wanted:
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
        progress = self.progress(room)
        if room not in self.request_status or progress.slot != slot:
            logger.debug("late metadata of room %s for slot %s", room, slot)
            return
        AuxDataCodec.deserialize_data_to_buffer(ours, buffer, slot, data)

    @property
    def peer_name(self) -> str:
        return str(self.get_session_id())

    def open_progress(self, room: int) -> RoomProgress:
        """A request for ``room`` is here: keep what its writers say."""
        progress = self._progress[room] = RoomProgress()
        return progress

    def progress(self, room: int) -> RoomProgress:
        # Nothing is kept for a room that is not open.
        return self._progress.get(room) or RoomProgress()

    def take_progress(self, room: int) -> RoomProgress:
        return self._progress.pop(room, None) or RoomProgress()

    @override
    def open_rooms(self) -> dict[str, list[int]]:
        tables: dict[str, list[int]] = super().open_rooms()
        return tables | {"progress": sorted(getattr(self, "_progress", ()))}


class DeltaMooncakeReceiver(MooncakeKVReceiver):
    """Leaves nothing of its room behind, and says why a room failed."""

    conclude_state: KVPoll | None  # of the upstream class; named for the type checker

    def __init__(
        self, mgr: MooncakeDecode, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:  # fmt: skip
        if mgr.servers is not None and bootstrap_room is not None:
            mgr.open_progress(bootstrap_room)  # before anything of the room may arrive
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    @override
    def send_metadata(
        self, kv_indices: npt.NDArray[np.int32], aux_index: int | None = None,
        state_indices: list[int] | None = None,
    ) -> None:  # fmt: skip
        if self._servers is not None:
            self.kv_mgr.progress(self.bootstrap_room).slot = aux_index
        super().send_metadata(kv_indices, aux_index, state_indices)

    @override
    def poll(self) -> KVPoll:
        if self._servers is None:
            is_known = self.bootstrap_room in self.kv_mgr.request_status
            if self.conclude_state is None and not is_known:
                # As in SGLang, requests of a number share its entries, and the first that ends
                # takes them along.
                self.conclude_state = KVPoll.Failed
            return super().poll()
        if self.conclude_state is not None:
            return self.conclude_state
        manager, room = self.kv_mgr, self.bootstrap_room
        status = manager.request_status.get(room, KVPoll.Failed)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        elif self.fail_if_overdue():
            return self.conclude_state
        return status

    @override
    def abort(self) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        if self._servers is None:
            super().abort()
        else:  # stock Mooncake's own does not call what is common to all backends
            CommonKVReceiver.abort(self)

    @override
    def failure_exception(self) -> None:
        from sglang.srt.disaggregation.mooncake.conn import KVTransferError

        if self._servers is None:
            super().failure_exception()
            return
        text = self.kv_mgr.statuses.failure_of(self.bootstrap_room)
        self.clear()
        raise KVTransferError(self.bootstrap_room, text)

    @override
    def clear(self) -> None:
        if self._servers is None:
            super().clear()
            return
        self.forget()

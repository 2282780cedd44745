"""SGLang's Mooncake manager, announcements and sender.

Contract: messages are taken on the reader thread, chunks are cut on the scheduler's, and described
(``describe``) on the threads that call the engine. Nothing here has a lock.

Prefill ranks report how a room ended for one writer, and send metadata that the engine cannot move:

<room> <status> <writer>                                     KVPoll.Success or KVPoll.Failed
AUX_DATA <room> <buffer> <slot> <length, 4 bytes> <data>
"""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any  # Any: arguments of SGLang's methods

import numpy as np
from typing_extensions import Self, override

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.deferred import Progress
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.mooncake.backend import (
    Batch,
    Callers,
    MooncakeBackend,
    MooncakePayload,
)
from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.observability import STATS, count_sent
from sglang.srt.disaggregation.delta.pages import INDEX_TYPE, RECURRENT_TYPE, DeltaMismatch, Pages
from sglang.srt.disaggregation.delta.peer_messages import (
    Announcements,
    BadMessage,
    DeltaTransferInfo,
    check_registration,
)
from sglang.srt.disaggregation.delta.prefill.rooms import UNDER_WAY, Room
from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaSender
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError, TransferSettings
from sglang.srt.disaggregation.delta.wire import metadata_fit
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.utils import FastQueue
    from sglang.srt.disaggregation.mooncake.conn import (
        KVArgsRegisterInfo,
        MooncakeKVManager,
        MooncakeKVSender,
    )
else:
    MooncakeKVManager = MooncakeKVSender = object

logger = logging.getLogger(__name__)

#: Maximum number of rows in one call of the engine, because their numbers become Python's, about
#: 100 bytes a row.
_MAX_ROWS = 2**14


@dataclasses.dataclass
class MooncakeTransferInfo(DeltaTransferInfo):
    """A decode rank's announcement of a room over Mooncake."""

    #: True if it was notified that the room failed.
    is_told: bool = False

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info = super().from_zmq(msg)
        if info.delta is not None:
            # Use the frame, because stock calls two empty frames a dummy, and a full prefix hit
            # lists no pages either.
            info.is_dummy = info.delta.is_dummy
        return info


class MooncakeAnnouncements(Announcements):
    """Registrations and announcements over Mooncake; the name of a rank is its session."""

    peer_name = "mooncake_session_id"
    registration_frames = 10

    @override
    def take(self, frames: list[bytes]) -> None:
        from sglang.srt.disaggregation.mooncake import conn

        self.take_message(conn, frames)

    @override
    def check(self, info: KVArgsRegisterInfo) -> None:
        session = info.mooncake_session_id
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
        # Add NIXL's names of these fields, which ``Layout`` reads.
        info.decode_tp_size, info.decode_tp_rank = info.dst_attn_tp_size, info.dst_tp_rank
        info.gpu_id = 0

    @override
    def _announce(self, info: MooncakeTransferInfo) -> None:
        if not info.is_dummy and info.dst_aux_index is None:
            raise BadMessage(f"room {info.room}: it names no metadata slot")
        super()._announce(info)


class _Inline(Executor):
    """Runs calls at once, for a method of SGLang's that only describes."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


_INLINE = _Inline()


class DeltaMooncakeManager(MooncakeKVManager):
    """The manager of a prefill or a decode rank. SGLang's methods describe state and metadata."""

    moves_deltas = True

    # ---- messages from decode ranks ----

    @override
    def start_prefill_thread(self) -> None:
        self.start_prefill()

    @override
    def announcements(self) -> MooncakeAnnouncements:
        """Return what takes registrations and announcements."""
        return MooncakeAnnouncements(
            self.rank,
            self.rooms,
            self.decode_ranks,
            self.decode_kv_args_table,
            self._backend.register,
        )

    @override
    def forget_peer(self, peer: str) -> None:
        self._backend.forget(peer)

    # ---- sending ----

    @override
    def make_backend(self, settings: TransferSettings) -> MooncakeBackend:
        self._layout = Layout(self.rank, self.get_mla_kv_ptrs_with_pp, self.get_mha_kv_ptrs_with_pp)
        self._described = threading.local()
        cores = len(os.sched_getaffinity(0))
        threads = environment.THREADS.read(min(max(4, cores // 16), 12))  # SGLang's default
        self._backend = MooncakeBackend(
            self.engine,
            self.describe,
            lambda announcement: self.send_status(announcement, KVPoll.Success),
            self._is_stopped,
            self.decode_kv_args_table,
            # A call takes a core until it is done, also one that hangs.
            Callers(
                min(threads, cores),
                at_once=threads // environment.QUEUES.read(),
                spare=max(cores // 2, 4),
            ),
        )
        return self._backend

    @override
    def transfer_worker(
        self, queue: FastQueue, executor: Executor, staging_buffer: object = None
    ) -> None:
        """End SGLang's thread at once, because the transfer pool has its own."""

    def _is_stopped(self, number: int) -> bool:
        self.rooms.check_suspension()  # a write may have waited for an earlier call
        room = self.rooms.room(number)
        return room is not None and room.reason is not None

    def cut(
        self, room: int, announcements: Sequence[MooncakeTransferInfo], pages: Pages, place: slice,
        chunk_id: int, metadata_slot: int | None, state_pages: Sequence[Any] | None,
    ) -> MooncakePayload:  # fmt: skip
        destinations = {
            info.mooncake_session_id: info for info in announcements if not info.is_dummy
        }
        for session, info in destinations.items():
            known = self.decode_kv_args_table.get(session)
            listed = len(info.dst_kv_indices[place])
            if listed != len(pages) and not (known is not None and known.enable_hisparse):
                raise DeltaMismatch(
                    f"room {room}: {len(pages)} pages cannot be written to the {listed} that "
                    f"decode rank {session} listed for them"
                )
            if state_pages is None or self.kv_args.state_type not in (INDEX_TYPE, RECURRENT_TYPE):
                continue
            if len(state_pages) != len(info.dst_state_indices):
                # Refuse it, because SGLang would write a part of them, or to other pages.
                raise DeltaMismatch(
                    f"room {room}: {len(state_pages)} pages of state, and decode rank {session} "
                    f"listed {len(info.dst_state_indices)}"
                )
        return MooncakePayload(
            np.array(pages, np.int32), place, metadata_slot, state_pages, destinations
        )

    def describe(
        self, part: MooncakePayload, info: MooncakeTransferInfo, target: KVArgsRegisterInfo
    ) -> Iterator[tuple[str, Batch]]:
        """Yield the batches for one decode rank: KV, state and metadata. Each is built after the
        previous one is written.

        Raises:
            TransferError: the process that announced the room is not the one that is registered. A
                session is an address, which a decode rank that restarts may get again; the port of
                its control socket is new.
        """
        if (info.endpoint, info.dst_port) != (target.endpoint, target.dst_port):
            text = (
                f"decode rank {info.mooncake_session_id} has restarted since it announced the room"
            )
            raise TransferError(Reason.PEER_LOST, text)
        moved = 0
        for batch in self._kv(part, info, target) if len(part.pages) else ():
            moved += int(batch[:, 2].sum())
            yield "KV", batch
        if moved:
            peer, listed = info.mooncake_session_id, info.dst_kv_indices[part.place]
            count_sent(info.room, peer, part.pages, listed, moved)
        if part.metadata_slot is None:
            return
        if part.state_pages is not None:
            pointers, moved = target.dst_state_data_ptrs, 0
            for batch in self._described_by(
                self.maybe_send_extra, info, part.state_pages, pointers, _INLINE, target
            ):
                moved += int(batch[:, 2].sum())
                yield "state", batch
            STATS.count("kv_transfer_sent_bytes", moved)
        for batch in self._described_by(
            self.send_aux, info, part.metadata_slot, target.dst_aux_ptrs
        ):
            yield "metadata", batch

    def _kv(
        self, part: MooncakePayload, info: MooncakeTransferInfo, target: KVArgsRegisterInfo
    ) -> Iterator[Batch]:
        """Yield the batches of KV. Not by SGLang's method, which sends a neighbour's head to
        replicas if tensor parallel sizes differ, and makes a tuple of each row."""
        listed = info.dst_kv_indices
        if target.enable_hisparse:
            to = info.mooncake_session_id, part.pages, target.dst_kv_ptrs, listed, part.place
            yield from self._described_by(self.send_kvcache_hisparse, *to, _INLINE)
            return
        pair = self._layout.kv(target, None)
        runs = descriptors.runs_of(part.pages, listed[part.place], pair.source.heads)
        ours, theirs = descriptors.ranges(pair.source, pair.destination, runs)
        for first in range(0, len(ours), _MAX_ROWS):
            rows = slice(first, first + _MAX_ROWS)
            yield np.stack([ours[rows, 0], theirs[rows, 0], ours[rows, 1]], axis=1)

    def _described_by(self, send: Callable[..., int], *arguments: Any) -> list[Batch]:
        """Return the batches that a method of SGLang's would send."""
        batches: list[Batch] = []
        self._described.batches = batches
        if send(*arguments):
            raise TransferError(Reason.MISMATCH, "SGLang refused it (its log says why)")
        return batches

    @override
    def _transfer_data(
        self, mooncake_session_id: str, transfer_blocks: list[tuple[int, int, int]]
    ) -> int:
        """Keep the batch for ``_described_by`` instead of sending it."""
        if transfer_blocks:
            self._described.batches.append(np.array(transfer_blocks, np.uint64))
        return 0

    # ---- messages to decode ranks, over sockets that never block a worker ----

    @override
    def room_stopped(self, room: Room, kind: Reason) -> None:
        """Drop what waits, and send SGLang's status of a failed room at once to stock decode ranks,
        and to ours if a transfer broke or is late: their ``Stopped`` waits until all settled."""
        super().room_stopped(room, kind)
        is_broken = kind in (Reason.TRANSPORT, Reason.TIMEOUT)
        for info in list(room.announcements.values()):
            if info.is_ours:
                is_due = is_broken and room.state in UNDER_WAY
            else:
                is_due = is_broken or kind in (Reason.PEER_LOST, Reason.MISMATCH)
            if is_due and not info.is_dummy and not info.is_told:
                info.is_told = True
                self.send_status(info, KVPoll.Failed)

    def send_status(self, info: MooncakeTransferInfo, status: KVPoll) -> None:
        """Send SGLang's status of a room to a decode rank. Best effort."""
        numbers = info.room, int(status), self.rank.writer_id
        try:
            self.decode_ranks.sockets.send_frames(
                info.endpoint, info.dst_port, [b"%d" % number for number in numbers]
            )
        except (OSError, ValueError) as error:
            logger.warning(
                "room %s: could not notify decode rank %s how it ended (%s); decode ends it by its "
                "own deadline (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)",
                info.room,
                info.mooncake_session_id,
                error,
            )

    @override
    def send_aux_data_to_endpoint(
        self, remote: str, dst_port: int, room: int, buffer_index: int, aux_index: int, data: bytes
    ) -> None:
        numbers = [b"%d" % number for number in (room, buffer_index, aux_index)]
        frames = [self.AUX_DATA_HEADER, *numbers, len(data).to_bytes(4, "big"), data]
        self.decode_ranks.sockets.send_frames(remote, dst_port, frames)

    # ---- on a decode rank ----

    @override
    def start_decode_thread(self) -> None:
        if self.servers is None:
            self.transfer_statuses = self.prefill_response_tracker
            super().start_decode_thread()
            return
        self.transfer_statuses = defaultdict(Progress)
        self.start_decode(self.take_status)

    def take_status(self, frames: list[bytes]) -> None:
        """Serve one message of a prefill rank, of SGLang's own kinds, on the reader thread.

        Raises:
            BadMessage: the message is invalid; any other exception: it cannot be parsed.
        """
        if frames and frames[0] == self.AUX_DATA_HEADER:
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
        # Record the writer, which has sent everything; the last one completes the room.
        progress = self.transfer_statuses.get(room)
        if progress is None:
            logger.debug("late completion of room %s by writer %s", room, writer)
            return
        progress.done_writers.add(writer)
        wanted = self.required_prefill_response_num_table.get(room)
        if wanted is not None and len(progress.done_writers) >= wanted:
            self.statuses.advance(room, KVPoll.Success)

    def _take_metadata(self, frames: list[bytes]) -> None:
        """Write one metadata buffer of a room, if the slot is the room's and the size fits."""
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
        progress = self.transfer_statuses.get(room)
        is_late = room not in self.request_status or progress is None
        if is_late or progress.metadata_slot != slot:
            logger.debug("late metadata of room %s for slot %s", room, slot)
            return
        AuxDataCodec.deserialize_data_to_buffer(ours, buffer, slot, data)

    @property
    def peer_name(self) -> str:
        return str(self.get_session_id())

    @override
    def expect_metadata(self, room: int, slot: int) -> bool:
        self.transfer_statuses[room].metadata_slot = slot
        return False


class DeltaMooncakeSender(DeltaSender, MooncakeKVSender):
    """Prefill's end of a room over Mooncake."""

    def listed_pages(self, info: MooncakeTransferInfo) -> int:
        listed: int = super().listed_pages(info)
        known = self.kv_mgr.decode_kv_args_table.get(info.mooncake_session_id)
        if known is None or not known.enable_hisparse:
            return listed
        page: int = self.kv_mgr.kv_args.page_size
        return -(-listed // page)  # a hisparse rank lists tokens

    @override
    def clear(self) -> None:
        self.end()

"""The thin override of SGLang's Mooncake manager.

Prefill: SGLang's threads run our worker, decode ranks' messages are checked, and what prefill tells
decode goes over sockets that never block. Decode: keeps what each writer of a room has said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from concurrent.futures import Executor, as_completed
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from sglang.srt.disaggregation.delta import pages
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.mooncake.messages import (
    MooncakeAnnouncements,
    MooncakeStatuses,
    MooncakeTransferInfo,
    RoomProgress,
)
from sglang.srt.disaggregation.delta.mooncake.worker import (
    ChunkDeadlines,
    ChunkWorker,
    SettlingExecutor,
)
from sglang.srt.disaggregation.delta.pages import Pages, page_ceil
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.common.utils import FastQueue
    from sglang.srt.disaggregation.mooncake.conn import (
        KVArgsRegisterInfo,
        MooncakeKVManager,
        TransferKVChunk,
    )
else:
    MooncakeKVManager = object


class DeltaMooncakeManager(MooncakeKVManager):
    """Threads that outlive what they meet, rooms that end early, head slices of any sizes."""

    moves_deltas = True

    # ---- prefill side: messages from decode ranks ----

    @override
    def start_prefill_thread(self) -> None:
        # Stock makes these after the thread that uses them has started.
        self.session_failures: dict[str, int] = defaultdict(int)
        self.failed_sessions: set[str] = set()
        self.session_lock = threading.Lock()
        #: Rooms with writes that may still be under way: until when they count as such.
        self._unsettled: list[tuple[float, int]] = []
        #: Until when the chunks in the queues, and in calls of the engine, have to be over.
        self.chunk_deadlines = ChunkDeadlines(environment.TRANSFER_TIMEOUT.read())
        self.start_reader(self.announcements().take, self._tick)

    def announcements(self) -> MooncakeAnnouncements:
        """Takes what decode ranks register and announce."""
        return MooncakeAnnouncements(
            self.rank,
            self.rooms,
            self.decode_ranks,
            self.decode_kv_args_table,
            self._register,
            self.take_announcement,
        )

    def _register(self, info: KVArgsRegisterInfo) -> None:
        self.decode_kv_args_table[info.mooncake_session_id] = info
        self.session_registered(info.mooncake_session_id)

    def _tick(self) -> None:
        self.forget_silent_peers()
        self._leave_due()
        self._fail_overdue()

    def forget_peer(self, peer: str) -> None:
        self.decode_kv_args_table.pop(peer, None)
        self.session_registered(peer)

    # ---- prefill side: sending ----

    @override
    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Pages, index_slice: slice, is_last_chunk: bool,
        aux_index: int | None = None, state_indices: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Queue one chunk, with the room that it is of.

        Raises:
            DeltaMismatch: no decode rank's pages are known for it.
        """
        from sglang.srt.disaggregation.mooncake.conn import TransferKVChunk

        room = self.rooms.room(bootstrap_room)
        if room is None or not room.announcements:
            raise pages.DeltaMismatch(
                f"room {bootstrap_room}: no decode rank's pages are known for it"
            )
        chunk = TransferKVChunk(
            bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index, state_indices
        )
        chunk.owner = room
        self.chunk_deadlines.queued(chunk)  # before a worker may be through with it
        # As SGLang spreads them: what goes to the same decode ranks waits in the same queue.
        ports = sum(int(session.rpartition(":")[2]) for session in room.announcements)
        self.transfer_queues[ports % len(self.transfer_queues)].put(chunk)

    @override
    def listed_pages(self, info: MooncakeTransferInfo) -> int:
        listed: int = super().listed_pages(info)
        known = self.decode_kv_args_table.get(info.mooncake_session_id)
        if known is None or not known.enable_hisparse:
            return listed
        page: int = self.kv_args.page_size
        return page_ceil(listed, page) // page  # it lists tokens

    def fail_room(self, chunk: TransferKVChunk, kind: Reason, text: str, *, settled: bool) -> None:
        """Fail the room of a chunk here. Decode ranks of ours are notified why when all has
        settled; where that may take long (not ``settled``), and to stock ones, SGLang's own status
        is sent at once."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        is_known = self.rooms.room(chunk.room) is chunk.owner
        infos = self.rooms.destinations(chunk.room) if is_known else []
        if not self.rooms.fail(chunk.room, kind, text, meant=chunk.owner):
            return  # they were notified that it is complete
        for info in infos:
            if not info.is_dummy and not (settled and info.is_ours):
                self.send_status(info, KVPoll.Failed)

    def send_status(self, info: MooncakeTransferInfo, status: KVPoll) -> None:
        """Notify a decode rank how its room ended, as SGLang does; best effort."""
        try:
            self.sync_status_to_decode_endpoint(
                info.endpoint, info.dst_port, info.room, int(status), self.rank.writer_id
            )
        except (OSError, ValueError) as error:
            logger.warning(
                "could not notify decode rank %s how room %s ended (%s); decode ends it by its "
                "own deadline (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)",
                info.mooncake_session_id,
                info.room,
                error,
            )

    def _fail_overdue(self) -> None:
        """Fail the rooms with a chunk that took too long. What the engine is at is waited for."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        seconds = self.chunk_deadlines.seconds
        limit = f"after {seconds:g} s (SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT)"
        for chunk, peer in self.chunk_deadlines.take_overdue():
            room = chunk.room
            if self.request_status.get(room) in (None, KVPoll.Success, KVPoll.Failed):
                continue
            infos = list(chunk.owner.announcements.values())
            waits_for = ", ".join(info.mooncake_session_id for info in infos if not info.is_dummy)
            what = (
                f"a transfer to decode rank {peer} had not ended"
                if peer is not None
                else f"a chunk for decode rank {waits_for} was still in its queue"
            )
            text = f"room {room}: {what} {limit}"
            self.fail_room(chunk, Reason.TIMEOUT, text, settled=peer is None)

    @override
    def transfer_worker(
        self, queue: FastQueue, executor: Executor, staging_buffer: object = None
    ) -> None:
        worker = ChunkWorker(self, executor)
        while True:
            worker.take(queue.get())

    @override
    def send_kvcache_slice(
        self, mooncake_session_id: str, prefill_kv_indices: Pages, dst_kv_ptrs: list[int],
        dst_kv_indices: Pages, dst_tp_rank: int, dst_attn_tp_size: int, dst_kv_item_len: int,
        executor: SettlingExecutor,
    ) -> int:  # fmt: skip
        """The heads that a decode rank of another tensor parallel size takes from this rank.

        A row for each token: its heads are no neighbours of the next token's, and the engine knows
        no strides. Stock sends replicas of fewer heads than ranks the head of a neighbour.
        """
        ours = self.kv_args
        plan = self._plan_heads(dst_tp_rank, dst_attn_tp_size)
        source_k, source_v, target_k, target_v, layers = self.get_mha_kv_ptrs_with_pp(
            ours.kv_data_ptrs, dst_kv_ptrs
        )
        futures = []
        for sources, targets, first in ((source_k, target_k, 0), (source_v, target_v, layers)):
            item_len = ours.kv_item_lens[first]
            from_, to, length = pages.slice_descriptors(
                [0],
                [0],
                prefill_kv_indices,
                dst_kv_indices,
                page=ours.page_size,
                source_item_len=item_len,
                # Decode tells the length of its keys; values differ as they do here.
                destination_item_len=dst_kv_item_len * item_len // ours.kv_item_lens[0],
                head_bytes=item_len // ours.page_size // ours.kv_head_num,
                plan=plan,
            )
            for source, target in zip(sources, targets, strict=True):
                futures.append(
                    executor.submit(
                        self._send_rows, mooncake_session_id, source, from_, target, to, length
                    )
                )
        try:
            statuses = (int(future.result()) for future in as_completed(futures))
            return next((status for status in statuses if status), 0)
        finally:
            # To a decode rank that is dead each takes its whole timeout, with the queue's other
            # ranks behind it. What has begun goes on: the worker waits for it.
            for future in futures:
                future.cancel()

    def _send_rows(
        self, session: str, source: int, from_: pages.Addresses, target: int, to: pages.Addresses,
        length: int,
    ) -> int:  # fmt: skip
        """Rows of ``length`` bytes of one buffer: ``from_`` and ``to`` count from the addresses
        ``source`` and ``target``. Only here, where they are sent next, are they Python's numbers:
        those of all layers would be hundreds of megabytes."""
        if not len(from_):
            return 0  # a replica sends them
        return self.engine.batch_transfer_sync(
            session,
            (from_ + np.uint64(source)).tolist(),
            (to + np.uint64(target)).tolist(),
            [length] * len(from_),
        )

    def slice_bytes(self, dst_tp_rank: int, dst_attn_tp_size: int) -> int:
        """Bytes of every page that go from this rank to a decode rank of another size."""
        heads_sent = self._plan_heads(dst_tp_rank, dst_attn_tp_size).count
        ours = self.kv_args
        return sum(item_len // ours.kv_head_num * heads_sent for item_len in ours.kv_item_lens)

    def _plan_heads(self, dst_tp_rank: int, dst_attn_tp_size: int) -> pages.HeadSlice:
        ours, size = self.kv_args, self.attn_tp_size
        total = getattr(ours, "total_kv_head_num", 0) or ours.kv_head_num * size
        return pages.plan_heads(
            ours.engine_rank % size, size, dst_tp_rank % dst_attn_tp_size, dst_attn_tp_size, total
        )

    # ---- prefill side: messages to decode ranks, over sockets that never block a worker ----

    @override
    def sync_status_to_decode_endpoint(
        self, remote: str, dst_port: int, room: int, status: int, prefill_rank: int
    ) -> None:
        frames = [str(int(number)).encode("ascii") for number in (room, status, prefill_rank)]
        self.decode_ranks.sockets.send_frames(remote, dst_port, frames)

    @override
    def send_aux_data_to_endpoint(
        self, remote: str, dst_port: int, room: int, buffer_index: int, aux_index: int, data: bytes
    ) -> None:
        numbers = [str(int(number)).encode("ascii") for number in (room, buffer_index, aux_index)]
        frames = [self.AUX_DATA_HEADER, *numbers, len(data).to_bytes(4, "big"), data]
        self.decode_ranks.sockets.send_frames(remote, dst_port, frames)

    # ---- prefill side: transfers that failed ----

    def session_failed(self, info: MooncakeTransferInfo) -> None:
        """A transfer to the decode rank of ``info`` failed: no more until it registers again.

        One of ours registers again as soon as it learns that it is unknown here; of a stock one
        the registration stays, so that its rooms fail at once.
        """
        session = info.mooncake_session_id
        with self.session_lock:
            self.session_failures[session] += 1
            self.failed_sessions.add(session)
            if info.is_ours:
                self.decode_kv_args_table.pop(session, None)
        logger.error("transfers to decode rank %s fail until it registers again", session)

    def session_registered(self, session: str) -> None:
        """The decode rank has registered, again or for the first time, or is gone: no failure of
        its session counts any more."""
        with self.session_lock:
            self.session_failures.pop(session, None)
            self.failed_sessions.discard(session)

    def has_failed_session(self, session: str) -> bool:
        """Whether a transfer to the decode rank failed since it registered."""
        with self.session_lock:
            return session in self.failed_sessions

    def leave_later(self, room: int) -> None:
        """A transfer of ``room`` failed, and others of its batch may still write: how long is not
        known, so decode's pages stay held for as long as it would wait without an answer. The
        request goes: decode is never told that the room is complete."""
        self.rooms.room_overdue(room)
        self._unsettled.append((time.monotonic() + environment.QUARANTINE_TIMEOUT.read(), room))

    def _leave_due(self) -> None:
        """Leave the rooms whose failed transfers were waited for."""
        now = time.monotonic()
        due = [entry for entry in list(self._unsettled) if entry[0] <= now]
        for entry in due:
            self._unsettled.remove(entry)
            self.rooms.leave(entry[1])

    # ---- decode side ----

    @override
    def start_decode_thread(self) -> None:
        if self.servers is None:
            super().start_decode_thread()
            return
        self._progress: dict[int, RoomProgress] = {}
        self.start_reader(MooncakeStatuses(self).take)
        self.servers.start_heartbeat(self.heartbeat_interval, self.max_failures)

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

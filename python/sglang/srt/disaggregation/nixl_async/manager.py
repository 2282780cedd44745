"""The thin override of SGLang's NIXL manager: full prefix hits, failure notices, counted bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from sglang.srt.disaggregation.delta.events import Sent, event_log, now
from sglang.srt.disaggregation.delta.stats import STATS
from sglang.srt.disaggregation.nixl_async import notifications
from sglang.srt.disaggregation.nixl_async.announcements import AnnouncementReader, FailedRooms
from sglang.srt.disaggregation.nixl_async.watch import RoomWatch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager
else:
    NixlKVManager = object

logger = logging.getLogger(__name__)

#: Page indices into a pool, 1-D int32.
Pages = npt.NDArray[np.int32]


class DeltaNixlManager(NixlKVManager):
    """Posts what the plan left over, and says so where that is nothing."""

    @override
    def _start_bootstrap_thread(self) -> None:
        reader = AnnouncementReader(self)

        def read_announcements() -> None:
            while True:
                reader.handle(self.server_socket.recv_multipart())

        threading.Thread(target=read_announcements, name="nixl-announcements", daemon=True).start()

    @override
    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Pages, index_slice: slice, is_last: bool,
        chunk_id: int, aux_index: int | None = None, state_indices: list[int] | None = None,
    ) -> list[Any]:  # fmt: skip
        handles = super().add_transfer_request(
            bootstrap_room, kv_indices, index_slice, is_last, chunk_id, aux_index, state_indices
        )
        return [handle for handle in handles if handle is not None]

    @override
    def send_kvcache(
        self, peer_name: str, prefill_kv_indices: Pages, dst_kv_ptrs: list[int],
        dst_kv_indices: Pages, dst_gpu_id: int, notif: str,
    ) -> Any:  # fmt: skip
        if len(prefill_kv_indices) == 0:
            return self._notify_no_kv(peer_name, notif)
        handle = super().send_kvcache(
            peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_gpu_id, notif
        )
        self._count_sent(peer_name, notif, prefill_kv_indices, dst_kv_indices, 1.0)
        return handle

    @override
    def send_kvcache_slice(
        self, peer_name: str, prefill_kv_indices: Pages, dst_kv_ptrs: list[int],
        dst_kv_indices: Pages, dst_gpu_id: int, notif: str, prefill_tp_size: int,
        decode_tp_size: int, decode_tp_rank: int, dst_kv_item_len: int,
    ) -> Any:  # fmt: skip
        if len(prefill_kv_indices) == 0:
            return self._notify_no_kv(peer_name, notif)
        handle = super().send_kvcache_slice(
            peer_name,
            prefill_kv_indices,
            dst_kv_ptrs,
            dst_kv_indices,
            dst_gpu_id,
            notif,
            prefill_tp_size=prefill_tp_size,
            decode_tp_size=decode_tp_size,
            decode_tp_rank=decode_tp_rank,
            dst_kv_item_len=dst_kv_item_len,
        )
        # A decode rank with fewer heads than this rank takes only its slice of every page.
        share = min(1.0, dst_kv_item_len / self.kv_args.kv_item_lens[0])
        self._count_sent(peer_name, notif, prefill_kv_indices, dst_kv_indices, share)
        return handle

    def _notify_no_kv(self, peer_name: str, notif: str) -> None:
        """Complete the KV part of a full prefix hit: NIXL refuses a transfer of no descriptors, and
        the receiver waits for each writer's last chunk, so the notification is sent on its own."""
        self.agent.send_notif(peer_name, notif.encode("ascii"))

    def _count_sent(
        self,
        peer_name: str,
        notif: str,
        source: Pages,
        destination: Pages,
        share: float,
    ) -> None:
        moved = int(len(source) * sum(self.kv_args.kv_item_lens) * share)
        STATS.add("kv_transfer_sent_bytes", moved)
        log = event_log("prefill")
        if log is not None:
            log.write(
                Sent(
                    at=now(),
                    room=notifications.parse(notif.encode()).room,
                    peer=peer_name,
                    source_pages=source.tolist(),
                    destination_pages=destination.tolist(),
                    bytes=moved,
                )
            )

    # ---- failed rooms, prefill side ----

    @cached_property
    def failed_rooms(self) -> FailedRooms:
        """Rooms that failed here, for announcements that arrive after that."""
        return FailedRooms()

    def notify_failure(
        self, bootstrap_room: int, reason: str, announcements: Iterable[Any]
    ) -> None:
        """Tell the decode ranks of a room that it failed and that nothing more is written.

        Only to peers that sent a delta frame, readable or not: a stock one would not know the text.
        Best effort: a peer that cannot be told finds out by its own deadline. Decode ranks whose
        announcement is still on its way are told when it arrives.
        """
        late = self.transfer_infos.pop(bootstrap_room, {})
        self.failed_rooms.add(bootstrap_room, reason)
        known = {info.agent_name: info for info in (*announcements, *late.values())}
        for info in known.values():
            sent_frame = info.delta is not None or info.delta_error is not None
            if not sent_frame or info.agent_name not in self.decode_kv_args_table:
                continue
            try:
                self.agent.send_notif(
                    info.agent_name, notifications.failure_text(bootstrap_room, reason)
                )
            except Exception as error:  # the binding raises bare exceptions of several kinds
                logger.warning(
                    "could not tell decode rank %s that room %s failed: %s",
                    info.agent_name,
                    bootstrap_room,
                    error,
                )

    # ---- rooms that ended early, decode side ----

    @cached_property
    def watched_rooms(self) -> dict[int, RoomWatch]:
        """Rooms whose pages are held because prefill may still write to them."""
        return {}

    @cached_property
    def refused_rooms(self) -> set[int]:
        """Rooms that prefill said it failed, and writes to no more."""
        return set()

    def watch(self, bootstrap_room: int) -> RoomWatch | None:
        """Keep following the notifications of a room that is given up; None if it is quiet."""
        if bootstrap_room in self.refused_rooms:
            return None
        status = self.transfer_statuses.pop(bootstrap_room, None) or _new_status()
        status.is_failure = False  # from here on only what arrives counts, not why it was given up
        if status.is_done():
            return None
        num_writers = self.required_prefill_response_num_table.get(bootstrap_room, 1)
        watch = RoomWatch(self, bootstrap_room, status, num_writers)
        self.watched_rooms[bootstrap_room] = watch
        return watch

    @override
    def update_transfer_status(self) -> None:
        for peer_name, messages in self.agent.get_new_notifs().items():
            for raw in messages:
                try:
                    note = notifications.parse(raw)
                except ValueError as error:
                    logger.warning("from NIXL peer %s: %s", peer_name, error)
                    continue
                watch = self.watched_rooms.get(note.room)
                if watch is not None:
                    watch.take(note)
                    continue
                if note.room not in self.request_status:
                    # The room was aborted and cleared; recording it would leave an entry behind.
                    logger.debug("late %s notification of room %s", note.kind, note.room)
                    continue
                if note.kind == "fail":
                    self.refused_rooms.add(note.room)
                    self.record_failure(note.room, f"prefill reported: {note.reason}")
                num_writers = self.required_prefill_response_num_table.get(note.room, 1)
                notifications.apply(self.transfer_statuses[note.room], note, num_writers)


def _new_status() -> Any:
    from sglang.srt.disaggregation.nixl.conn import TransferStatus

    return TransferStatus()

"""The thin override of SGLang's NIXL manager: full prefix hits, head slices, counted bytes."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from sglang.srt.disaggregation.delta import heads
from sglang.srt.disaggregation.delta.accounting import Pages, count_sent
from sglang.srt.disaggregation.delta.complaints import Complaints
from sglang.srt.disaggregation.delta.reader import BadMessage, MessageReader
from sglang.srt.disaggregation.nixl_async import notifications
from sglang.srt.disaggregation.nixl_async.announcements import NixlAnnouncements

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager
else:
    NixlKVManager = object

logger = logging.getLogger(__name__)


class DeltaNixlManager(NixlKVManager):
    """Posts what the plan left over, and says so where that is nothing."""

    moves_deltas = True

    # ---- prefill side: sending ----

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
        notif = notifications.from_writer(notif, self.writer_id)
        if len(prefill_kv_indices) == 0:
            return self._notify_no_kv(peer_name, notif)
        ours = self.kv_args
        if not self.is_mla_backend and len(set(ours.kv_item_lens)) > 1:
            # Stock cuts values by the length of keys.
            whole = heads.HeadSlice(0, 0, ours.kv_head_num)
            return self._send_heads(
                peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_gpu_id, notif,
                ours.kv_item_lens[0], whole,
            )  # fmt: skip
        handle = super().send_kvcache(
            peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_gpu_id, notif
        )
        moved = len(prefill_kv_indices) * sum(ours.kv_item_lens)
        room = notifications.parse(notif.encode()).room
        count_sent(room, peer_name, prefill_kv_indices, dst_kv_indices, moved)
        return handle

    @override
    def send_kvcache_slice(
        self, peer_name: str, prefill_kv_indices: Pages, dst_kv_ptrs: list[int],
        dst_kv_indices: Pages, dst_gpu_id: int, notif: str, prefill_tp_size: int,
        decode_tp_size: int, decode_tp_rank: int, dst_kv_item_len: int,
    ) -> Any:  # fmt: skip
        """The heads that a decode rank of another tensor parallel size takes from this rank.

        Stock divides by zero where there are fewer KV heads than ranks.
        """
        notif = notifications.from_writer(notif, self.writer_id)
        ours = self.kv_args
        total = getattr(ours, "total_kv_head_num", 0) or ours.kv_head_num * prefill_tp_size
        plan = heads.plan_heads(
            ours.engine_rank % prefill_tp_size,
            prefill_tp_size,
            decode_tp_rank % decode_tp_size,
            decode_tp_size,
            total,
        )
        if len(prefill_kv_indices) == 0 or plan.count == 0:
            return self._notify_no_kv(peer_name, notif)
        return self._send_heads(
            peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_gpu_id, notif,
            dst_kv_item_len, plan,
        )  # fmt: skip

    def _send_heads(
        self, peer_name: str, source_pages: Pages, dst_kv_ptrs: list[int], target_pages: Pages,
        gpu_id: int, notif: str, dst_kv_item_len: int, plan: heads.HeadSlice,
    ) -> Any:  # fmt: skip
        ours = self.kv_args
        source_k, source_v, target_k, target_v, layers = self.get_mha_kv_ptrs_with_pp(
            ours.kv_data_ptrs, dst_kv_ptrs
        )
        runs = []
        for sources, targets, first in ((source_k, target_k, 0), (source_v, target_v, layers)):
            item_len = ours.kv_item_lens[first]
            from_, to, length = heads.slice_descriptors(
                sources[:layers],
                targets[:layers],
                source_pages,
                target_pages,
                page=ours.page_size,
                source_item_len=item_len,
                # Decode tells the length of its keys; values differ as they do here.
                destination_item_len=dst_kv_item_len * item_len // ours.kv_item_lens[0],
                head_bytes=item_len // ours.page_size // ours.kv_head_num,
                plan=plan,
            )
            runs.append((from_, to, np.full_like(from_, length)))
        from_, to, lengths = (np.concatenate(column) for column in zip(*runs, strict=True))
        handle = self._post(from_, to, lengths, gpu_id, peer_name, notif)
        room = notifications.parse(notif.encode()).room
        count_sent(room, peer_name, source_pages, target_pages, int(lengths.sum()))
        return handle

    @override
    def send_aux(
        self, peer_name: str, prefill_aux_index: int, dst_aux_ptrs: list[int], dst_aux_index: int,
        notif: str,
    ) -> Any:  # fmt: skip
        notif = notifications.from_writer(notif, self.writer_id)
        return super().send_aux(peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index, notif)

    @override
    def maybe_send_extra(
        self, peer_name: str, prefill_state_indices: list[int], dst_state_data_ptrs: list[int],
        dst_state_indices: list[int], dst_gpu_id: int, notif: str, decode_tp_size: int,
    ) -> Any:  # fmt: skip
        notif = notifications.from_writer(notif, self.writer_id)
        return super().maybe_send_extra(
            peer_name, prefill_state_indices, dst_state_data_ptrs, dst_state_indices, dst_gpu_id,
            notif, decode_tp_size,
        )  # fmt: skip

    def _post(
        self,
        sources: heads.Addresses,
        targets: heads.Addresses,
        lengths: heads.Addresses,
        gpu_id: int,
        peer_name: str,
        notif: str,
    ) -> Any:
        """Write runs of ``lengths`` bytes from our ``sources`` to ``targets`` of a peer."""

        def descriptors(addresses: heads.Addresses, device: int) -> Any:
            columns = (addresses, lengths, np.full_like(addresses, device))
            return self.agent.get_xfer_descs(np.column_stack(columns), "VRAM")

        handle = self.agent.initialize_xfer(
            "WRITE",
            descriptors(sources, self.kv_args.gpu_id),
            descriptors(targets, gpu_id),
            peer_name,
            notif.encode("ascii"),
        )
        if not handle or self.agent.transfer(handle) == "ERR":
            raise RuntimeError(f"NIXL refused a transfer of {len(sources)} runs to {peer_name}")
        return handle

    def _notify_no_kv(self, peer_name: str, notif: str) -> None:
        """Complete the KV part where there is none: NIXL refuses a transfer of no descriptors, and
        the receiver waits for each writer's last chunk, so the notification is sent on its own."""
        self.agent.send_notif(peer_name, notif.encode("ascii"))

    # ---- prefill side: transfers that outlive their request ----

    def bury(self, room: int, handles: list[Any]) -> bool:
        """Keep what did not settle of a room that ended, until it has; whether there is any."""
        under_way = [handle for handle in handles if self._under_way(handle)]
        if under_way:
            logger.error(
                "room %s: %d posted transfers did not settle; decode's pages stay held until they "
                "do, or for its SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
                room,
                len(under_way),
            )
            self._graveyard.append((room, under_way))
        return bool(under_way)

    def settle(self) -> None:
        """See which buried transfers have settled; called by the scheduler in every step."""
        still = []
        for room, handles in self._graveyard:
            under_way = [handle for handle in handles if self._under_way(handle)]
            if under_way:
                still.append((room, under_way))
            elif self.rooms is not None:
                self.rooms.gate.leave(room)
        self._graveyard[:] = still

    def state_of(self, handle: Any) -> str:
        """What became of a posted transfer: PROC, DONE or ERR.

        NIXL raises where the peer is gone, which ends the transfer as any other error does.
        """
        try:
            return str(self.agent.check_xfer_state(handle))
        except Exception as error:  # the binding raises bare exceptions of several kinds
            logger.warning("a posted transfer broke: %r", error)
            return "ERR"

    def _under_way(self, handle: Any) -> bool:
        return self.state_of(handle) not in ("DONE", "ERR")

    @property
    def _graveyard(self) -> list[tuple[int, list[Any]]]:
        graveyard: list[tuple[int, list[Any]]] = self.__dict__.setdefault("_buried", [])
        return graveyard

    # ---- prefill side: messages from decode ranks ----

    @override
    def _start_bootstrap_thread(self) -> None:
        assert self.rooms is not None
        reader = MessageReader(self.rooms.take, NixlAnnouncements(self).take)
        threading.Thread(
            target=reader.serve,
            args=(self.server_socket, self._tick),
            name="pd-reader",
            daemon=True,
        ).start()

    def _tick(self) -> None:
        assert self.rooms is not None
        for peer in self.rooms.tick():
            logger.warning("decode rank %s gives no sign any more; it is forgotten", peer)
            self.decode_kv_args_table.pop(peer, None)
            try:
                self.agent.remove_remote_agent(peer)
            except Exception as error:  # the others are to be forgotten all the same
                logger.warning("NIXL could not forget decode rank %s: %r", peer, error)

    # ---- decode side ----

    @override
    def _start_heartbeat_checker_thread(self) -> None:
        if self.servers is None:
            super()._start_heartbeat_checker_thread()
            return
        reader = MessageReader(self.servers.take, _refuse)
        threading.Thread(
            target=reader.serve,
            args=(self.server_socket, lambda: None),
            name="pd-reader",
            daemon=True,
        ).start()
        self.servers.start_heartbeat()

    @property
    @override
    def peer_name(self) -> str:
        return str(self.agent.name)

    @override
    def progress(self, room: int) -> Any:
        return self.transfer_statuses[room]

    @override
    def take_progress(self, room: int) -> Any:
        from sglang.srt.disaggregation.nixl.conn import TransferStatus

        return self.transfer_statuses.pop(room, None) or TransferStatus()

    @override
    def collect_arrivals(self) -> None:
        self.update_transfer_status()

    @override
    def update_transfer_status(self) -> None:
        watches = self.servers.watches if self.servers is not None else {}
        for peer_name, messages in self.agent.get_new_notifs().items():
            for raw in messages:
                try:
                    note = notifications.parse(raw)
                except ValueError as error:
                    self._complaints.about(f"NIXL peer {peer_name}", error)
                    continue
                watch = watches.get(note.room)
                if watch is None and note.room not in self.request_status:
                    # The room was aborted and cleared; recording it would leave an entry behind.
                    logger.debug("late %s notification of room %s", note.kind, note.room)
                    continue
                status: Any = watch.progress if watch else self.transfer_statuses[note.room]
                writers = self.required_prefill_response_num_table.get(note.room, 1)
                status.take(note, watch.writers if watch else writers)

    @property
    def _complaints(self) -> Complaints:
        made: Complaints = self.__dict__.setdefault("_complaints_", Complaints(logger))
        return made


def _refuse(frames: list[bytes]) -> None:
    raise BadMessage("it is not a control message of a prefill server's")

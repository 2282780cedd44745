"""The thin override of SGLang's NIXL manager.

Prefill: chunks are queued for transfer workers, and decode ranks' messages are checked before NIXL
is told of them. Decode: reads NIXL's notifications, which say what has arrived, writer by writer.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import time
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.disaggregation.delta import config, wire
from sglang.srt.disaggregation.delta.logs import RateLimitedLog
from sglang.srt.disaggregation.delta.metrics import AsyncTransferStats, Reason
from sglang.srt.disaggregation.delta.nixl import agent, descriptors
from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend
from sglang.srt.disaggregation.delta.nixl.layout import (
    Layout,
    Registration,
    cut_chunk,
    metadata_in_host_memory,
)
from sglang.srt.disaggregation.delta.nixl.peers import Peers
from sglang.srt.disaggregation.delta.pages import DeltaMismatch, Pages
from sglang.srt.disaggregation.delta.peer_messages import (
    Announcements,
    BadMessage,
    check_registration,
    metadata_fit,
)
from sglang.srt.disaggregation.delta.prefill.room_table import Room
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk
from sglang.srt.disaggregation.delta.prefill.transfer_pool import TransferPool, Watchdog
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.nixl.endpoints import (
        DeltaTransferStatus,
        NixlTransferInfo,
    )
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager
else:
    NixlKVManager = object

_REGISTRATION_FRAMES = 12


class NixlAnnouncements(Announcements):
    """SGLang's NIXL messages begin with a guard; NIXL itself is told of a rank that registers."""

    def take(self, frames: list[bytes]) -> None:
        """Take one message of a decode rank; raises as ``take_message`` does."""
        from sglang.srt.disaggregation.nixl import conn

        if not frames or frames[0] != conn.GUARD:
            raise BadMessage("it does not start like a NIXL message of SGLang's")
        self.take_message(conn, frames[1:], _REGISTRATION_FRAMES)

    @override
    def _register(self, info: Registration) -> None:
        check_registration(
            self._manager,
            kv_buffers=len(info.dst_kv_ptrs),
            state_buffers=len(info.dst_state_data_ptrs),
            aux_buffers=len(info.dst_aux_ptrs),
            tp_size=info.decode_tp_size,
            tp_rank=info.decode_tp_rank,
            item_len=info.dst_kv_item_len,
        )
        self._manager.peers.add(info)

    @override
    def _peer(self, info: NixlTransferInfo) -> str:
        return str(info.agent_name)

    @override
    def _announce(self, info: NixlTransferInfo) -> None:
        manager = self._manager
        registered = manager.decode_kv_args_table.get(info.agent_name)
        if registered is not None and info.later_prefix_len and not len(info.dst_kv_indices):
            # A full hit looks the same there. Of latent KV the first rank of a group sends all.
            group = max(manager.attn_tp_size // registered.decode_tp_size, 1)
            info.is_left_out = manager.is_mla_backend and manager.attn_tp_rank % group != 0
        super()._announce(info)


#: A process that ends waits so long for what is under way.
_DRAIN_S = 1.0


class DeltaNixlManager(NixlKVManager):
    """Prefill: queues what the plan left over. Decode: reads what has arrived, writer by writer."""

    moves_deltas = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:  # fmt: skip
        from sglang.srt.disaggregation.utils import DisaggregationMode

        sends = disaggregation_mode == DisaggregationMode.PREFILL
        with agent.configured_agents(config.from_environment().workers if sends else 0):
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)

    # ---- prefill side: sending ----

    def start_transfers(self) -> None:
        """Start the transfer workers of this prefill rank.

        Raises:
            ValueError: a variable is set to something that cannot be; the message names it.
        """
        assert self.rooms is not None
        #: Seconds that a chunk may take, from the queue to its end.
        self.transfer_s = environment.TRANSFER_TIMEOUT.read()
        self.transfer_stats = AsyncTransferStats(environment.TRANSFER_LOG_INTERVAL.read())
        backend = NixlBackend(
            self.agent,
            self.peers,
            Layout(self),
            self.transfer_stats,
            writer=self.writer_id,
            costs=descriptors.Costs(*environment.DESCRIPTOR_COSTS.read()),
        )
        self.transfers = TransferPool(
            backend,
            self.rooms,
            config.from_environment(),
            self.transfer_stats,
            prepare_thread=self._prepare_thread,
        )
        self.watchdog = Watchdog(self.transfers, self.rooms)
        self.transfers.start()
        atexit.register(self.transfers.stop, _DRAIN_S)

    @override
    def room_stopped(self, room: int, kind: Reason, life: Room | None) -> None:
        self.transfers.cancel(room, kind, life)

    def _prepare_thread(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(self.kv_args.gpu_id)

    @cached_property
    def peers(self) -> Peers:
        """The decode ranks that this prefill rank knows."""
        return Peers(self.agent, self.decode_kv_args_table)

    @override
    def _add_remote_peer(self, decode_kv_args: Registration) -> None:
        self.peers.add(decode_kv_args)

    @override
    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Pages, index_slice: slice, is_last: bool,
        chunk_id: int, aux_index: int | None = None, state_indices: Sequence[int] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Queue one chunk. Nothing is handed out: what becomes of it is in the room table.

        Raises:
            DeltaMismatch: a decode rank listed another number of pages for it, or none is known:
                the reader's thread drops a room's announcements when the room is given up.
        """
        announcements = list(self.transfer_infos.get(bootstrap_room, {}).values())
        if not announcements:
            raise DeltaMismatch(f"room {bootstrap_room}: no decode rank's pages are known for it")
        payload = cut_chunk(
            bootstrap_room, announcements, kv_indices, index_slice, chunk_id, aux_index,
            state_indices,
        )  # fmt: skip
        now = time.monotonic()
        self.transfers.submit(
            Chunk(
                room=bootstrap_room,
                peers=tuple(payload.destinations),
                payload=payload,
                is_last=is_last,
                deadline=now + self.transfer_s,
                enqueued_at=now,
            )
        )
        if is_last:
            self.transfer_infos.pop(bootstrap_room, None)
        return []

    # ---- prefill side: messages from decode ranks ----

    @override
    def _start_bootstrap_thread(self) -> None:
        self.start_transfers()
        self.start_reader(NixlAnnouncements(self).take, self._tick)

    def _tick(self) -> None:
        self.transfer_stats.tick()
        self.watchdog.tick()
        self.forget_silent_peers()

    @override
    def forget_peer(self, peer: str) -> None:
        self.peers.forget(peer)

    # ---- decode side ----

    @override
    def _start_heartbeat_checker_thread(self) -> None:
        if self.servers is None:
            super()._start_heartbeat_checker_thread()
            return
        self.start_reader(_refuse)
        self.servers.start_heartbeat()

    @property
    @override
    def peer_name(self) -> str:
        return str(self.agent.name)

    @override
    def progress(self, room: int) -> DeltaTransferStatus:
        status: DeltaTransferStatus = self.transfer_statuses[room]
        return status

    @override
    def take_progress(self, room: int) -> DeltaTransferStatus:
        from sglang.srt.disaggregation.nixl.conn import TransferStatus

        status: DeltaTransferStatus = self.transfer_statuses.pop(room, None) or TransferStatus()
        return status

    @override
    def expect_metadata(self, room: int, slot: int) -> bool:
        if not metadata_in_host_memory():
            return False
        self.transfer_statuses[room].metadata_slot = slot
        return True

    @override
    def collect_arrivals(self) -> None:
        self.update_transfer_status()

    def collect_arrivals_once(self, asker: int) -> None:
        """``collect_arrivals``, once for all rooms that ask in turn, again and again: when one asks
        a second time, a new turn has begun."""
        if asker in self._asked:
            self._asked.clear()
        if not self._asked:
            self.update_transfer_status()
        self._asked.add(asker)

    @override
    def forget_status(self, room: int) -> None:
        super().forget_status(room)
        self._asked.discard(room)

    @cached_property
    def _asked(self) -> set[int]:
        """Rooms that asked in this turn."""
        return set()

    @override
    def update_transfer_status(self) -> None:
        try:
            arrived = self.agent.get_new_notifs()
        except Exception as error:
            # The scheduler polls: it must go on.
            self._log.error(
                "this agent",
                "could not read NIXL notifications: %r; tried again in the next step, and rooms "
                "that miss one fail by their deadline (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)",
                error,
            )
            return
        for peer_name, messages in arrived.items():
            for raw in messages:
                try:
                    note = wire.parse(raw)
                except ValueError as error:
                    self._log.error(
                        peer_name, "dropped a message from NIXL peer %s: %s", peer_name, error
                    )
                    continue
                deferred = self.servers.deferred(note.room) if self.servers is not None else None
                if deferred is None and note.room not in self.request_status:
                    # The room was aborted and cleared; recording it would leave an entry behind.
                    logger.debug("late %s notification of room %s", note.kind, note.room)
                    continue
                status: Any = deferred.progress if deferred else self.progress(note.room)
                if note.kind == "done" and not (deferred or self._store_metadata(status, note)):
                    status.stop(note.writer)
                    continue
                writers = self.required_prefill_response_num_table.get(note.room, 1)
                status.take(note, deferred.writers if deferred else writers)

    def _store_metadata(self, status: DeltaTransferStatus, note: wire.Notification) -> bool:
        """Write the metadata of a note into the room's slot; once for each writer, for a room that
        is complete has no slot any more. Fails the room, and says False, where they do not fit."""
        ours, slot = self.kv_args, status.metadata_slot
        if slot is None or note.writer in status.done_writers:
            return slot is not None
        lengths = [len(part) for part in note.metadata]
        wanted = list(ours.aux_item_lens)
        if len(lengths) != len(wanted) or not all(map(metadata_fit, count(), lengths, wanted)):
            assert self.servers is not None  # without it no room has a slot here
            self.servers.fail(
                note.room,
                Reason.MISMATCH,
                f"room {note.room}: prefill sent metadata of {lengths} bytes, and this decode rank "
                f"has {wanted}: model or SGLang's version differ",
            )
            return False
        for base, size, part in zip(ours.aux_data_ptrs, wanted, note.metadata, strict=True):
            ctypes.memmove(base + slot * size, part, len(part))
        return True

    @cached_property
    def _log(self) -> RateLimitedLog:
        return RateLimitedLog(logger)


def _refuse(frames: list[bytes]) -> None:
    raise BadMessage("it is not a control message of a prefill server's")

"""SGLang's NIXL manager. On decode it reads what has arrived, by writer, from NIXL's notifications.

Contract: notifications are read on decode's scheduler thread, in the step that polls receivers. On
prefill the backend is made and used by the transfer workers, and decode ranks are added and
forgotten by the reader thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode.deferred import Progress
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl import agent
from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend
from sglang.srt.disaggregation.delta.nixl.conn import NixlAnnouncements, NixlPeers, cut_chunk
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.observability import RateLimitedLog
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferSettings

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager, TransferStatus
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.server_args import ServerArgs
else:
    NixlKVManager = TransferStatus = object

logger = logging.getLogger(__name__)


#: Maximum number of metadata buffers in a notification, to bound the length of a message.
_MAX_PARTS = 64
_METADATA: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])


class Notification(msgspec.Struct, frozen=True):
    """A parsed notification; ``writer`` is None in a stock prefill's ``aux``."""

    room: int
    kind: str
    chunk: int = 0
    is_last: bool = False
    writer: int | None = None
    #: With ``done``: the contents of the room's metadata slot, by buffer.
    metadata: tuple[bytes, ...] = ()


def parse(raw: bytes) -> Notification:
    """Parse one notification.

    Raises:
        ValueError: the notification has none of the known forms.
    """
    head, mark, rest = raw.partition(b"_done_")
    if mark:
        number, _, content = rest.partition(b"_")
        done_room, writer = int(head.decode("ascii")), int(number.decode("ascii"))
        if min(done_room, writer) < 0:
            raise ValueError("negative numbers in a NIXL notification")
        if len(content) > wire.MAX_METADATA + 8 * _MAX_PARTS:
            raise ValueError(f"{len(content)} bytes of metadata in a NIXL notification")
        try:
            metadata = tuple(_METADATA.decode(content))
        except msgspec.DecodeError as error:
            raise ValueError(f"unreadable metadata in a NIXL notification: {error}") from error
        return Notification(done_room, "done", writer=writer, metadata=metadata)
    text = raw.decode("ascii")
    room, kind, *numbers = text.split("_")
    fields = [int(number) for number in numbers]
    if min([int(room), *fields]) < 0:
        raise ValueError(f"negative numbers in NIXL notification {text[:80]!r}")
    if kind == "kv" and 2 <= len(fields) <= 3 and fields[1] <= 1:
        writer = fields[2] if len(fields) == 3 else 0
        return Notification(int(room), kind, fields[0], bool(fields[1]), writer)
    if kind == "aux" and len(fields) <= 1:
        return Notification(int(room), kind, writer=fields[0] if fields else None)
    if kind == "state" and len(fields) <= 1:
        return Notification(int(room), kind, writer=fields[0] if fields else 0)
    raise ValueError(f"unknown NIXL notification {text[:80]!r}")


@dataclasses.dataclass
class DeltaTransferStatus(Progress, TransferStatus):
    """SGLang's record of a room, keyed by writer where SGLang keys by pipeline stage."""

    #: Writers with metadata here. (A stock prefill does not name the writer.)
    aux_writers: set[int] = dataclasses.field(default_factory=set)

    def take(self, note: Notification, num_writers: int) -> None:
        """Record one notification. Idempotent.

        ``num_writers`` is the number of prefill ranks that write for the room.
        """
        if note.writer is None:
            self.received_aux = True
        elif note.kind == "aux":
            self.aux_writers.add(note.writer)
        elif note.kind == "done":
            self.done_writers.add(note.writer)
            self.num_pp_ranks_expected = num_writers
        elif note.kind == "state":
            self.received_state_per_pp.add(note.writer)
        else:
            self.received_kvs_per_pp[note.writer].add(note.chunk)
            if note.is_last:
                self.expected_kvs_per_pp[note.writer] = note.chunk + 1
                self.num_pp_ranks_expected = num_writers
        self.done_writers |= {
            writer
            for writer, chunks in self.expected_kvs_per_pp.items()
            if len(self.received_kvs_per_pp[writer]) == chunks
            and (self.received_aux or writer in self.aux_writers)
            and (not self.expects_state or writer in self.received_state_per_pp)
        }

    @override
    def is_done(self) -> bool:
        # Unlike SGLang's, a failed room is not done: the heartbeat marks the failure here before
        # the room's status has it, and a step in between must see neither.
        expected = self.num_pp_ranks_expected
        return expected is not None and len(self.done_writers) >= expected


class DeltaNixlManager(NixlKVManager):
    """SGLang's NIXL manager, of which a server uses one half. Configures the agent for the threads
    that use it."""

    moves_deltas = True

    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:  # fmt: skip
        from sglang.srt.disaggregation.utils import DisaggregationMode

        sends = disaggregation_mode == DisaggregationMode.PREFILL
        with agent.configured_agents(TransferSettings.read().queues if sends else 0):
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)

    # ---- prefill's half ----

    @override
    def make_backend(self, settings: TransferSettings) -> NixlBackend:
        return NixlBackend(
            self.agent,
            self.peers,
            Layout(self.rank, self.get_mla_kv_ptrs_with_pp, self.get_mha_kv_ptrs_with_pp),
            writer=self.rank.writer_id,
        )

    @cached_property
    def peers(self) -> NixlPeers:
        """The decode ranks that this prefill rank knows."""
        return NixlPeers(self.agent, self.decode_kv_args_table)

    cut = staticmethod(cut_chunk)

    @override
    def _start_bootstrap_thread(self) -> None:
        self.start_prefill()

    @override
    def announcements(self) -> NixlAnnouncements:
        """Return what takes registrations and announcements."""
        return NixlAnnouncements(
            self.rank,
            self.rooms,
            self.decode_ranks,
            self.decode_kv_args_table,
            self.peers.add,
        )

    @override
    def forget_peer(self, peer: str) -> None:
        self.peers.forget(peer)

    # ---- decode's half: what has arrived, by writer ----

    @override
    def _start_heartbeat_checker_thread(self) -> None:
        if self.servers is None:
            super()._start_heartbeat_checker_thread()
        else:
            self.start_decode()

    @property
    def peer_name(self) -> str:
        return str(self.agent.name)

    @override
    def expect_metadata(self, room: int, slot: int) -> bool:
        if not wire.metadata_in_host_memory():
            return False
        self.transfer_statuses[room].metadata_slot = slot
        return True

    @override
    def collect_arrivals(self, asker: int) -> None:
        """Read notifications once for all rooms of a step. A room that asks again begins a new
        step."""
        if asker in self._asked:
            self._asked.clear()
        if not self._asked:
            self.update_transfer_status()
        self._asked.add(asker)
        if self.check_transfer_done(asker):
            self.statuses.advance(asker, KVPoll.Success)

    @cached_property
    def _asked(self) -> set[int]:
        """Rooms that asked in this step."""
        return set()

    @override
    def update_transfer_status(self) -> None:
        try:
            arrived = self.agent.get_new_notifs()
        except Exception as error:
            # Only log, because the scheduler's thread polls and must go on.
            self._log.error(
                "this agent",
                "could not read NIXL notifications: %r; the next step reads again, and rooms that "
                "miss one fail by their deadline (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)",
                error,
            )
            return
        for peer_name, messages in arrived.items():
            for raw in messages:
                try:
                    note = parse(raw)
                except ValueError as error:
                    self._log.error(
                        peer_name, "dropped a message from NIXL peer %s: %s", peer_name, error
                    )
                    continue
                known = note.room in self.transfer_statuses or note.room in self.request_status
                if not known:
                    # Drop it: the room was aborted and cleared, and an entry would stay for ever.
                    logger.debug("late %s notification of room %s", note.kind, note.room)
                    continue
                status = self.transfer_statuses[note.room]
                is_taken = note.kind != "done" or status.is_deferred
                if not (is_taken or self._store_metadata(status, note)):
                    status.stopped_writers.add(note.writer)
                    continue
                status.take(note, self.required_prefill_response_num_table.get(note.room, 1))

    def _store_metadata(self, status: DeltaTransferStatus, note: Notification) -> bool:
        """Write the metadata of a note into the room's slot. Return False without a slot, or if the
        lengths do not fit, which fails the room. Only once for each writer, because a complete room
        has no slot any more."""
        ours, slot = self.kv_args, status.metadata_slot
        if slot is None or note.writer in status.done_writers:
            return slot is not None
        lengths = [len(part) for part in note.metadata]
        wanted = list(ours.aux_item_lens)
        if len(lengths) != len(wanted) or not all(map(wire.metadata_fit, count(), lengths, wanted)):
            self.servers.fail(
                note.room,
                Reason.MISMATCH,
                f"room {note.room}: prefill sent metadata of {lengths} bytes, and this decode "
                f"rank expects {wanted}: the models or SGLang versions differ",
            )
            return False
        for base, size, part in zip(ours.aux_data_ptrs, wanted, note.metadata, strict=True):
            ctypes.memmove(base + slot * size, part, len(part))
        return True

    @cached_property
    def _log(self) -> RateLimitedLog:
        return RateLimitedLog(logger)

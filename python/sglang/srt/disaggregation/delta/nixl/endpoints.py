"""The thin overrides of SGLang's NIXL transfer info, transfer status, sender and receiver."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.event_log import log_arrived
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.pages import DeltaMismatch
from sglang.srt.disaggregation.delta.peer_messages import DeltaTransferInfo
from sglang.srt.disaggregation.delta.wire import Notification

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.nixl.manager import DeltaNixlManager
    from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, NixlKVSender, TransferStatus
else:
    NixlKVReceiver = NixlKVSender = TransferStatus = object


@dataclasses.dataclass
class DeltaTransferStatus(TransferStatus):
    """SGLang's record of a room, keyed by writer where SGLang keys by pipeline stage."""

    #: Writers whose metadata has arrived. (A stock prefill does not say whose it was.)
    aux_writers: set[int] = dataclasses.field(default_factory=set)
    #: Writers that said with one note that all they write for the room is here.
    done_writers: set[int] = dataclasses.field(default_factory=set)
    #: Where the metadata go that come in such a note; None where none was announced.
    metadata_slot: int | None = None
    #: Writers that said that they write no more, whatever they have written.
    stopped_writers: set[int] = dataclasses.field(default_factory=set)
    #: What ``is_done`` last said; None where something has arrived since. Every room is asked in
    #: every step, and few of them get anything in it.
    _was_done: bool | None = None

    def take(self, note: Notification, num_writers: int) -> None:
        """Record one notification. Idempotent.

        ``num_writers`` is the number of prefill ranks that write for the room.
        """
        self._was_done = None
        if note.kind == "aux":
            if note.writer is None:
                self.received_aux = True
            else:
                self.aux_writers.add(note.writer)
            return
        assert note.writer is not None
        if note.kind == "done":
            self.done_writers.add(note.writer)
            self.num_pp_ranks_expected = num_writers
            return
        if note.kind == "state":
            self.received_state_per_pp.add(note.writer)
            return
        self.received_kvs_per_pp[note.writer].add(note.chunk)
        if note.is_last:
            self.expected_kvs_per_pp[note.writer] = note.chunk + 1
            self.num_pp_ranks_expected = num_writers

    def finished_writers(self) -> set[int]:
        """Writers from which everything has arrived: KV, metadata, and state where it is due."""
        return self.done_writers | {
            writer
            for writer, chunks in self.expected_kvs_per_pp.items()
            if len(self.received_kvs_per_pp[writer]) == chunks
            and (self.received_aux or writer in self.aux_writers)
            and (not self.expects_state or writer in self.received_state_per_pp)
        }

    @override
    def is_done(self) -> bool:
        # Stock also calls a failed room done, and asks afterwards whether it failed. Its heartbeat
        # says so here before the room's status does: between the two, the room is neither.
        if self._was_done is None:
            expected = self.num_pp_ranks_expected
            self._was_done = expected is not None and len(self.finished_writers()) >= expected
        return self._was_done

    # ---- decode/deferred_free.py: Progress ----

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""
        self.stopped_writers.add(writer)

    def is_drained(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""
        return len(self.finished_writers() | self.stopped_writers) >= writers


@dataclasses.dataclass
class NixlTransferInfo(DeltaTransferInfo):
    """A decode rank's announcement of a room, as NIXL's prefill ranks get it."""

    #: Of a later release's message without pages: nothing goes to it from here, not even metadata.
    is_left_out: bool = False

    @override
    def is_dummy(self) -> bool:
        if self.delta is not None:
            # No pages is a full prefix hit, not a dummy: it still gets its metadata.
            return self.delta.is_dummy
        if self.later_prefix_len:
            return self.is_left_out
        return self.delta_error is None and bool(super().is_dummy())


class DeltaNixlSender(NixlKVSender):
    """Queues a room's chunks, and says what became of them. Holds no transfer itself."""

    curr_idx: int  # of the upstream class; named for the type checker
    has_sent: bool
    chunk_id: int

    def __init__(
        self, mgr: DeltaNixlManager, bootstrap_addr: str, bootstrap_room: int,
        dest_tp_ranks: list[int], pp_rank: int,
    ) -> None:  # fmt: skip
        #: Another rank of the context parallel group sends all of it, and this one is done.
        self._is_left_out = False
        super().__init__(mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks, pp_rank)
        if not self.is_stopped:
            mgr.transfers.open(bootstrap_room, self._room)

    @override
    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        if self.is_stopped:
            return
        manager, room = self.kv_mgr, self.bootstrap_room
        part = slice(self.curr_idx, self.curr_idx + len(kv_indices))
        self.curr_idx = part.stop
        is_last = part.stop == self.num_kv_indices
        if manager.enable_all_cp_ranks_for_transfer:
            from sglang.srt.disaggregation.utils import filter_kv_indices_for_cp_rank

            kv_indices, part = filter_kv_indices_for_cp_rank(manager, kv_indices, part)
        elif manager.is_dummy_cp_rank:  # another rank of the context parallel group sends all
            self._is_left_out |= is_last
            self.has_sent |= is_last
            return
        try:
            manager.add_transfer_request(
                room, kv_indices, part, is_last, self.chunk_id,
                self.aux_index if is_last else None, state_indices if is_last else None,
            )  # fmt: skip
        except DeltaMismatch as error:
            self.fail(Reason.MISMATCH, str(error))
            return
        self.chunk_id += 1
        self.has_sent = is_last

    @override
    def poll(self) -> Any:
        room = self._room  # without a lock: the scheduler asks of every request, in every step
        if room.delivered or self._is_left_out:
            return KVPoll.Success  # also if it was stopped after that: decode has it
        if not room.is_stopped:
            if self.has_sent:
                return KVPoll.WaitingForInput
            self.fail_if_unannounced()
        if room.is_stopped:
            # While its pages are read, they must not be freed.
            return KVPoll.Failed if room.is_over else KVPoll.Transferring
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status == KVPoll.Bootstrapping and self._is_initialised:
            return KVPoll.WaitingForInput
        return status

    @property
    def _is_initialised(self) -> bool:
        """The scheduler has taken it from its bootstrap queue, and does not expect it there."""
        return getattr(self, "num_kv_indices", None) is not None

    @override
    def failure_exception(self) -> None:
        self.fail_with_others()  # unless it failed here
        reason, cause = self.kv_mgr.failure_of(self.bootstrap_room), self._room.error
        self.clear()
        raise RuntimeError(reason) from cause

    def clear(self) -> None:
        """Forget the room: called by the scheduler once the request left the in-flight queue."""
        self.kv_mgr.transfers.forget(self.bootstrap_room, self._room)
        self.forget()


class DeltaNixlReceiver(NixlKVReceiver):
    """Leaves nothing of its room behind, and says why a room failed."""

    conclude_state: Any  # of the upstream class; named for the type checker

    @override
    def poll(self) -> Any:
        if self.conclude_state is not None:
            return self.conclude_state
        manager, room = self.kv_mgr, self.bootstrap_room
        status = manager.check_status(room)
        if self.started_transfer and status not in (KVPoll.Success, KVPoll.Failed):
            manager.collect_arrivals_once(room)
            status = KVPoll.WaitingForInput
            if manager.check_transfer_done(room):
                status = KVPoll.Success
                log_arrived(room)
            elif self.fail_if_overdue():
                return self.conclude_state
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
            manager.update_status(room, status)
        return status

    @override
    def failure_exception(self) -> None:
        reason = self.kv_mgr.failure_of(self.bootstrap_room)
        self.clear()
        raise RuntimeError(reason)

    @override
    def clear(self) -> None:
        self.kv_mgr.transfer_statuses.pop(self.bootstrap_room, None)
        self.forget()

"""The thin overrides of SGLang's NIXL transfer info, sender and receiver."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, override

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.common import is_failed
from sglang.srt.disaggregation.nixl_async.watch import RoomWatch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, NixlKVSender, TransferInfo
else:
    NixlKVReceiver = NixlKVSender = TransferInfo = object


@dataclasses.dataclass
class DeltaTransferInfo(TransferInfo):
    """A decode rank's announcement, with its delta frame where it sent one."""

    delta: wire.DeltaFrame | None = None
    #: Why the frame could not be read. Kept for the sender, which fails the room: raising here
    #: would end the thread that reads every room's announcement.
    delta_error: str | None = None

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info: Self = super().from_zmq(msg)
        try:
            info.delta = wire.find_frame(msg)
        except wire.DeltaFrameError as error:
            info.delta_error = str(error)
        return info

    @override
    def is_dummy(self) -> bool:
        if self.delta is not None:
            # No pages is a full prefix hit, not a dummy: it still gets its metadata.
            return self.delta.is_dummy
        return self.delta_error is None and bool(super().is_dummy())


class DeltaNixlSender(NixlKVSender):
    """Fails its own room, never the scheduler, and not before posted transfers have settled."""

    _untold: str | None = None

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, dest_tp_ranks: list[int],
        pp_rank: int,
    ) -> None:  # fmt: skip
        mgr.failed_rooms.discard(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks, pp_rank)
        self._created_at = time.monotonic()

    @override
    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        if self._stopped:
            return
        try:
            super().send(kv_indices, state_indices)
        except Exception as error:  # the binding raises bare exceptions of several kinds
            self.fail(f"NIXL could not post the transfer: {error!r}")

    @property
    def _stopped(self) -> bool:
        """Failed or aborted: nothing more is to be posted. (Stock forgets the room's status once
        everything is posted, so a missing status is no failure.)"""
        return getattr(self, "conclude_state", None) is not None or is_failed(
            self.kv_mgr.request_status.get(self.bootstrap_room)
        )

    @override
    def poll(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        states = [self.kv_mgr.agent.check_xfer_state(handle) for handle in self.xfer_handles]
        if not self._stopped:
            if "ERR" in states:
                self.fail("NIXL reported an error for a posted transfer")
            else:
                self._check_deadline()
        settled = all(state in ("DONE", "ERR") for state in states)
        if self._stopped and not self._completed(states):
            if not settled:  # pages under a transfer that still reads them must not be freed
                return KVPoll.Transferring
            self._tell_now()
            return KVPoll.Failed
        if not self.has_sent:
            return self.kv_mgr.check_status(self.bootstrap_room)
        return KVPoll.Success if settled else KVPoll.WaitingForInput

    def _check_deadline(self) -> None:
        """Decode announces a room when it has memory for it; not for ever, though."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager = self.kv_mgr
        if manager.request_status.get(self.bootstrap_room) != KVPoll.Bootstrapping:
            return
        waited = time.monotonic() - self._created_at
        if waited >= manager.bootstrap_timeout:
            self.fail(
                f"room {self.bootstrap_room}: no decode server announced it within {waited:.0f} s "
                f"(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)"
            )

    def _completed(self, states: list[str]) -> bool:
        """All was delivered before the abort arrived: decode has it, so it is a success."""
        return bool(self.has_sent) and all(state == "DONE" for state in states)

    @override
    def abort(self) -> None:
        super().abort()
        if not self.has_sent:
            self.fail("aborted on the prefill server")
        else:
            self._untold = "aborted on the prefill server"

    @override
    def tell_failure(self, reason: str) -> None:
        # Decode takes the notice as proof that its pages are written to no more, so it is sent
        # only when what was posted has settled: at once if that is nothing, else by ``poll``.
        self._untold = reason
        if not self.xfer_handles:
            self._tell_now()

    def _tell_now(self) -> None:
        reason, self._untold = self._untold, None
        if reason is not None:
            self.kv_mgr.notify_failure(self.bootstrap_room, reason, self.announcements)

    @override
    def failure_exception(self) -> None:
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "NIXL transfer failed")
        self.clear()
        raise RuntimeError(reason)

    def clear(self) -> None:
        """Forget the room: called by the scheduler once the request left the in-flight queue."""
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)
        self.kv_mgr.transfer_infos.pop(self.bootstrap_room, None)
        self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        self.xfer_handles: list[Any] = []  # the wrappers release what they hold


class DeltaNixlReceiver(NixlKVReceiver):
    """Leaves nothing of its room behind."""

    def hold(self) -> RoomWatch | None:
        """Follow a room that is given up: its pages are held until the watch says it is quiet.

        None where prefill cannot write to them: it was told of none, or said that it stopped.
        """
        if not self.started_transfer:
            return None
        watch: RoomWatch | None = self.kv_mgr.watch(self.bootstrap_room)
        return watch

    @override
    def failure_exception(self) -> None:
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "NIXL transfer failed")
        self.clear()
        raise RuntimeError(reason)

    @override
    def clear(self) -> None:
        room = self.bootstrap_room
        manager = self.kv_mgr
        manager.request_status.pop(room, None)
        manager.required_prefill_response_num_table.pop(room, None)
        manager.transfer_statuses.pop(room, None)
        manager.failure_records.pop(room, None)
        manager.refused_rooms.discard(room)
        rooms = manager.addr_to_rooms_tracker.get(self.bootstrap_addr)
        if rooms is not None:
            rooms.discard(room)

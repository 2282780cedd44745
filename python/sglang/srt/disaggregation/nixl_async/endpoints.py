"""The thin overrides of SGLang's NIXL transfer info, sender and receiver."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, override

from sglang.srt.disaggregation.delta import deadlines, wire
from sglang.srt.disaggregation.delta.failures import Reason

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, NixlKVSender, TransferInfo
else:
    NixlKVReceiver = NixlKVSender = TransferInfo = object


@dataclasses.dataclass
class DeltaTransferInfo(TransferInfo):
    """A decode rank's announcement, with its delta frame where it sent one."""

    delta: wire.DeltaFrame | None = None
    #: Why the frame could not be read. Kept for the sender, which fails the room: raising here
    #: would leave the room unanswered.
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

    #: The manager waits for what this room posted.
    _buried = False

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, dest_tp_ranks: list[int],
        pp_rank: int,
    ) -> None:  # fmt: skip
        super().__init__(mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks, pp_rank)
        self._created_at = self._posted_at = time.monotonic()

    @override
    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self._settled()
        if self.is_stopped or not self.kv_mgr.rooms.enter(self.bootstrap_room):
            return
        try:
            super().send(kv_indices, state_indices)
        except Exception as error:  # the binding raises bare exceptions of several kinds
            self.fail(Reason.TRANSPORT, f"NIXL could not post the transfer: {error!r}")
        self._posted_at = time.monotonic()
        if self.has_sent:
            # Stock forgets the room here, and could not fail it any more.
            self.kv_mgr.request_status.setdefault(self.bootstrap_room, KVPoll.Transferring)
        self._settled()

    def _states(self) -> list[str]:
        return [self.kv_mgr.state_of(handle) for handle in self.xfer_handles]

    def _settled(self, states: list[str] | None = None) -> bool:
        """Whether nothing that was posted is under way; the gate is told so. ``states``: what
        ``_states`` said just now, where the caller goes by the same."""
        if states is None:
            states = self._states()
        if self._buried or any(state not in ("DONE", "ERR") for state in states):
            return False
        self.kv_mgr.rooms.gate.leave(self.bootstrap_room)
        return True

    @override
    def poll(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        states = self._states()
        if not self.is_stopped:
            if "ERR" in states:
                self.fail(Reason.TRANSPORT, "NIXL reported an error for a posted transfer")
            else:
                self._check_deadlines(states)
        settled = self._settled(states)
        if self.is_stopped:
            if not settled and not self._buried and not self._overdue():
                return KVPoll.Transferring  # it still reads pages, which must not be freed
            if self.has_sent and settled and all(state == "DONE" for state in states):
                return KVPoll.Success  # delivered before it was stopped: decode has it
            self._bury()
            return KVPoll.Failed
        if not self.has_sent:
            return self.kv_mgr.check_status(self.bootstrap_room)
        return KVPoll.Success if settled else KVPoll.WaitingForInput

    def _overdue(self) -> bool:
        return time.monotonic() - self._posted_at >= deadlines.transfer_seconds()

    def _check_deadlines(self, states: list[str]) -> None:
        """Decode announces a room when it has memory for it, and takes what is sent; not for ever,
        though."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager, room = self.kv_mgr, self.bootstrap_room
        if "PROC" in states and self._overdue():
            self.fail(
                Reason.TIMEOUT,
                f"room {room}: a posted transfer did not settle within "
                f"{deadlines.transfer_seconds():.0f} s (SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT)",
            )
        elif manager.request_status.get(room) == KVPoll.Bootstrapping:
            waited = time.monotonic() - self._created_at
            if waited >= manager.bootstrap_timeout:
                self.fail(
                    Reason.TIMEOUT,
                    f"room {room}: no decode server announced it within {waited:.0f} s "
                    f"(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)",
                )

    def _bury(self) -> None:
        """Leave what did not settle to the manager: it cannot be taken back, only waited for."""
        self._buried |= self.kv_mgr.bury(self.bootstrap_room, self.xfer_handles)
        self.xfer_handles: list[Any] = []

    @override
    def failure_exception(self) -> None:
        # Stock also calls this where the room failed on another rank only.
        self.fail(Reason.PEER_FAILED, "it failed on another prefill rank")
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "NIXL transfer failed")
        self.clear()
        raise RuntimeError(reason)

    def clear(self) -> None:
        """Forget the room: called by the scheduler once the request left the in-flight queue."""
        self._settled()
        self._bury()
        self.forget()


class DeltaNixlReceiver(NixlKVReceiver):
    """Leaves nothing of its room behind, and says why a room failed."""

    conclude_state: Any  # of the upstream class; named for the type checker

    @override
    def poll(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self._servers is None:
            return super().poll()
        if self.conclude_state is not None:
            return self.conclude_state
        manager, room = self.kv_mgr, self.bootstrap_room
        status = manager.check_status(room)
        if self.started_transfer and status not in (KVPoll.Success, KVPoll.Failed):
            manager.collect_arrivals()
            status = KVPoll.WaitingForInput
            if manager.check_transfer_done(room):
                status = KVPoll.Success
            elif time.time() - self.init_time >= manager.waiting_timeout:
                self._fail(
                    Reason.TIMEOUT,
                    f"room {room}: prefill {self.bootstrap_addr} did not complete it within "
                    f"{manager.waiting_timeout} s (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)",
                )
                return self.conclude_state
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
            manager.update_status(room, status)
        return status

    @override
    def failure_exception(self) -> None:
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "NIXL transfer failed")
        self.clear()
        raise RuntimeError(reason)

    @override
    def clear(self) -> None:
        self.kv_mgr.transfer_statuses.pop(self.bootstrap_room, None)
        self.forget()

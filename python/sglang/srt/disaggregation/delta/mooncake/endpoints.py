"""The thin overrides of SGLang's Mooncake sender and receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.pages import share_of_chunk

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.delta.mooncake.manager import DeltaMooncakeManager
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver, MooncakeKVSender
else:
    MooncakeKVReceiver = MooncakeKVSender = object


class DeltaMooncakeSender(MooncakeKVSender):
    """Fails its own room, never the scheduler, and not while a worker is still at it."""

    conclude_state: KVPoll | None  # of the upstream class; named for the type checker
    curr_idx: int

    @override
    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        if self.is_stopped:
            return
        try:
            if self.kv_mgr.enable_all_cp_ranks_for_transfer:
                self._send_share(kv_indices, state_indices)
            else:
                super().send(kv_indices, state_indices)
        except Exception as error:  # no request may raise out of the scheduler's loop
            self.fail(
                Reason.TRANSPORT, f"room {self.bootstrap_room} could not be queued: {error!r}"
            )

    def _send_share(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None
    ) -> None:
        """A chunk of which each rank of the context parallel group sends a part."""
        part = slice(self.curr_idx, self.curr_idx + len(kv_indices))
        self.curr_idx = part.stop
        is_last = part.stop == self.num_kv_indices
        manager = self.kv_mgr
        kv_indices, part = share_of_chunk(
            kv_indices, part, manager.attn_cp_rank, manager.attn_cp_size
        )
        manager.add_transfer_request(
            self.bootstrap_room, kv_indices, part, is_last,
            self.aux_index if is_last else None, state_indices if is_last else None,
        )  # fmt: skip

    @override
    def poll(self) -> KVPoll:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.is_due:
            return KVPoll.WaitingForInput
        if self.conclude_state is not None:
            return self.conclude_state
        manager, room = self.kv_mgr, self.bootstrap_room
        self.fail_if_unannounced()
        status = manager.request_status.get(room, KVPoll.Failed)
        if self._room.delivered:  # the status may be gone with another request of the number
            status = KVPoll.Success
        elif self._room.is_over:  # or be that one's
            status = KVPoll.Failed
        elif status == KVPoll.Failed:
            if not self._room.is_stopped:  # SGLang's code only sets the status
                manager.rooms.fail(room, Reason.TRANSPORT, manager.statuses.failure_of(room))
            if not self._room.is_over:
                return KVPoll.Transferring  # it still reads pages, which must not be freed
        if status in (KVPoll.Failed, KVPoll.Success):
            self.conclude_state = status
        return status

    @override
    def abort(self) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        # What was delivered before is a success: decode has it.
        if self.kv_mgr.request_status.get(self.bootstrap_room) != KVPoll.Success:
            self.fail(Reason.ABORTED, "aborted on the prefill server")

    @override
    def failure_exception(self) -> None:
        from sglang.srt.disaggregation.mooncake.conn import KVTransferError

        self.fail_with_others()  # unless it failed here
        text = self.failure
        self.clear()
        raise KVTransferError(self.bootstrap_room, text)

    @override
    def clear(self) -> None:
        self.forget()


class DeltaMooncakeReceiver(MooncakeKVReceiver):
    """Leaves nothing of its room behind, and says why a room failed."""

    conclude_state: KVPoll | None  # of the upstream class; named for the type checker

    def __init__(
        self, mgr: DeltaMooncakeManager, bootstrap_addr: str, bootstrap_room: int | None = None
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
        from sglang.srt.disaggregation.base.conn import KVPoll

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

"""Prefill's end of a room on any backend: a thin override of SGLang's sender."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.pages import DeltaMismatch, plan_delta
from sglang.srt.disaggregation.delta.prefill.room_table import Room

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVSender
else:
    CommonKVSender = object


class _Destination(msgspec.Struct, frozen=True):
    """One real destination of a room, as the plan wants it."""

    decode_prefix_len: int
    num_pages: int


class DeltaSender(CommonKVSender):
    """Prefill's side of a room: starts at the prefix that decode holds."""

    #: Tokens that decode holds and that are not sent; None where SGLang's own sender is at work.
    decode_prefix_len: int | None = None
    _room: Room

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, dest_tp_ranks: list[int],
        pp_rank: int,
    ) -> None:  # fmt: skip
        self._created_at = time.monotonic()
        super().__init__(mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks, pp_rank)
        if mgr.rooms is None:
            return  # a backend of SGLang's that knows no delta
        self._room, refused = mgr.rooms.claim(bootstrap_room)
        if refused is not None:
            self.fail(Reason.ABORTED, refused)
        mgr.start_if_announced(bootstrap_room)

    @override
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        # Runs when the metadata of every decode rank is in, before the first chunk is computed.
        if self.kv_mgr.rooms is None:
            super().init(num_kv_indices, aux_index)
            return
        self.decode_prefix_len = 0
        try:
            plan = plan_delta(
                self.bootstrap_room,
                self._destinations(),
                num_kv_indices,
                self.kv_mgr.kv_args.page_size,
            )
        except (DeltaMismatch, wire.DeltaFrameError) as error:
            super().init(num_kv_indices, aux_index)
            self.fail(Reason.MISMATCH, str(error))
            return
        self.decode_prefix_len = plan.prefix_len
        super().init(plan.num_pages, aux_index)

    def _destinations(self) -> list[_Destination]:
        found = []
        for info in self.kv_mgr.rooms.destinations(self.bootstrap_room):
            if info.delta_error:
                raise wire.DeltaFrameError(f"room {self.bootstrap_room}: {info.delta_error}")
            is_dummy = info.is_dummy() if callable(info.is_dummy) else info.is_dummy
            if is_dummy:
                continue
            prefix = info.delta.decode_prefix_len if info.delta else info.later_prefix_len or 0
            found.append(_Destination(prefix, len(info.dst_kv_indices)))
        return found

    @property
    def is_stopped(self) -> bool:
        """Failed, aborted or withdrawn: nothing more is to be posted."""
        return self._room.is_stopped

    def fail(self, kind: Reason, text: str) -> None:
        """Fail this room alone; its decode ranks are told once what was posted has settled."""
        self.kv_mgr.rooms.fail(self.bootstrap_room, kind, text)

    def fail_if_unannounced(self) -> None:
        """Decode announces a room when it has memory for it; it is not waited for without end."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager, room = self.kv_mgr, self.bootstrap_room
        if manager.request_status.get(room) != KVPoll.Bootstrapping:
            return
        waited = time.monotonic() - self._created_at
        if waited >= manager.bootstrap_timeout:
            self.fail(
                Reason.TIMEOUT,
                f"room {room}: no decode server announced it within {waited:.0f} s "
                f"(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)",
            )

    def fail_with_others(self) -> None:
        """The request failed on another rank of this server: send nothing more of it."""
        if not self.is_stopped:
            self.fail(Reason.PEER_FAILED, "it failed on another rank of this server")

    @override
    def abort(self) -> None:
        if self.kv_mgr.rooms is None:
            super().abort()
            return
        # SGLang's would write over the reason of a room that has failed already.
        self.fail(Reason.ABORTED, "aborted on the prefill server")

    def forget(self) -> None:
        """Leave no entry of the room in the manager's tables."""
        room, manager = self.bootstrap_room, self.kv_mgr
        manager.rooms.forget(self._room)
        manager.forget_status(room)
        manager.transfer_infos.pop(room, None)

"""Metadata slots, where prefill writes the first token: cleared when taken, checked when polled.

Whether the metadata of a room have landed must be known *before* the ranks agree that its transfer
is complete. A rank that found out afterwards would keep the request while the others run it.

The transfer queue: committed KV is shared at once, pages of failed transfers are held.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.deferred_free import Quarantine, QuietRoom
from sglang.srt.disaggregation.delta.decode.eligibility import is_fake

logger = logging.getLogger(__name__)

EMPTY = 0


def take_slot(allocator: Any, buffers: Any) -> int:
    """A free slot that says of no room that its metadata are there; the caller knows one is free.

    It is cleared here too: a transfer that was given up may have written since it was freed.
    """
    index: int | None = allocator.alloc()
    assert index is not None, "a free metadata slot was checked before"
    buffers.bootstrap_room[index, 0] = EMPTY
    return index


def free_slot(allocator: Any, buffers: Any, index: int) -> None:
    """Give a slot back; what it says of its room is forgotten."""
    buffers.bootstrap_room[index, 0] = EMPTY
    allocator.free(index)


class Arrival:
    """One transfer as the ranks poll it: complete when its KV *and* its metadata are here."""

    def __init__(self, decode_req: Any, buffers: Any) -> None:
        self._decode_req = decode_req
        self._buffers = buffers

    def poll(self) -> int:
        """The receiver's state; Success only with this room's metadata.

        Failed with another room's, or without any for as long as a transfer may take.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        entry, req = self._decode_req, self._decode_req.req
        state = int(entry.kv_receiver.poll())
        if state != KVPoll.Success or is_fake(req):
            return state
        expected = req.bootstrap_room or EMPTY
        found = int(self._buffers.bootstrap_room[entry.metadata_buffer_index, 0].item())
        if expected == EMPTY:
            entry.arrived = True
            entry.failure = "room 0 cannot be told from an empty metadata slot"
            return int(KVPoll.Failed)
        if found == EMPTY:
            return int(KVPoll.Failed if self._is_overdue() else KVPoll.Transferring)
        entry.arrived = True  # on this rank prefill has nothing left to write
        if found != expected:
            entry.failure = (
                f"metadata slot {entry.metadata_buffer_index} holds the metadata of room {found}"
            )
            return int(KVPoll.Failed)
        return state

    def _is_overdue(self) -> bool:
        """Whether the metadata did not come in the time that a transfer may take.

        Prefill says that it delivered everything, so nothing else would end the wait.
        """
        from sglang.srt.environ import envs

        entry, now = self._decode_req, time.monotonic()
        if getattr(entry, "without_metadata_since", None) is None:
            entry.without_metadata_since = now
        waited = now - entry.without_metadata_since
        if waited < envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get():
            return False
        entry.failure = (
            f"its KV has arrived, but no metadata in metadata slot {entry.metadata_buffer_index} "
            f"within {waited:.0f} s (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
        )
        return True


if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
else:
    DecodeTransferQueue = object


class RadixTransferQueue(DecodeTransferQueue):
    """Puts the KV of finished transfers into the decode tree. Stock behaviour without the flag."""

    queue: list[Any]  # owned by the upstream class; named for the type checker

    @cached_property
    def quarantine(self) -> Quarantine:
        """Requests whose transfer ended early and whose pages prefill may still write to."""
        return Quarantine()

    @override
    def pop_transferred(self, rids_to_check: list[str] | None = None) -> list[Any]:
        if not getattr(self.tree_cache, "serves_decode", False):
            stock: list[Any] = super().pop_transferred(rids_to_check)
            return stock
        if not self.queue and not self.quarantine:
            return []
        from sglang.srt.disaggregation.utils import poll_and_all_reduce

        # One reduction for the transfers and for the rooms that were given up before.
        arrivals = [Arrival(entry, self.metadata_buffers) for entry in self.queue]
        polls = poll_and_all_reduce([*arrivals, *self.quarantine.pollers], self.gloo_group)
        released = self.quarantine.pop(polls[len(arrivals) :])
        transferred = self._take_finished(polls[: len(arrivals)])
        for decode_req in released:
            self._release(decode_req)
        return transferred

    def _take_finished(self, polls: list[int]) -> list[Any]:
        from sglang.srt.disaggregation.base.conn import KVPoll

        waiting, transferred = [], []
        for decode_req, poll in zip(self.queue, polls, strict=True):
            if poll == KVPoll.Failed:
                self._give_up(decode_req)
            elif poll == KVPoll.Success and self._commit_transfer_to_req(decode_req):
                if self._landed(decode_req):
                    transferred.append(decode_req.req)
            else:
                waiting.append(decode_req)
        self.queue = waiting
        return transferred

    def _landed(self, decode_req: Any) -> bool:
        """The transfer is complete. False if its metadata were overwritten after the poll."""
        req = decode_req.req
        if req.finished_reason is None:
            self._free_metadata_slot(decode_req)
            self.tree_cache.adopt(req)
            return True
        self._answer(req)
        self._release(decode_req)
        return False

    def _give_up(self, decode_req: Any) -> None:
        """Answer the client of a failed transfer; keep what prefill may still write to."""
        from sglang.srt.disaggregation.utils import prepare_abort

        req, receiver = decode_req.req, decode_req.kv_receiver
        message = (
            f"Decode transfer failed for request rank={self.tp_rank} "
            f"rid={req.rid} bootstrap_room={req.bootstrap_room}"
        )
        watch = self._watch(decode_req)  # before the receiver forgets the room
        try:
            receiver.failure_exception()
        except Exception as error:  # that is how a receiver says why it failed
            message += f": {getattr(decode_req, 'failure', None) or error}"
        logger.error(message)
        prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
        self._answer(req)
        # Also where this rank's room is quiet: another's may not be, and all release together.
        self.quarantine.hold(decode_req, watch)
        self.tree_cache.claims.held(req)

    @staticmethod
    def _watch(decode_req: Any) -> Any:
        """What says that prefill stopped writing; at once where everything had arrived already."""
        hold = getattr(decode_req.kv_receiver, "hold", None)
        if hold is None or getattr(decode_req, "arrived", False):
            return QuietRoom()
        return hold() or QuietRoom()

    def _answer(self, req: Any) -> None:
        scheduler = self.scheduler
        scheduler.stream_output([req], req.return_logprob)
        if scheduler.enable_metrics:
            scheduler.metrics_collector.increment_transfer_failed_reqs()

    def _release(self, decode_req: Any) -> None:
        """Give back all that a failed transfer owned; nothing of it enters the tree."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(decode_req.req, self.tree_cache, is_insert=False)
        self._free_metadata_slot(decode_req)

    def _free_metadata_slot(self, decode_req: Any) -> None:
        free_slot(
            self.req_to_metadata_buffer_idx_allocator,
            self.metadata_buffers,
            decode_req.metadata_buffer_index,
        )

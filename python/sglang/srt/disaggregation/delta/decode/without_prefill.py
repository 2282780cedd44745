"""Requests whose prefill server is lost, or whose transfer failed: computed locally if they are
short.

Such a request goes back into the prealloc queue, with a receiver that asks nobody, and is admitted
once more: matched, locked, given pages of its own. What it held for its transfer stays behind with
a stand-in (``remains``) until prefill can write to it no more. Nothing of a transfer that failed is
used: prefill says of a room as a whole that everything is here, and said it of none of these.
"""

from __future__ import annotations

import copy
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any  # Any: SGLang's, with more than protocols.py names

from sglang.srt.disaggregation.delta.decode.handshakes import bootstrap_addr
from sglang.srt.disaggregation.delta.decode.record import DecodeRecord, Wait, record_of
from sglang.srt.disaggregation.delta.decode.waiting import give_up
from sglang.srt.patchset import compat

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.delta.decode.prealloc_queue import RadixPreallocQueue
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

#: Why a turn is computed locally that prefill was to compute: it could not be reached, or was lost
#: before the request was announced; or the transfer failed.
NO_PREFILL, TRANSFER_FAILED = "no_prefill", "transfer_failed"


class NoPrefill:
    """Stands where the receiver of such a request was.

    ``why``: what happened, for the log and the client. ``asking``: the receiver, if its prefill
    server is still being asked who it is; a request that is too long for this server goes on with
    it.
    """

    require_staging = False

    def __init__(self, reason: str, why: str, asking: Any = None) -> None:
        self.reason, self.why, self.asking = reason, why, asking
        self.conclude_state: int | None = None

    def poll(self) -> int:
        """Ready for admission, until the client leaves."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        return int(KVPoll.WaitingForInput if self.conclude_state is None else self.conclude_state)

    def abort(self) -> None:
        """The client left."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.conclude_state = int(KVPoll.Failed)

    def withdraw(self, reason: str) -> None:
        """No announcement is expected, so nobody is notified."""

    def yield_room(self) -> None:
        """No server can be notified: a server that has the request all the same ends it by its
        own deadline."""

    def clear(self) -> None:
        """Forget the room. All ranks do so in one step, or one of them would refuse the next
        request of this number alone."""
        if self.asking is not None:
            self.asking.clear()


class WithoutPrefill:
    """One for each prealloc queue; only the scheduler's thread comes here. What it decides is equal
    on all ranks: that a room failed, or its server was not reached, was agreed."""

    def __init__(self, queue: RadixPreallocQueue) -> None:
        """``queue``: the prealloc queue."""
        self._queue = queue

    def may_save(self, req: Req) -> bool:
        """Whether a request whose room failed may be computed locally, if it is short enough."""
        turns = self._queue.local_turns
        return turns is not None and bool(turns.may_save(req))

    def save(self, entry: DecodeRequest, why: str) -> bool:
        """Keep a request in line whose room failed before it was announced; False if that may not
        be."""
        if record_of(entry.req).is_alone or not self.may_save(entry.req):
            return False
        entry.kv_receiver.withdraw(why)
        entry.kv_receiver.clear()
        self._in_line(entry, NoPrefill(NO_PREFILL, why))
        return True

    def try_here(self, entry: DecodeRequest) -> None:
        """Its prefill server cannot be reached just now: a request is attempted locally, once."""
        record_of(entry.req).tried_here = True
        if self.may_save(entry.req):
            why = f"prefill server {bootstrap_addr(entry.req)} could not be reached"
            self._in_line(entry, NoPrefill(NO_PREFILL, why, entry.kv_receiver))

    def take_back(self, req: Req, why: str) -> None:
        """The transfer of a request failed, and it is in line again, before all others."""
        from sglang.srt.disaggregation.decode import DecodeRequest

        receiver = NoPrefill(TRANSFER_FAILED, why)
        entry: DecodeRequest = DecodeRequest(req=req, kv_receiver=receiver)
        self._queue.queue.insert(0, entry)
        self._in_line(entry, receiver)

    def is_too_long(self, entry: DecodeRequest) -> bool:
        """A request has more new tokens than may be computed locally: it waits for its prefill
        server again, or fails; whether it failed."""
        queue, receiver = self._queue, entry.kv_receiver
        if receiver.asking is not None:
            entry.kv_receiver, entry.waiting_for_input = receiver.asking, False
            queue.pending_reqs.append(entry)
            record = record_of(entry.req)
            record.wait, record.is_alone = Wait(), False
            return False
        message = (
            f"Request {entry.req.rid} (bootstrap_room={entry.req.bootstrap_room}) has no prefill "
            f"server, and more new tokens than {compat.LOCAL_WHEN_LOST} allows: {receiver.why}"
        )
        give_up(queue.scheduler, entry, message, HTTPStatus.INTERNAL_SERVER_ERROR)
        return True

    def _in_line(self, entry: DecodeRequest, receiver: NoPrefill) -> None:
        queue = self._queue
        entry.kv_receiver, entry.waiting_for_input = receiver, True
        queue.pending_reqs = [other for other in queue.pending_reqs if other is not entry]
        record = record_of(entry.req)
        record.wait, record.is_alone = Wait(since=queue.clock()), True
        queue.local_turns.lost(bootstrap_addr(entry.req))
        logger.warning(
            "request %s (bootstrap_room=%s) has no prefill server: %s. Fallback prefill computes "
            "it if it is short enough",
            entry.req.rid,
            entry.req.bootstrap_room,
            receiver.why,
        )


def remains(req: Any) -> Req:
    """A request that owns what ``req`` has owned for its transfer: row, pages and lock.

    ``req`` owns nothing afterwards, like one that was never admitted. The stand-in has ended, and
    its client was answered.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    left: Req = copy.copy(req)
    left.output_ids, left.finished_reason, left.delta = [], FINISH_ABORT(), DecodeRecord()
    record_of(left).generation = record_of(req).generation
    stained, count = req.retracted_stain, req.retraction_count
    req.reset_for_retract()  # it is no retraction, and gives nothing back
    req.is_retracted, req.retracted_stain, req.retraction_count = False, stained, count
    req.req_pool_idx, req.cache_protected_len = None, 0
    record = record_of(req)
    record.arriving = record.turn = record.without_metadata_since = record.failure = None
    record.arrived = False
    return left

"""Requests whose prefill server is lost, or whose transfer failed: computed locally if they are
short.

Such a request goes back into the prealloc queue, with a receiver that asks nobody, and is admitted
once more: matched, locked, given pages of its own. What it held for its transfer stays behind with
a stand-in (``remains``) until prefill can write to it no more. Nothing of a transfer that failed is
used: prefill says of a room as a whole that everything is here, and said it of none of these.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any  # Any: what a stand-in copies; SGLang's receivers

from sglang.srt.disaggregation.delta.decode.record import DecodeRecord, record_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

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
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.reason, self.why, self.asking = reason, why, asking
        self._state, self._failed = int(KVPoll.WaitingForInput), int(KVPoll.Failed)

    def poll(self) -> int:
        """Ready for admission, until the client leaves."""
        return self._state

    def abort(self) -> None:
        """The client left."""
        self._state = self._failed

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

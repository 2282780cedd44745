"""Fallback prefill: short requests whose prefill server is lost, or whose transfer failed.

Such a request returns to SGLang's prealloc queue with a receiver that queries no server. What it
held for its transfer stays with a stand-in (``stand_in``) until SGLang's deferred release frees it.
Nothing of a failed transfer is used.

Contract: scheduler thread. That a room failed was agreed, so all ranks do the same in one step.
"""

from __future__ import annotations

import copy
import logging
from typing import Any  # Any: SGLang's objects

from sglang.srt.disaggregation.lead.attach import Function, Wraps
from sglang.srt.disaggregation.lead.local import reason_for_prefill
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)


class LostPrefill:
    """Replaces the receiver of such a request. ``reason``: label of the metric."""

    bootstrap_infos = ()

    def __init__(self, req: Any, reason: str) -> None:
        self.bootstrap_room, self.reason, self.is_over = req.bootstrap_room, reason, False

    def poll(self) -> Any:
        """Return the state for admission: ready, until the client leaves or the request is found to
        be too long."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        return KVPoll.Failed if self.is_over else KVPoll.WaitingForInput

    def abort(self) -> None:
        """Let SGLang end the request in its next step."""
        self.is_over = True

    def failure_exception(self) -> None:
        """Raise the error for the client.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"no prefill server ({self.reason}), and more new tokens than "
            f"{environment.FALLBACK_PREFILL_TOKENS.name} allows"
        )

    def clear(self) -> None:
        """Do nothing."""


def may_save(entry: Any) -> bool:
    """Return True if a request whose room failed may be computed here if it is short enough."""
    req = entry.req
    is_wanted = not getattr(req, "lead_unwanted", False)
    is_new = not isinstance(entry.kv_receiver, LostPrefill)
    # SGLang empties the lists of log probabilities when a room fails.
    return is_wanted and is_new and not req.return_logprob and reason_for_prefill(entry) is None


def renew(entry: Any, req: Any, reason: str) -> None:
    """Let the entry be decided again in the next step."""
    logger.warning(
        "request %s (bootstrap_room=%s) has no prefill server (%s): it is computed here if it is "
        "short enough",
        req.rid,
        req.bootstrap_room,
        reason,
    )
    req.lead_turn = None
    entry.kv_receiver, entry.waiting_for_input = LostPrefill(req, reason), False


def stand_in(req: Any) -> Any:
    """Return a request that owns the transfer's memory of ``req`` and whose client counts as
    answered. ``req`` then owns nothing, like a request that was never admitted."""
    left, stained, count = copy.copy(req), req.retracted_stain, req.retraction_count
    left.finished_output = True
    req.kv = type(req.kv)()
    req.reset_for_retract()  # it is no retraction, and gives nothing back
    req.is_retracted, req.retracted_stain, req.retraction_count = False, stained, count
    return left


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.disaggregation.decode import (
        DecodePreallocQueue,
        DecodeRequest,
        DecodeTransferQueue,
    )
    from sglang.srt.disaggregation.utils import is_aborted
    from sglang.srt.managers.scheduler import Scheduler

    @wrap(
        DecodePreallocQueue,
        "_update_handshake_waiters",
        "(self, rids_to_check=None, pp_good_rids=None, pp_bad_rids=None)",
    )
    def _update_handshake_waiters(stock: Function, self: Any, *args: Any, **kw: Any) -> None:
        before = {id(entry) for entry in self.queue if is_aborted(entry.req)}
        stock(*args, **kw)
        saved = set()
        for entry in self.queue:
            # The room has failed on all ranks in this step.
            if is_aborted(entry.req) and id(entry) not in before and may_save(entry):
                entry.req.finished_reason = None
                renew(entry, entry.req, "no_prefill")
                saved.add(id(entry))
        # Saved requests stop waiting for their prefill server's answer.
        self.pending_reqs = [each for each in self.pending_reqs if id(each) not in saved]

    @wrap(DecodeTransferQueue, "_abort_failed_transfer", "(self, decode_req)")
    def _abort_failed_transfer(stock: Function, self: Any, decode_req: Any) -> None:
        stock(decode_req)
        if may_save(decode_req):
            req, decode_req.req = decode_req.req, stand_in(decode_req.req)
            entry = DecodeRequest(req=req, kv_receiver=None)
            renew(entry, req, "transfer_failed")
            self.scheduler.disagg_decode_prealloc_queue.queue.insert(0, entry)

    @wrap(Scheduler, "abort_request", "(self, recv_req)")
    def abort_request(stock: Function, self: Any, recv_req: Any) -> None:
        queues = self.disagg_decode_prealloc_queue, self.disagg_decode_transfer_queue
        for entry in (entry for each in queues if each is not None for entry in each.queue):
            if recv_req.abort_all or entry.req.rid.startswith(recv_req.rid):
                entry.req.lead_unwanted = True
        stock(recv_req)

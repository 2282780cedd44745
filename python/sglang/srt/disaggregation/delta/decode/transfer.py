"""A request in transfer: announced, polled, then committed to the tree or freed, now or later.

Prefill writes a room's first token into its metadata slot. A rank checks that the metadata of a
room have arrived *before* it votes for the end of the transfer: otherwise it could keep the request
while the other ranks run it.

Contract: the scheduler's thread only. All ranks call ``pop_transferred`` together with equal queues
and deferred releases: one reduction, and only its result decides which transfer ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: SGLang's manager, batches and results

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.decode.deferred import DeferredFree
from sglang.srt.disaggregation.delta.decode.request import (
    bootstrap_addr,
    is_fake,
    record_of,
    remains,
)
from sglang.srt.disaggregation.delta.decode.speculation import own_draft_state
from sglang.srt.disaggregation.delta.observability import STATS, Admitted, now

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
    from sglang.srt.disaggregation.delta.wire import DeltaFrame
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req
else:
    DecodeTransferQueue = object

logger = logging.getLogger(__name__)

#: Room number in a metadata slot without metadata.
EMPTY = 0
_NO_PAGES: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


# ---- announcements ----


class StepWrites:
    """Delays announcements of pages that the step in flight still uses for ended requests.

    With overlap scheduling, the end of a request is found when the next step already runs with it.
    That step writes one more slot for it, which was just freed or is in the tree (and may have been
    evicted since). It also reads the slots that were freed because the tree had their tokens
    already. Later steps run after it on the device, but a prefill server's write does not.

    SGLang's loop admits, launches the next step and then processes the result of the last one, so
    an announcement waits within one iteration of the loop, and only if its pages overlap.

    A step of spec v2 reads on the device, from the rows of its requests, which slots it writes. For
    an ended request these are its slots beyond its text. ``rows_are_free`` waits for this before
    another request gets the row; otherwise the step would write into that request's prefix.
    """

    def __init__(self, in_flight: Callable[[], Sequence[tuple[Any, Any]]], page: int) -> None:
        """``in_flight`` returns the launched batches with unprocessed results, oldest first, each
        with its future result."""
        self._in_flight, self._page = in_flight, page
        self._batch: Any = None  # compared by identity
        self._pages = _NO_PAGES
        self._waiting: list[Callable[[], None]] = []

    def after(self, pages: npt.NDArray[np.int32], announce: Callable[[], None]) -> None:
        """Call ``announce`` now, or as soon as no step uses ``pages``."""
        results = self._in_flight()
        batch = results[-1][0] if results else None
        if batch is not self._batch:
            # Its private pages of requests that have ended since it was launched.
            self._batch, self._pages = batch, _NO_PAGES
            reqs = batch.reqs if batch is not None else ()
            ended = [req for req in reqs if req.finished() or req.is_retracted]
            if ended:
                slots = torch.cat([record_of(req).slots_at_end for req in ended])
                self._pages = (slots // self._page).cpu().numpy()
        if len(self._pages) and np.isin(pages, self._pages).any():
            self._waiting.append(announce)
        else:
            announce()

    def rows_are_free(self) -> None:
        """Wait until no step reads the row of an ended request.

        Only a step of spec v2 does. SGLang waits for it too, later in the same iteration of the
        loop, before it launches the next step (``EagleDraftInput.prepare_for_decode``).
        """
        for batch, result in self._in_flight():
            start = getattr(result, "next_draft_input", None)
            if start is None or start.verify_done is None:
                continue
            # Otherwise no row was freed: do not wait, because a step takes long.
            if any(req.finished() or req.is_retracted for req in batch.reqs):
                start.verify_done.synchronize()

    def result_processed(self) -> None:
        """Send the delayed announcements: the oldest step in flight has finished, so its slots may
        be reused."""
        waiting, self._waiting = self._waiting, []
        for announce in waiting:
            announce()


def announce(
    entry: DecodeRequest,
    frame: DeltaFrame,
    pages: npt.NDArray[np.int32],
    state: npt.NDArray[np.int32] | None,
    manager: Any,
    writes: StepWrites,
) -> None:
    """Send prefill the ``frame``, the destination ``pages`` of the delta, shape (pages,), and the
    indices of its ``state``, later in the same iteration of the loop if the step in flight may
    write to them. From now on they and the metadata slot of ``entry`` belong to the transfer.
    """
    req, args = entry.req, manager.kv_args
    req.time_stats.set_decode_transfer_queue_entry_time()
    requested = len(pages) * sum(args.kv_item_lens)
    requested += 0 if state is None else len(state) * sum(args.state_item_lens)

    def notify() -> None:
        # Read ``entry.req``, because a request that starts over without prefill left a stand-in.
        if entry.req.finished_reason is not None:
            return  # given up: prefill was notified that no announcement comes
        # Take the time first: prefill may receive the announcement before this function returns.
        at = now()
        index, prefix = entry.metadata_buffer_index, frame.decode_prefix_len
        if is_fake(req):
            entry.kv_receiver.send_metadata(pages, index, state)
            return
        if manager.peer_takes_delta(bootstrap_addr(req)):
            entry.kv_receiver.announce(frame, pages, index, state)
        else:
            entry.kv_receiver.send_metadata(pages, index, state)
        STATS.count("decode_prefix_prompt_tokens", frame.prompt_tokens)
        STATS.count("decode_prefix_hit_tokens", prefix)
        STATS.count("kv_transfer_requested_bytes", requested)
        explanation = record_of(req).explanation
        explanation.requested_bytes = requested
        observability.record(
            "decode",
            lambda: Admitted(
                at=at,
                room=req.bootstrap_room,
                rid=str(req.rid),  # because msgspec does not encode subclasses of str
                prompt_tokens=frame.prompt_tokens,
                prefix_tokens=prefix,
                pages=pages.tolist(),
                state=[] if state is None else state.tolist(),
                reason=explanation.reason,
            ),
        )

    writes.after(pages, notify)


# ---- transfers ----


class Arrival(NamedTuple):
    """Polls one transfer. Complete when its KV *and* its metadata have arrived."""

    entry: DecodeRequest
    buffers: MetadataBuffers

    def poll(self) -> int:
        """Return the receiver's state, Success only with this room's metadata.

        Failed with another room's metadata, or without metadata until the transfer timeout: prefill
        has reported the end of the transfer, so nothing else would end the wait.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.environ import envs

        req, slot = self.entry.req, self.entry.metadata_buffer_index
        state = int(self.entry.kv_receiver.poll())
        if state != KVPoll.Success or is_fake(req):
            return state
        expected, record = req.bootstrap_room or EMPTY, record_of(req)
        found = int(self.buffers.bootstrap_room[slot, 0].item())
        if expected == EMPTY:
            record.failure = "room 0 cannot be distinguished from an empty metadata slot"
        elif found == EMPTY:
            record.without_metadata_since = record.without_metadata_since or time.monotonic()
            waited = time.monotonic() - record.without_metadata_since
            if waited < envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get():
                return int(KVPoll.Transferring)
            record.failure = (
                f"its KV has arrived, but metadata slot {slot} is still empty after {waited:.0f} s "
                "(SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
            )
            return int(KVPoll.Failed)
        elif found != expected:
            record.failure = f"metadata slot {slot} holds the metadata of room {found}"
        record.arrived = True
        return int(KVPoll.Failed) if record.failure else state


class RadixTransferQueue(DecodeTransferQueue):
    """Adds the KV of finished transfers to the decode tree. Stock behaviour without the flag."""

    queue: list[DecodeRequest]  # SGLang's; named for the type checker

    @cached_property
    def deferred(self) -> list[DeferredFree]:
        """Transfers that ended early, with pages that prefill may still write to."""
        return []

    @property
    def deferred_requests(self) -> list[Req]:
        """Answered requests that still own pages, a row, a metadata slot and a lock."""
        return [deferred.entry.req for deferred in self.deferred]

    @override
    def pop_transferred(self, rids_to_check: list[str] | None = None) -> list[Req]:
        if not getattr(self.tree_cache, "serves_decode", False):
            return super().pop_transferred(rids_to_check)
        if not self.queue and not self.deferred:
            return []
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.utils import poll_and_all_reduce

        # One reduction for transfers and deferred releases: a room's pages are freed once it is
        # drained on all ranks, so that their pools stay equal.
        arrivals = [Arrival(entry, self.metadata_buffers) for entry in self.queue]
        polls = poll_and_all_reduce([*arrivals, *self.deferred], self.gloo_group)
        votes = zip(self.deferred, polls[len(arrivals) :], strict=True)
        drained = [deferred for deferred, poll in votes if poll == KVPoll.Success]
        for deferred in drained:
            self.deferred.remove(deferred)
        waiting, transferred = [], []
        for entry, poll in zip(self.queue, polls, strict=False):
            req = entry.req
            if poll == KVPoll.Failed:
                self._give_up(entry)
            elif poll != KVPoll.Success or not self._commit_transfer_to_req(entry):
                waiting.append(entry)
            elif req.finished_reason is None:
                if not self.spec_algorithm.is_none():
                    own_draft_state(req)
                self._free_slot(entry)
                # SGLang counts only reasoning tokens that decode computes: count prefill's.
                self.scheduler._maybe_update_reasoning_tokens(req, req.output_ids[-1])
                self.tree_cache.adopt(req)
                transferred.append(req)
            else:  # SGLang refused it: its metadata were overwritten after the poll
                self._answer(req)
                self._free(entry)
        self.queue = waiting
        self._release_deferred(drained)
        return transferred

    def _release_deferred(self, drained: list[DeferredFree]) -> None:
        """Free deferred releases and count their outcomes. One that raises does not keep the others
        from being freed; its error is raised afterwards, because its memory is lost and ranks with
        different pools would hang in a later collective."""
        errors = []
        for deferred in drained:
            req = deferred.entry.req
            try:
                deferred.free(self._free)
            except Exception as error:
                errors.append(error)
                deferred.outcome = "error"
                logger.exception(
                    "request %s (bootstrap_room=%s): its deferred release failed, and this server "
                    "ends (bug; please report)",
                    req.rid,
                    req.bootstrap_room,
                )
            self.scheduler.telemetry.count("decode_deferred_kv_release", outcome=deferred.outcome)
        if errors:
            raise errors[0]

    def _give_up(self, entry: DecodeRequest) -> None:
        """Answer the client of a failed transfer, or let the request start over; defer the release
        of its memory."""
        from sglang.srt.disaggregation.utils import prepare_abort

        req, receiver = entry.req, entry.kv_receiver
        message = (
            f"Decode transfer failed for request rank={self.tp_rank} "
            f"rid={req.rid} bootstrap_room={req.bootstrap_room}"
        )
        # Call ``defer_free`` before ``failure_exception``, which clears the room. Warm-up receivers
        # and rooms that have arrived completely need no deferral.
        follows = hasattr(receiver, "defer_free") and not record_of(req).arrived
        deferred = (receiver.defer_free() if follows else None) or DeferredFree()
        try:
            receiver.failure_exception()
        except Exception as error:  # a receiver reports its failure by raising it
            message += f": {record_of(req).failure or error}"
        prealloc = self.scheduler.disagg_decode_prealloc_queue
        claims = self.tree_cache.claims
        if prealloc.answers.may_keep(entry):
            # The request starts over. A stand-in in the entry keeps its memory.
            entry.req = owner = remains(req)
            claims.left(req)
            claims.entered(
                owner, owner.last_node, owner.cache_protected_len, owner.kv_allocated_len
            )
            if self.scheduler.enable_metrics:
                self.scheduler.metrics_collector.increment_transfer_failed_reqs()
            prealloc.take_back(req, message)
        else:
            logger.error(message)
            prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
        # Defer even if this rank's room is drained: another rank's may not be, and all ranks free
        # together.
        deferred.keep(entry)
        self.deferred.append(deferred)
        claims.deferred(entry.req)
        if entry.req is req:
            self._answer(
                req
            )  # after the transfer's stage has ended: the answer says how long it took

    def _answer(self, req: Req) -> None:
        scheduler = self.scheduler
        scheduler.stream_output([req], req.return_logprob)
        if scheduler.enable_metrics:
            scheduler.metrics_collector.increment_transfer_failed_reqs()

    def _free(self, entry: DecodeRequest) -> None:
        """Free the memory of a failed transfer without adding its KV to the tree."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(entry.req, self.tree_cache, is_insert=False)
        self._free_slot(entry)

    def _free_slot(self, entry: DecodeRequest) -> None:
        """Clear and free the metadata slot."""
        index = entry.metadata_buffer_index
        self.metadata_buffers.bootstrap_room[index, 0] = EMPTY
        self.req_to_metadata_buffer_idx_allocator.free(index)

"""Flushes and release of memory on a decode server with the radix cache.

Contract: the scheduler's thread only. All ranks get each control request in the same step. A
release of memory makes one reduction, and is repeated in each step until no rank owns memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any  # Any: SGLang's control requests and answers

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import minimum

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
else:
    Scheduler = object

logger = logging.getLogger(__name__)


class FlushingScheduler(Scheduler):
    """Flushes and releases memory while pages are in deferred release or in transfer.

    SGLang flushes only an idle server, and marks its whole pool as free. It asserts that the flush
    at the end of a weight update succeeds, and that a server is idle when its memory is released.
    Both can be wrong here: pages in deferred release stay allocated until prefill can no longer
    write to them, and a paused server has transfers in progress.
    """

    #: True during a client's flush, which is refused under load. Any other flush ends a weight
    #: update, and SGLang asserts that it succeeds.
    _may_refuse = False
    #: Control request to release memory that waits until no request owns any.
    _waiting_release: Any = None

    @property
    def _deferred(self) -> Sequence[Req]:
        """Answered requests with pages that prefill may still write to."""
        return self.disagg_decode_transfer_queue.deferred_requests

    @override
    def flush_cache(self) -> Any:
        idle = self.is_fully_idle()
        if not self._deferred if idle else self._may_refuse:
            return super().flush_cache()
        # Requests still own pages, but no new request may hit KV of the old weights.
        self.tree_cache.retire()
        logger.info(
            "Cache flushed. Not freed: the pages of %d aborted transfers in deferred release%s",
            len(self._deferred),
            "" if idle else f", and those of requests in progress ({self._under_way()})",
        )
        return True

    @override
    def flush_cache_wrapped(self, recv_req: Any) -> Any:
        self._may_refuse = True
        try:
            answer = super().flush_cache_wrapped(recv_req)
        finally:
            self._may_refuse = False
        if answer is not None and not (answer.success or answer.message):
            answer.message = (
                f"Not flushed: requests are in progress ({self._under_way()}). Wait for them "
                "(?timeout=SECONDS), or abort them.\n"
            )
        return answer

    def _under_way(self) -> str:
        prealloc = self.disagg_decode_prealloc_queue
        turns = prealloc.local_turns
        counts = {
            "running": len(self.running_batch.reqs),
            "in local prefill": 0 if turns is None else len(turns.requests),
            "waiting to run": len(self.waiting_queue),
            "in transfer": len(self.disagg_decode_transfer_queue.queue),
            "without pages": len(prealloc.queue),
            "waiting for a grammar": len(self.grammar_manager.grammar_queue),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "a step"

    # ---- release of memory ----

    @override
    def release_memory_occupation(self, recv_req: Any) -> Any:
        answer = self._release(recv_req)
        if answer is None:
            # Otherwise a remote write could land in memory that was released. The loop continues
            # and sends the answer after the release (``retry_release``).
            self._waiting_release = recv_req
            logger.warning(
                "release of memory waits until nothing owns any: %d aborted transfers are in "
                "deferred release; %d requests were retracted; in progress: %s",
                len(self._deferred),
                len(self.disagg_decode_prealloc_queue.retracted_queue),
                self._under_way(),
            )
        return answer

    def retry_release(self) -> None:
        """Repeat a release of memory that waits, in each step; send its answer once it is done."""
        waiting = self._waiting_release
        answer = self._release(waiting)
        if answer is not None:
            self._waiting_release = None
            self.send_to_tokenizer.send_output(answer, waiting)

    @override
    def resume_memory_occupation(self, recv_req: Any) -> Any:
        from sglang.srt.managers.io_struct import (
            ReleaseMemoryOccupationReqOutput,
            ResumeMemoryOccupationReqOutput,
        )

        waiting, self._waiting_release = self._waiting_release, None
        if waiting is None:
            return super().resume_memory_occupation(recv_req)
        logger.warning(
            "resume of memory was requested before its release was possible (transfers or "
            "requests own pages): it was never released, both calls are answered, and the server "
            "continues"
        )
        self.send_to_tokenizer.send_output(ReleaseMemoryOccupationReqOutput(), waiting)
        return ResumeMemoryOccupationReqOutput()

    def _release(self, recv_req: Any) -> Any:
        """Release memory and return the answer, or None if a rank owns memory or is about to take
        some. One reduction: with data-parallel attention the ranks have different requests, and
        they wait for each other while memory is released."""
        # Do not count requests without pages on a server that is paused or has released some memory
        # already: they get no pages until it resumes, so the release would wait for ever.
        queue, blocked = self.disagg_decode_prealloc_queue, self._engine_paused or self.offload_tags
        resumes = bool(queue.retracted_queue) and not blocked  # in one of the next steps
        grammars = self.grammar_manager
        waiting = queue.queue, grammars.grammar_queue
        if blocked:
            queue.queue, grammars.grammar_queue = [], []
        try:
            owns_nothing = self.is_fully_idle() and not self._deferred and not resumes
            if minimum([int(owns_nothing)], self.tp_cpu_group) == [0]:
                return None
            return super().release_memory_occupation(recv_req)
        finally:
            queue.queue, grammars.grammar_queue = waiting

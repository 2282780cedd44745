"""Flushes, weight updates and the release of memory on a server whose aborted transfers own pages.

SGLang flushes an idle server only, by marking its whole pool as free. It asserts that the flush at
the end of a weight update succeeds, and that a server whose memory is released is idle. On a decode
server neither may count on that: pages of transfers that ended early stay taken until prefill can
write to them no more, and a paused server has transfers under way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any  # Any: SGLang's control requests and answers, handed on

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import minimum

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
else:
    Scheduler = object

logger = logging.getLogger(__name__)


class DecodeFlush(Scheduler):
    """Base of ``scheduler.DisaggScheduler``."""

    #: Whether a client asks for a flush, which is refused under load. All else that flushes is a
    #: weight update, and SGLang asserts that the flush at its end succeeds.
    _may_refuse = False
    #: A request to release memory that waits until nothing owns any.
    _waiting_release: Any = None

    # ---- flushes ----

    @override
    def flush_cache(self) -> Any:
        idle = self.is_fully_idle()
        if not self._deferred if idle else self._may_refuse:
            return super().flush_cache()
        # What was computed with the old weights must not be hit, whoever still owns pages.
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
            # A remote write must not land in memory that has been given away. The loop goes on,
            # and the answer is sent when it is done.
            self._waiting_release = recv_req
            logger.warning(
                "release of memory waits until nothing owns any: %d aborted transfers are in "
                "deferred release; %d requests were retracted; in progress: %s",
                len(self._deferred),
                len(self.disagg_decode_prealloc_queue.retracted_queue),
                self._under_way(),
            )
        return answer

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
        """Release memory if no rank owns or is about to take any, else None; one collective, for
        all ranks get a release in the same step. With data parallel attention their requests
        differ, and SGLang has them wait for each other while memory is released."""
        queue, paused = self.disagg_decode_prealloc_queue, self._engine_paused
        resumes = bool(queue.retracted_queue) and not paused  # in one of the next steps
        # Paused, a server may have requests that get no pages until it goes on: whoever releases
        # memory in between would wait for ever if they counted.
        waiting = queue.queue
        queue.queue = [] if paused else waiting
        try:
            owns_nothing = self.is_fully_idle() and not self._deferred and not resumes
            if minimum([int(owns_nothing)], self.tp_cpu_group) == [0]:
                return None
            return super().release_memory_occupation(recv_req)
        finally:
            queue.queue = waiting

    def release_when_idle(self) -> None:
        """Once a step while a release waits: do it, if nothing owns memory any more."""
        done = self._release(self._waiting_release)
        if done is not None:
            waiting, self._waiting_release = self._waiting_release, None
            self.send_to_tokenizer.send_output(done, waiting)

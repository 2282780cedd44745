"""The decode scheduler: start-up checks, aborts, idleness, flushes, metrics and log fields.

No other server's scheduler has this mixin (``when`` in ``patchset/table.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any  # Any: gauges; what protocols.py lacks of SGLang

from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.claims import private_tokens
from sglang.srt.disaggregation.delta.decode.record import is_fake, record_of
from sglang.srt.disaggregation.delta.decode.recurrent import serve_states
from sglang.srt.disaggregation.delta.decode.speculation import check_draft_pool, draft_pool
from sglang.srt.disaggregation.delta.namespaces import NamespacedScheduler
from sglang.srt.disaggregation.delta.observability import STATS, Telemetry
from sglang.srt.disaggregation.delta.pages import RECURRENT, has_other_state
from sglang.srt.disaggregation.delta.rank_agreement import minimum
from sglang.srt.disaggregation.delta.unserved import named_by
from sglang.srt.patchset.flags import FLAG

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.managers.utils import GenerationBatchResult
else:
    TokenizerManager = object

logger = logging.getLogger(__name__)


#: Seconds between two updates of the gauges.
EVERY_S = 1.0


def readings(scheduler: DisaggScheduler) -> dict[str, int]:
    """The value of each gauge now. Every token of the pool is counted in one of them at most."""
    deferred = scheduler.disagg_decode_transfer_queue.deferred_requests
    return {
        "kv_evictable_tokens": scheduler.tree_cache.evictable_size(),
        "num_decode_deferred_kv_release_reqs": len(deferred),
        "decode_deferred_kv_release_tokens": private_tokens(deferred, scheduler.page_size),
    }


STATS_LOGGER = "sglang.srt.observability.scheduler_metrics_mixin"


class DecodeLineFields(logging.Filter):
    """Adds what the tree saved since the last line to the end of SGLang's "Decode batch" lines."""

    def __init__(self) -> None:
        super().__init__()
        self._last = STATS.totals.copy()

    def filter(self, record: logging.LogRecord) -> bool:
        """Always lets the record pass."""
        if isinstance(record.msg, str) and record.msg.startswith("Decode batch"):
            since = STATS.since(self._last)
            hit = since["decode_prefix_hit_tokens",]
            missed = since["decode_prefix_prompt_tokens",] - hit
            requested = since["kv_transfer_requested_bytes",]
            record.msg += (
                f", #prefix-hit-token: {hit:.0f}, #prefix-miss-token: {missed:.0f}"
                f", kv requested (MB): {requested / 1e6:.2f}"
            )
        return True


class DisaggScheduler(NamespacedScheduler):
    """Attaches the decode tree and the counters to SGLang's scheduler.

    SGLang flushes an idle server only, by marking its whole pool as free. It asserts that the flush
    at the end of a weight update succeeds, and that a server whose memory is released is idle. Here
    neither may count on that: pages of transfers that ended early stay taken until prefill can
    write to them no more, and a paused server has transfers under way.
    """

    # Owned by the upstream class; named for the type checker.
    waiting_queue: list[Req]
    last_batch: ScheduleBatch | None
    #: What this server counts; tests have one for each.
    telemetry: Telemetry = STATS
    _gauges_at = 0.0
    #: Whether a client asks for a flush, which is refused under load. All else that flushes is a
    #: weight update, and SGLang asserts that the flush at its end succeeds.
    _may_refuse = False
    #: A request to release memory that waits until nothing owns any.
    _waiting_release: Any = None

    @property
    def _deferred(self) -> Sequence[Req]:
        """Requests that were answered, and whose pages prefill may still write to."""
        return self.disagg_decode_transfer_queue.deferred_requests

    @property
    def is_hybrid_ssm(self) -> bool:
        """False: SGLang builds and checks a plain tree, also for a model with recurrent state."""
        return False

    @is_hybrid_ssm.setter
    def is_hybrid_ssm(self, value: bool) -> None:
        """Ignore the value that SGLang assigns."""

    @override
    def init_req_max_new_tokens(self, req: Req) -> None:
        super().init_req_max_new_tokens(req)
        record_of(req).generation = self.tree_cache.generation

    @override
    def abort_request(self, recv_req: AbortReq) -> None:
        # Requests that wait but have sent tokens before they were retracted end here. SGLang tells
        # the tokenizer of such an abort directly. That can overtake tokens which are still with the
        # detokenizer; they would bring the request back to life, and its client would wait for
        # ever. So the end goes the way of the tokens.
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache.common import release_kv_cache

        queue, wanted = self.disagg_decode_prealloc_queue, named_by(recv_req)
        retracted = [req for req in queue.retracted_queue if wanted(req)]
        resumed = [req for req in self.waiting_queue if wanted(req) and req.send_token_offset]
        queue.retracted_queue = [req for req in queue.retracted_queue if not wanted(req)]
        for req in retracted:
            req.__dict__.pop("kv_cache_cpu", None)
            record_of(req).drop_copies()
        self.waiting_queue = [req for req in self.waiting_queue if req not in resumed]
        for req in resumed:
            release_kv_cache(req, self.tree_cache)
        for req in (*retracted, *resumed):
            req.finished_reason = FINISH_ABORT()
            self.stream_output([req], req.return_logprob)
        super().abort_request(recv_req)

    @override
    def init_cache_with_memory_pool(self) -> None:
        super().init_cache_with_memory_pool()
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        if has_other_state(pool):
            raise ValueError(
                f"{FLAG} does not support models with a second KV pool "
                f"({type(pool).__name__}: sliding window); remove the flag."
            )
        if hasattr(pool, RECURRENT):
            serve_states(pool, self.req_to_token_pool)
        if not hasattr(self.tree_cache, "serve_decode"):
            raise ValueError(
                f"{FLAG} needs SGLang's plain radix tree, but this server built a "
                f"{type(self.tree_cache).__name__}; remove the flag, or the option that "
                "chose that cache."
            )
        draft = draft_pool(self)
        if draft is not None:
            check_draft_pool(pool, draft)
            logger.info(
                "decode radix cache with speculation: %s (spec v%d), %d steps, %d draft tokens; "
                "the pages of the tree also hold the KV of the draft model",
                self.server_args.speculative_algorithm,
                2 if self.enable_overlap else 1,
                self.server_args.speculative_num_steps,
                self.server_args.speculative_num_draft_tokens,
            )
        self.tree_cache.serve_decode(draft)
        logger.info(
            "decode radix cache is on: page size %d, at most %d reserved tokens a request",
            self.page_size,
            self.server_args.num_reserved_decode_tokens,
        )

    @override
    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        logging.getLogger(STATS_LOGGER).addFilter(DecodeLineFields())
        if self.current_scheduler_metrics_enabled:
            STATS.bind(self.metrics_collector.labels, "decode")

    @override
    def process_decode_queue(self) -> None:
        if not self.last_batch:  # otherwise its result answers health checks
            self.maybe_send_health_check_signal()
        super().process_decode_queue()
        if self.disagg_decode_prealloc_queue.retracted_queue:
            # Stock polls neither handshakes nor transfers while a retracted request waits. But
            # failed requests have to be answered, and the missing memory may be a transfer's.
            self.disagg_decode_prealloc_queue.pop_preallocated()
            self.waiting_queue.extend(self.disagg_decode_transfer_queue.pop_transferred())
        exports = self.current_scheduler_metrics_enabled
        if exports and time.monotonic() - self._gauges_at >= EVERY_S:
            self._gauges_at = time.monotonic()
            for name, value in readings(self).items():
                STATS.set(name, value)
        waiting = self._waiting_release
        done = self._release(waiting) if waiting is not None else None
        if done is not None:
            self._waiting_release = None
            self.send_to_tokenizer.send_output(done, waiting)

    @override
    def get_new_prebuilt_batch(self) -> ScheduleBatch | None:
        count = self.may_join()
        later, self.waiting_queue = self.waiting_queue[count:], self.waiting_queue[:count]
        batch = super().get_new_prebuilt_batch()
        self.waiting_queue = [*self.waiting_queue, *later]
        return batch

    def may_join(self) -> int:
        """How many of the first in the waiting queue may join the running batch now.

        Nobody overtakes one whose adapter has no room: it has when enough of the others ended.
        """
        if not self.enable_lora:
            return len(self.waiting_queue)
        together = {req.lora_id for req in self.running_batch.reqs if not req.finished()}
        for count, req in enumerate(self.waiting_queue):
            together.add(req.lora_id)
            if not self.adapters_fit(together):
                return count
        return len(self.waiting_queue)

    def adapters_fit(self, adapters: set[str | None]) -> bool:
        """Whether the LoRA adapters of a batch have room in memory together. SGLang ends a server
        with more; its own check is where prompts are batched, which a decode server never comes
        to."""
        if not self.enable_lora:
            return True
        return bool(self.tp_worker.model_runner.lora_manager.validate_lora_batch(adapters))

    @override
    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        # The tokens that a grammar allows follow from the result of the step before. SGLang waits
        # for it with spec v2, but not in its loop for decode servers.
        if self.last_batch and batch.is_spec_v2 and batch.has_grammar:
            self.last_batch = None  # the loop looks for no second result in this turn
            self.process_batch_result(*self.result_queue.popleft())
        return super().run_batch(batch, pp_proxy_tensors)

    @override
    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        super().process_batch_result(batch, result)
        self.disagg_decode_prealloc_queue.step_writes.result_processed()

    @override
    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        # A pause in the mode "retract" forgets to say that these requests were retracted. Stock
        # would ask prefill for KV that it gave away long ago, although it lies on the CPU.
        is_retracted = is_retracted or bool(req.is_retracted)
        rooms = self.disagg_decode_prealloc_queue.kv_manager.request_status
        if req.bootstrap_room in rooms and not is_retracted and not is_fake(req):
            # What arrives would count for both, and KV that was never written would enter the tree.
            from sglang.srt.disaggregation.utils import prepare_abort

            message = f"bootstrap_room {req.bootstrap_room} is in use by another request"
            prepare_abort(req, f"Request {req.rid}: {message}", HTTPStatus.BAD_REQUEST)
            self.stream_output([req], req.return_logprob)
            return
        super()._add_request_to_queue(req, is_retracted)

    @override
    def get_load(self, _: Any = None) -> Any:
        load = super().get_load(_)
        # Their pages are in use, and were counted as such already.
        counted = [*self.waiting_queue, *self.disagg_decode_transfer_queue.queue]
        load.num_tokens -= sum(entry.seqlen for entry in counted)
        return load

    @override
    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        # SGLang makes a request of a health check where nothing runs, which would queue for memory
        # that transfers own. With any request here the loop answers it (process_decode_queue).
        return bool(
            self._nothing_waits and not self.offload_tags
            if for_health_check
            else super().is_fully_idle()
        )

    @override
    def self_check_during_idle(self) -> None:
        if not self._deferred:  # whose pages are neither free nor in a queue that it knows
            super().self_check_during_idle()

    @override
    def maybe_sleep_on_idle(self) -> None:
        # As on prefill: what ends a deferred free does not wake the sleeper.
        if self.idle_sleeper is None or self._nothing_waits:
            super().maybe_sleep_on_idle()

    @property
    def _nothing_waits(self) -> bool:
        """Idle, also by what stock does not count: retracted requests and deferred frees."""
        waits = self.disagg_decode_prealloc_queue.retracted_queue or self._deferred
        return bool(self.is_fully_idle() and not waits)

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
        # Paused, or without other memory, a server may have requests that get no pages until it
        # goes on: whoever releases memory in between would wait for ever if they counted.
        queue, held = self.disagg_decode_prealloc_queue, self._engine_paused or self.offload_tags
        resumes = bool(queue.retracted_queue) and not held  # in one of the next steps
        grammars = self.grammar_manager
        waiting = queue.queue, grammars.grammar_queue
        if held:
            queue.queue, grammars.grammar_queue = [], []
        try:
            owns_nothing = self.is_fully_idle() and not self._deferred and not resumes
            if minimum([int(owns_nothing)], self.tp_cpu_group) == [0]:
                return None
            return super().release_memory_occupation(recv_req)
        finally:
            queue.queue, grammars.grammar_queue = waiting


class RadixTokenizer(TokenizerManager):
    """Names our flag where SGLang advises ``--disable-radix-cache``, which the flag refuses."""

    @override
    async def _tokenize_one_request(self, obj: Any) -> Any:
        wanted = getattr(self.server_args, "disaggregation_decode_enable_radix_cache", False)
        if wanted and obj.input_embeds is not None:
            raise ValueError(
                f"input_embeds cannot be served by a decode server with {FLAG}: SGLang accepts "
                "them only without a radix cache. Send them to a decode server without the flag "
                "and a prefill server with --disable-radix-cache."
            )
        return await super()._tokenize_one_request(obj)

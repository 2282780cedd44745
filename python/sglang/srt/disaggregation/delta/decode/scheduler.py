"""The scheduler of a decode server with the radix cache: start-up checks, aborts, idleness,
metrics and log fields.

Contract: the scheduler's thread only. All ranks call ``process_decode_queue`` together, and get
each control request (pause, abort) in the same step.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any  # Any: SGLang's control requests and results

from typing_extensions import override

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.decode.claims import private_tokens
from sglang.srt.disaggregation.delta.decode.flush import FlushingScheduler
from sglang.srt.disaggregation.delta.decode.recurrent import serve_states
from sglang.srt.disaggregation.delta.decode.request import is_fake, record_of
from sglang.srt.disaggregation.delta.decode.speculation import check_draft_pool, draft_pool
from sglang.srt.disaggregation.delta.namespaces import NamespacedScheduler
from sglang.srt.disaggregation.delta.observability import STATS, Ended, Telemetry, now
from sglang.srt.disaggregation.delta.pages import RECURRENT, has_other_state
from sglang.srt.disaggregation.delta.unserved import named_by
from sglang.srt.patchset.environment import EXPLAIN
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
GAUGE_INTERVAL_S = 1.0


def readings(scheduler: DisaggScheduler) -> dict[str, int]:
    """Return the value of each gauge. No token of the pool is counted in two of them."""
    deferred = scheduler.disagg_decode_transfer_queue.deferred_requests
    return {
        "kv_evictable_tokens": scheduler.tree_cache.evictable_size(),
        "num_decode_deferred_kv_release_reqs": len(deferred),
        "decode_deferred_kv_release_tokens": private_tokens(deferred, scheduler.page_size),
    }


#: SGLang's logger of "Decode batch" lines.
STATS_LOGGER = "sglang.srt.observability.scheduler_metrics_mixin"


class DecodeLineFields(logging.Filter):
    """Appends the prefix hits and misses since the last line to SGLang's "Decode batch" lines."""

    def __init__(self) -> None:
        super().__init__()
        self._last = STATS.totals.copy()

    def filter(self, record: logging.LogRecord) -> bool:
        """Append the fields. Return True, so that every record is logged."""
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


class DisaggScheduler(FlushingScheduler, NamespacedScheduler):
    """Attaches the decode tree and the counters to SGLang's scheduler."""

    # SGLang's; named for the type checker.
    waiting_queue: list[Req]
    last_batch: ScheduleBatch | None
    #: Counters of this server. Tests give each server its own.
    telemetry: Telemetry = STATS
    #: When the gauges were last updated (monotonic seconds).
    _gauges_at = 0.0

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
        # End waiting requests like running ones. SGLang would notify the tokenizer directly. The
        # notice can overtake tokens that a retracted request has sent, and these would make the
        # tokenizer wait for the request for ever; the event log would have no end of it.
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache.common import release_kv_cache

        queue, wanted = self.disagg_decode_prealloc_queue, named_by(recv_req)
        retracted = [req for req in queue.retracted_queue if wanted(req)]
        waiting = [req for req in self.waiting_queue if wanted(req)]
        queue.retracted_queue = [req for req in queue.retracted_queue if not wanted(req)]
        for req in retracted:
            req.__dict__.pop("kv_cache_cpu", None)
            record_of(req).drop_copies()
        self.waiting_queue = [req for req in self.waiting_queue if not wanted(req)]
        for req in waiting:
            release_kv_cache(req, self.tree_cache)
        ended = [*retracted, *waiting]
        for req in ended:
            req.finished_reason = FINISH_ABORT()
        if ended:
            self.stream_output(ended, any(req.return_logprob for req in ended))
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
            STATS.bind(self.metrics_collector.labels, "decode", "both")

    @override
    def process_decode_queue(self) -> None:
        if not self.last_batch:  # otherwise its result answers health checks
            self.maybe_send_health_check_signal()
        super().process_decode_queue()
        if self.disagg_decode_prealloc_queue.retracted_queue:
            # SGLang polls neither handshakes nor transfers while a retracted request waits. Poll
            # them here, because failed requests must be answered and transfers free memory.
            self.disagg_decode_prealloc_queue.pop_preallocated()
            self.waiting_queue.extend(self.disagg_decode_transfer_queue.pop_transferred())
        exports = self.current_scheduler_metrics_enabled
        if exports and time.monotonic() - self._gauges_at >= GAUGE_INTERVAL_S:
            self._gauges_at = time.monotonic()
            for name, value in readings(self).items():
                STATS.set(name, value)
        if self._waiting_release is not None:
            self.retry_release()

    @override
    def get_new_prebuilt_batch(self) -> ScheduleBatch | None:
        count = self.may_join()
        later, self.waiting_queue = self.waiting_queue[count:], self.waiting_queue[:count]
        batch = super().get_new_prebuilt_batch()
        self.waiting_queue = [*self.waiting_queue, *later]
        if batch is not None:
            # As SGLang does after a prefill batch, because otherwise a router learns of the new
            # pages only with the next "Decode batch" line.
            self._publish_kv_events()
        return batch

    def may_join(self) -> int:
        """Return the number of waiting requests, from the first, that may join the running batch.

        A request with an adapter that does not fit blocks the queue until enough requests end.
        """
        if not self.enable_lora:
            return len(self.waiting_queue)
        adapters = {req.lora_id for req in self.running_batch.reqs if not req.finished()}
        for count, req in enumerate(self.waiting_queue):
            adapters.add(req.lora_id)
            if not self.adapters_fit(adapters):
                return count
        return len(self.waiting_queue)

    def adapters_fit(self, adapters: set[str | None]) -> bool:
        """Return True if the LoRA adapters of a batch fit in memory together. More would end the
        server, and SGLang checks it only where it batches prompts, which decode does not."""
        if not self.enable_lora:
            return True
        return bool(self.tp_worker.model_runner.lora_manager.validate_lora_batch(adapters))

    @override
    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        # Process the last step's result first, because the tokens that a grammar allows follow from
        # it. SGLang does this with spec v2, but not in its loop for decode servers.
        if self.last_batch and batch.is_spec_v2 and batch.has_grammar:
            self.last_batch = None  # so that the loop does not process it again
            self.process_batch_result(*self.result_queue.popleft())
        return super().run_batch(batch, pp_proxy_tensors)

    @override
    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        super().process_batch_result(batch, result)
        self.disagg_decode_prealloc_queue.step_writes.result_processed()

    @override
    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        # A pause in the mode "retract" does not pass that these requests were retracted. SGLang
        # would request their KV from prefill, which has freed it, although a copy is on the CPU.
        is_retracted = is_retracted or bool(req.is_retracted)
        rooms = self.disagg_decode_prealloc_queue.kv_manager.request_status
        if req.bootstrap_room in rooms and not is_retracted and not is_fake(req):
            # Refuse it, because an arrival would count for both requests, and KV that was never
            # written would enter the tree.
            from sglang.srt.disaggregation.utils import prepare_abort

            message = f"bootstrap_room {req.bootstrap_room} is in use by another request"
            prepare_abort(req, f"Request {req.rid}: {message}", HTTPStatus.BAD_REQUEST)
            self.stream_output([req], req.return_logprob)
            return
        super()._add_request_to_queue(req, is_retracted)

    @cached_property
    def _explains(self) -> bool:
        return EXPLAIN.read()

    @override
    def _get_cached_tokens_details(self, req: Req) -> dict[str, Any] | None:
        details = super()._get_cached_tokens_details(req)
        # Called for each part of an answer that is sent; the last part has the explanation.
        if not req.finished() or is_fake(req):
            return details
        explanation, finish = record_of(req).explanation.values(), req.finished_reason.to_json()
        observability.record(
            "decode",
            lambda: Ended(
                at=now(),
                room=req.bootstrap_room,
                rid=str(req.rid),
                finish=finish["type"],
                error=finish.get("message") or "",
                explanation=explanation,
            ),
        )
        return (
            {"device": 0, "host": 0, **(details or {}), **explanation}
            if self._explains
            else details
        )

    @override
    def get_load(self, _: Any = None) -> Any:
        load = super().get_load(_)
        # Subtract their tokens, because their pages are allocated and were counted already.
        counted = [*self.waiting_queue, *self.disagg_decode_transfer_queue.queue]
        load.num_tokens -= sum(entry.seqlen for entry in counted)
        return load

    @override
    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        # SGLang turns a health check on an idle server into a request, which would wait for memory
        # that transfers own. While any request is here, ``process_decode_queue`` answers it.
        return bool(
            self._nothing_waits and not self.offload_tags
            if for_health_check
            else super().is_fully_idle()
        )

    @override
    def self_check_during_idle(self) -> None:
        # SGLang's check would report pages in deferred release as leaked.
        if not self.disagg_decode_transfer_queue.deferred:
            super().self_check_during_idle()

    @override
    def maybe_sleep_on_idle(self) -> None:
        # Do not sleep during a deferred release, because its end does not wake the sleeper.
        if self.idle_sleeper is None or self._nothing_waits:
            super().maybe_sleep_on_idle()

    @property
    def _nothing_waits(self) -> bool:
        """True if idle, also without the retracted requests and deferred releases that SGLang does
        not count."""
        deferred = self.disagg_decode_transfer_queue.deferred
        waits = self.disagg_decode_prealloc_queue.retracted_queue or deferred
        return bool(self.is_fully_idle() and not waits)


class RadixTokenizer(TokenizerManager):
    """Names our flag in the error for input_embeds. SGLang's text advises a flag that ours
    refuses."""

    @override
    async def _tokenize_one_request(self, obj: Any) -> Any:
        has_flag = getattr(self.server_args, "disaggregation_decode_enable_radix_cache", False)
        if has_flag and obj.input_embeds is not None:
            raise ValueError(
                f"input_embeds cannot be served by a decode server with {FLAG}: SGLang accepts "
                "them only without a radix cache. Send them to a decode server without the flag "
                "and a prefill server with --disable-radix-cache."
            )
        return await super()._tokenize_one_request(obj)

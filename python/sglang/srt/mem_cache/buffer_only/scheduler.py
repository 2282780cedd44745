"""The scheduler over a buffer-only cache: start check, prefetch, idle, what a response reports, and
the weights that keys of the store name.

No other server's scheduler has this mixin (``when`` in ``patchset/table.py``).

Weights may come in many updates of some tensors each, all but the last of which leave the cache as
it is. The fingerprint, a second or so for a large model, is taken once after those: when the cache
is flushed. Until then keys are this server's alone.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: requests and answers of SGLang's, handed on

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import gathered
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace, fingerprint, model_identity
from sglang.srt.mem_cache.buffer_only.nodes import image_key
from sglang.srt.mem_cache.buffer_only.tree import MODE_FLAG

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs
else:
    Scheduler = PrefillAdder = object

logger = logging.getLogger(__name__)

#: Between two steps without a batch, while something is under way to the store or from it.
NAP_S = 0.0005


class ReadyPreemption(PrefillAdder):
    """Preempts running requests only for a request whose prefetch has ended. SGLang checks the
    prefetch after it has preempted."""

    #: The number of preempted requests; ranks of those that still ran then, lowest first; and the
    #: tokens that the first ones of these free, by their number.
    _running: tuple[int, list[int], list[float]] = (-1, [], [])

    @override
    def preempt_to_schedule(self, req: Req, server_args: ServerArgs) -> bool:
        if (
            hasattr(self.tree_cache, "buffer")
            and self._can_preempt(req, server_args)
            and not self.tree_cache.check_prefetch_progress(req.rid)
        ):
            return True  # SGLang then makes the same check, and skips the request
        return bool(super().preempt_to_schedule(req, server_args))

    def _can_preempt(self, req: Req, server_args: ServerArgs) -> bool:
        """Return whether SGLang would preempt for ``req``: if it outranks running requests that
        free enough tokens. Another request is not checked, because its time limit would start."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        sign = -1 if server_args.schedule_low_priority_values_first else 1
        preempted = len(self.preempt_list)
        if self._running[0] != preempted:
            running = sorted(
                (sign * one.priority, self._get_running_request_total_token_offset(one))
                for one in self.running_batch.reqs
                if one not in self.preempt_list and not one.finished()
            )
            freed = [0.0, *itertools.accumulate(tokens for _, tokens in running)]
            self._running = preempted, [rank for rank, _ in running], freed
        rank = sign * req.priority - self.priority_scheduling_preemption_threshold
        outranked = bisect.bisect_left(self._running[1], rank)
        most_new = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        freed_tokens = self.rem_total_tokens + self._running[2][outranked]
        return outranked > 0 and bool(req.extend_input_len + most_new <= freed_tokens)


class BufferOnlyScheduler(Scheduler):
    """Drives the pipelines of the tree in the scheduler's steps."""

    #: Whether the weights in memory may be others than those that the keys name.
    _weights_changed: bool = False
    _request_namespace: str | None = None
    _store_ignored: bool = False
    #: When a flush that waits is made all the same; agreed milliseconds.
    _flush_due_ms: int | None = None
    _last_result: float = 0.0

    @cached_property
    def _launched(self) -> deque[float]:
        """When the batches were launched whose results are not processed."""
        return deque(maxlen=4)

    @override
    def init_cache_with_memory_pool(self) -> None:
        super().init_cache_with_memory_pool()
        if getattr(self.tree_cache, "buffer", None) is None:
            raise ValueError(
                f"{MODE_FLAG} buffer_only needs SGLang's HiRadixCache, but this server built a "
                f"{type(self.tree_cache).__name__}. Remove {MODE_FLAG}, or the option that chose "
                "that cache."
            )
        self.name_keys()

    @override
    def run_event_loop(self) -> None:
        # Made after the cache: what is written to the store must have been computed on it.
        self.tree_cache.forward_stream = getattr(self, "forward_stream", None)
        self.tree_cache.room = self._admission_room
        # Python's first full collection would look through all that the start left, while every
        # request stands still.
        gc.collect()
        gc.freeze()
        super().run_event_loop()

    @override
    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        # This release drops ``extra_key`` and ``cache_salt`` when it builds its Req. A store that
        # is shared by servers and tenants must keep such namespaces apart.
        self._request_namespace = recv_req.extra_key
        try:
            super().handle_generate_request(recv_req)
        finally:
            self._request_namespace = None

    @override
    def init_req_max_new_tokens(self, req: Req) -> None:
        super().init_req_max_new_tokens(req)  # the first thing that is done with every new Req
        if self._request_namespace:
            # SGLang's /generate also hands on a list of texts.
            req.extra_key = f"{self._request_namespace}{req.lora_id or ''}"

    @override
    def _prefetch_kvcache(self, req: Req) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        if self.model_config.is_multimodal:  # before the first look at the tree
            req.extra_key = image_key(req)
        tokens = [*req.origin_input_ids, *req.output_ids]
        if req.return_logprob and req.logprob_start_len >= 0:
            # SGLang takes no prefix beyond there: the request would wait for what it computes.
            tokens = tokens[: req.logprob_start_len + 1]
        self.tree_cache.request_prefetch(req.rid, RadixKey(tokens, req.extra_key))

    @override
    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        prefetches = self.tree_cache.buffer.prefetches
        # On a prefill server they wait for their decode server first.
        bootstrap = getattr(self, "disagg_prefill_bootstrap_queue", None)
        reqs = [*self.waiting_queue, *(bootstrap.queue if bootstrap is not None else ())]
        prefetches.in_line([req.rid for req in reqs], self._is_full)
        running, before = self.running_batch, self.running_batch.reqs
        batch = super().get_new_batch_prefill()
        if batch is None and running.reqs is not before:
            # SGLang queues preempted requests again only if it admits another one.
            for req in [one for one in before if one not in running.reqs]:
                self._add_request_to_queue(req)
        if batch is not None:
            for req in batch.reqs:
                prefetches.cancel(req.rid)  # it runs
                tokens = self.tree_cache.take_storage_hit(req.rid)
                # SGLang counts every cached token that is in the device tree as a device hit. What
                # was evicted again since it was fetched, and what a retracted request finds, is not
                # counted.
                if not req.retracted_stain:
                    storage = min(tokens, req.cached_tokens_device)
                    req.cached_tokens_device -= storage
                    req.cached_tokens_storage += storage
        return batch

    @property
    def _is_full(self) -> bool:
        """Whether SGLang admits nobody in this step: by its count of requests, since it refused
        one for want of room, or since a request that is computed in chunks takes all of this
        one."""
        running, chunked = self.running_batch, self.chunked_req
        places = self.get_num_allocatable_reqs(len(running.reqs)) - (chunked is not None)
        is_full = running.batch_is_full or places <= 0
        if is_full and not self.enable_priority_preemption:
            return True
        if chunked is None or self.chunked_prefill_size is None:
            return False
        rest = len(chunked.origin_input_ids) + len(chunked.output_ids) - len(chunked.prefix_indices)
        decoding = len(running.reqs) if self.is_mixed_chunk else 0
        return bool(self.chunked_prefill_size - decoding - rest < self.page_size)

    def _admission_room(self) -> int:
        """Tokens that a request could take which is admitted now, by SGLang's own count: with what
        those that run are expected to take."""
        from sglang.srt.managers.schedule_policy import PrefillAdder

        adder = PrefillAdder(
            rem_input_tokens=0,
            rem_chunk_tokens=None,
            new_token_ratio=self.new_token_ratio,
            running_batch=self.running_batch,
            tree_cache=self.tree_cache,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            page_size=self.page_size,
        )
        room, chunked = adder.rem_total_tokens, self.chunked_req
        if chunked is not None:
            room -= len(chunked.origin_input_ids) - len(chunked.prefix_indices)
        return int(room)

    @override
    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        self._launched.append(time.monotonic())
        # A draft model's verification writes to more than these.
        plain = self.spec_algorithm.is_none()
        self.tree_cache.written = batch.out_cache_loc if plain else None
        if batch.forward_mode.is_decode():
            # It still has its prefill's, of which another copy may have been made since.
            batch.hicache_consumer_index = -1
        if not self.is_generation:
            # SGLang does so for models that generate alone: the layers of others would be computed
            # before what is loaded for them is there.
            self.tp_worker.set_hicache_consumer(batch.hicache_consumer_index)
        return super().run_batch(batch, pp_proxy_tensors)

    @override
    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        super().process_batch_result(batch, result)
        if self._launched:
            # A batch that was launched under another one begins when that has ended.
            now, began = time.monotonic(), max(self._launched.popleft(), self._last_result)
            self._last_result = now
            extends = batch.forward_mode.is_extend() and batch.prefill_stats is not None
            tokens = batch.prefill_stats.log_input_tokens if extends else 0
            self.tree_cache.buffer.ran(now - began, tokens)

    @override
    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        idle = bool(super().is_fully_idle(for_health_check))
        if idle and not (for_health_check or self._store_ignored):
            return not self.tree_cache.buffer.busy
        return idle

    @contextmanager
    def _without_the_store(self) -> Iterator[None]:
        """Idle is, meanwhile, who has no requests: what is under way to the store and from it is
        nothing that a flush has to wait for, since the tree can forget it at any time."""
        before, self._store_ignored = self._store_ignored, True
        try:
            yield
        finally:
            self._store_ignored = before

    @override
    def flush_cache(self) -> Any:
        with self._without_the_store():
            flushed = super().flush_cache()
        if not flushed or not self._weights_changed:
            return flushed
        # With data parallel attention each rank flushes when it is idle, and not all at a time.
        # Memory that was released cannot be read.
        if not self.server_args.enable_dp_attention and "weights" not in self.offload_tags:
            self.name_keys()
        return flushed

    @override
    def _check_pending_flush(self) -> None:
        # One that may wait does so for what is still to be written, but is not refused for it. Its
        # time is over in the same step on all ranks: a rank that forgot its tree a step before the
        # others would start other transfers than they do.
        if self._pending_flush is None:
            self._flush_due_ms = None
            super()._check_pending_flush()
            return
        now_ms = self.tree_cache.buffer.context.now_ms
        if self._flush_due_ms is None:
            timeout_s = float(self._pending_flush[0].timeout_s or 0.0)
            self._flush_due_ms = now_ms + int(timeout_s * 1000)
        if now_ms >= self._flush_due_ms or self._engine_paused:  # no step while it is paused
            with self._without_the_store():
                super()._check_pending_flush()
        elif self.is_fully_idle():
            super()._check_pending_flush()
        if self._pending_flush is None:
            self._flush_due_ms = None

    @override
    def release_memory_occupation(self, recv_req: Any) -> Any:
        with self._without_the_store():
            if not recv_req.tags or "kv_cache" in recv_req.tags:
                self.flush_cache()  # ends the copies before their memory is taken away
            return super().release_memory_occupation(recv_req)

    @override
    def maybe_sleep_on_idle(self) -> None:
        if self.tree_cache.buffer.busy:
            # A sleeping scheduler would not see that a copy or the store has ended; one that looks
            # all the time would keep their threads from the interpreter.
            time.sleep(NAP_S)
        else:
            super().maybe_sleep_on_idle()
            self.tree_cache.buffer.is_idle = True

    # ---- new weights ----

    def name_keys(self) -> None:
        """Name the keys by the weights that are in memory now; on all ranks at the same time."""
        start = time.monotonic()
        runner, tree = self.tp_worker.model_runner, self.tree_cache
        config = self.model_config.hf_config.to_dict()
        # All ranks of the server: with data parallel attention, one of its groups alone does not
        # hold all experts.
        ranks = gathered((fingerprint(runner.model), uuid.uuid4().hex), self.tp_cpu_group)
        model = model_identity(config, (weights for weights, _ in ranks))
        pool = tree.pool_identity()
        self._weights_changed = False
        tree.buffer.use(Namespace.of({"model": model, "pool": pool}), nonce=ranks[0][1])
        logger.info(
            "HiCache keys are those of weights %s, configuration %s and pages %s (found in %.1f s; "
            "servers read each other's pages where all three are equal): namespace %s",
            Namespace.of({"weights": model["weights"]}),
            model["config"][:12],
            Namespace.of(pool),
            time.monotonic() - start,
            tree.buffer.context.store.namespace,
        )

    @override
    def update_weights_from_disk(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_disk, recv_req)

    @override
    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_distributed, recv_req)

    @override
    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_tensor, recv_req)

    @override
    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_ipc, recv_req)

    def _named_anew(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        self._weights_changed = True  # also by one that fails: it may have written some of them
        answer = update(recv_req)
        if self._weights_changed and recv_req.flush_cache:
            self.name_keys()
        elif self._weights_changed:
            nonces = gathered(uuid.uuid4().hex, self.tp_cpu_group)
            self.tree_cache.buffer.hide(nonces[0])
        return answer

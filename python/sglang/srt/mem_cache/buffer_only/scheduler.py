"""Scheduler mixins for a cache that loads from the store: prefetch, preemption, reported hits.
``store_scheduler`` has the part that write-only servers share.

Contract: scheduler thread. The queue and the batches must be equal on all ranks, because the
prefetch line is updated from them without a vote. Only servers that read from the store have these
mixins (``when`` in ``patchset/table.py``).
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: SGLang's requests and answers, passed through

from typing_extensions import override

from sglang.srt.disaggregation.delta.namespaces import NamespacedScheduler
from sglang.srt.patchset.flags import MODE, ON

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.buffer_only.store_scheduler import StoreScheduler as Scheduler
    from sglang.srt.server_args import ServerArgs
else:
    Scheduler = PrefillAdder = object


class ReadyPreemption(PrefillAdder):
    """Preempts running requests only for a request whose prefetch has ended. SGLang checks the
    prefetch after it has preempted."""

    #: Cache of ``_can_preempt``: number of preempted requests; priorities of the running ones,
    #: lowest first; tokens that preempting the first n of them frees.
    _preemptible: tuple[int, list[int], list[float]] = (-1, [], [])

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
        """Return True if SGLang would preempt for ``req``: it outranks running requests that
        together free enough tokens. Do not query the prefetch of other requests, because that would
        start their time limit."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        sign = -1 if server_args.schedule_low_priority_values_first else 1
        preempted = len(self.preempt_list)
        if self._preemptible[0] != preempted:
            running = sorted(
                (sign * req.priority, self._get_running_request_total_token_offset(req))
                for req in self.running_batch.reqs
                if req not in self.preempt_list and not req.finished()
            )
            freed = [0.0, *itertools.accumulate(tokens for _, tokens in running)]
            self._preemptible = preempted, [rank for rank, _ in running], freed
        rank = sign * req.priority - self.priority_scheduling_preemption_threshold
        outranked = bisect.bisect_left(self._preemptible[1], rank)
        max_new_tokens = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        freed_tokens = self.rem_total_tokens + self._preemptible[2][outranked]
        return outranked > 0 and bool(req.extend_input_len + max_new_tokens <= freed_tokens)


class BufferOnlyScheduler(NamespacedScheduler, Scheduler):
    """Delays admission until a request's prefetch has ended. Requires ``StoreScheduler``."""

    _store_ignored: bool = False
    #: Deadline of a pending flush, which then runs in any case; agreed milliseconds.
    _flush_due_ms: int | None = None
    _last_result: float = 0.0

    @cached_property
    def _launched(self) -> deque[float]:
        """Launch times of the batches whose results are not processed."""
        return deque(maxlen=4)

    @override
    def init_cache_with_memory_pool(self) -> None:
        super().init_cache_with_memory_pool()
        if getattr(self.tree_cache, "buffer", None) is None:
            raise ValueError(
                f"{ON} needs SGLang's HiRadixCache, but this server built a "
                f"{type(self.tree_cache).__name__}. Remove {MODE}, or the option that chose "
                "that cache."
            )
        self.name_keys()

    @override
    def run_event_loop(self) -> None:
        self.tree_cache.room = self._admission_room
        super().run_event_loop()

    @override
    def _prefetch_kvcache(self, req: Req) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = [*req.origin_input_ids, *req.output_ids]
        if req.return_logprob and req.logprob_start_len >= 0:
            # SGLang uses no prefix beyond, so that the request would wait for unused pages.
            tokens = tokens[: req.logprob_start_len + 1]
        self.tree_cache.request_prefetch(req.rid, RadixKey(tokens, req.extra_key))

    @override
    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        prefetches = self.tree_cache.buffer.prefetches
        # On a prefill server requests first wait for their decode server.
        bootstrap = getattr(self, "disagg_prefill_bootstrap_queue", None)
        reqs = [*self.waiting_queue, *(bootstrap.queue if bootstrap is not None else ())]
        prefetches.set_queue([req.rid for req in reqs], self._is_full)
        running, before = self.running_batch, self.running_batch.reqs
        batch = super().get_new_batch_prefill()
        if batch is None and running.reqs is not before:
            # SGLang queues preempted requests again only if it admits another one.
            for req in [req for req in before if req not in running.reqs]:
                self._add_request_to_queue(req)
        if batch is not None:
            for req in batch.reqs:
                prefetches.cancel(req.rid)  # it runs
                tokens = self.tree_cache.take_storage_hit(req.rid)
                # SGLang counts every cached token in the device tree as a device hit. Not counted
                # as storage hits: tokens evicted again since the fetch, and hits of retracted
                # requests.
                if not req.retracted_stain:
                    storage = min(tokens, req.cached_tokens_device)
                    req.cached_tokens_device -= storage
                    req.cached_tokens_storage += storage
        return batch

    @property
    def _is_full(self) -> bool:
        """True if SGLang admits no request in this step: the request limit is reached, a request
        was refused for lack of memory, or a chunked request takes the whole step."""
        running, chunked = self.running_batch, self.chunked_req
        free_rows = self.get_num_allocatable_reqs(len(running.reqs)) - (chunked is not None)
        is_full = running.batch_is_full or free_rows <= 0
        if is_full and not self.enable_priority_preemption:
            return True
        if chunked is None or self.chunked_prefill_size is None:
            return False
        rest = len(chunked.origin_input_ids) + len(chunked.output_ids) - len(chunked.prefix_indices)
        decode_tokens = len(running.reqs) if self.is_mixed_chunk else 0
        return bool(self.chunked_prefill_size - decode_tokens - rest < self.page_size)

    def _admission_room(self) -> int:
        """Return the tokens that a request admitted now could take, by SGLang's own count, which
        subtracts the expected growth of running requests."""
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
        # With a draft model, verification writes to more slots than ``out_cache_loc``.
        plain = self.spec_algorithm.is_none()
        self.tree_cache.written = batch.out_cache_loc if plain else None
        if batch.forward_mode.is_decode():
            # Reset the prefill's index, because another copy may use it by now.
            batch.hicache_consumer_index = -1
        if not self.is_generation:
            # SGLang does this for generating models only. Without it, layers of other models would
            # be computed before their KV is loaded.
            self.tp_worker.set_hicache_consumer(batch.hicache_consumer_index)
        return super().run_batch(batch, pp_proxy_tensors)

    @override
    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        super().process_batch_result(batch, result)
        if self._launched:
            # With overlap, a batch starts when the previous one has ended.
            now, began = time.monotonic(), max(self._launched.popleft(), self._last_result)
            self._last_result = now
            extends = batch.forward_mode.is_extend() and batch.prefill_stats is not None
            tokens = batch.prefill_stats.log_input_tokens if extends else 0
            self.tree_cache.buffer.ran(now - began, tokens)

    # ---- idleness and flushes ----

    @override
    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        idle = bool(super().is_fully_idle(for_health_check))
        if idle and not (for_health_check or self._store_ignored):
            return not self.tree_cache.buffer.busy
        return idle

    @contextmanager
    def _without_the_store(self) -> Iterator[None]:
        """Ignore store traffic in ``is_fully_idle``: a flush does not have to wait for it."""
        before, self._store_ignored = self._store_ignored, True
        try:
            yield
        finally:
            self._store_ignored = before

    @override
    def flush_cache(self) -> Any:
        with self._without_the_store():
            return super().flush_cache()

    @override
    def _check_pending_flush(self) -> None:
        # A flush with a timeout waits for pending writes but is not refused because of them. Its
        # deadline is in agreed time, because a rank that empties its tree one step earlier would
        # start different transfers.
        if self._pending_flush is None:
            self._flush_due_ms = None
            super()._check_pending_flush()
            return
        now_ms = self.tree_cache.buffer.context.now_ms
        if self._flush_due_ms is None:
            timeout_s = float(self._pending_flush[0].timeout_s or 0.0)
            self._flush_due_ms = now_ms + int(timeout_s * 1000)
        if now_ms >= self._flush_due_ms or self._engine_paused:  # paused: no step would end it
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
                self.flush_cache()  # ends the copies before their memory is released
            return super().release_memory_occupation(recv_req)

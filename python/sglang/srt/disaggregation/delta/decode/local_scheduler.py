"""Scheduler of a decode server that computes turns itself, between its decode steps.

Only the schedulers of such servers have this mixin (``when`` in ``patchset/table.py``).

Contract: scheduler thread, no lock. All ranks of one attention TP group run the
same batches in the same steps; the groups of data parallel attention differ.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any  # Any: SGLang's answers to a pause, and its loads

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.local_turns import LocalTurns, Turn
from sglang.srt.disaggregation.delta.decode.speculation import place_first_drafts
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.rank_agreement import minimum
from sglang.srt.disaggregation.delta.unserved import named_by
from sglang.srt.disaggregation.policy.pace import Limits
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    # A scheduler with this mixin has that one too.
    from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler as Scheduler
    from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
else:
    Scheduler = object

logger = logging.getLogger(__name__)


class LocalTurnsScheduler(Scheduler):
    """Runs local turns between decode steps."""

    running_batch: ScheduleBatch  # SGLang's; named for the type checker

    @cached_property
    def local_turns(self) -> LocalTurns:
        """Turns that this server computes itself.

        Raises:
            ValueError: an environment variable is not the number that it must be.
        """
        args = self.server_args
        limits = Limits(
            tokens=args.disaggregation_decode_local_tokens,
            chunk=environment.LOCAL_CHUNK.read(),
            share=args.disaggregation_decode_local_prefill_time_ratio,
            when_lost=args.disaggregation_decode_fallback_prefill_tokens,
            max_itl=args.disaggregation_decode_local_max_itl_ms / 1000 or None,
            page=args.page_size,
        )
        return self.turns_within(limits)

    def turns_within(
        self, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> LocalTurns:
        """Return new local turns of this scheduler."""

        def batch() -> tuple[int, int, int]:
            max_running = int(min(self.req_to_token_pool.size, self.max_running_requests))
            return len(self.running_batch.reqs), len(self.waiting_queue), max_running

        return LocalTurns(
            limits,
            self.telemetry,
            clock,
            batch=batch,
            peer_yields=lambda it: self.disagg_decode_prealloc_queue.kv_manager.peer_yields(it),
            adapters_fit=self.adapters_fit,
            blocking=self.server_args.device == "cpu",
        )

    @override
    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        STATS.start("local")
        limits = self.local_turns.limits
        logger.info(
            "local prefill may compute turns of up to %d new tokens, fallback prefill of up to "
            "%d, in chunks of %d",
            limits.tokens,
            limits.when_lost,
            limits.chunk,
        )

    @override
    def get_next_disagg_decode_batch_to_run(self) -> ScheduleBatch | None:
        turns = self.local_turns
        turns.hook()
        self._join()
        chosen: list[Turn] = []
        # No chunk while the engine is paused, unless a release of memory waits for the turns.
        if turns.queue and not (self._engine_paused and self._waiting_release is None):
            if turns.limits.max_itl is not None:
                # The largest chunk that fits changes with each chunk, also without arrivals.
                group = self.disagg_decode_prealloc_queue.gloo_group
                turns.agree(minimum(turns.votes(()), group))
            chosen = turns.next_turns()
        batch: ScheduleBatch | None
        if chosen:
            STATS.count("decode_local_tokens", sum(len(t.req.fill_ids) - t.done for t in chosen))
            batch = self.chunk_batch(chosen)
            turns.launch(chosen, batch)
            # Expert parallel ranks exchange the sizes of their batches, as for each batch that
            # SGLang runs.
            batch = self.maybe_prepare_mlp_sync_batch(batch)
        else:
            batch = super().get_next_disagg_decode_batch_to_run()
            if batch is not None:
                turns.stepped(batch)
        turns.others_run = self.server_args.enable_dp_attention and batch is not None
        return batch

    def _join(self) -> None:
        """Let computed requests run from the next decode step on, as far as there are places."""
        turns = self.local_turns
        while turns.computed:
            batch, running = turns.computed[0], self.running_batch
            if not running.is_empty():
                # Ended requests need no place. Spec v1 has removed them from the draft input.
                running.filter_batch(v1_spec_info_filtered=True)
            adapters = {req.lora_id for req in (*running.reqs, *batch.reqs)}
            fits = turns.free_places >= 0 and self.adapters_fit(adapters)
            if not (fits or running.is_empty()):
                break
            del turns.computed[0]
            for req in batch.reqs:
                self.tree_cache.claims.started(req)
            if batch.is_spec_v2:
                place_first_drafts(batch, self.future_map)
            if running.is_empty():
                self.running_batch = batch
            else:
                running.merge_batch(batch)

    def may_join(self) -> int:
        """Return the number of requests from prefill that may join (``DisaggScheduler``)."""
        return min(super().may_join(), self.local_turns.places_for_others)

    def chunk_batch(self, turns: Sequence[Turn]) -> ScheduleBatch:
        """Return a batch that computes each turn up to its ``fill_ids``, and set its ``done``. The
        last one may continue in a later chunk (``chunked_req``)."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.observability.req_time_stats import set_schedule_time_batch, set_time_batch
        from sglang.srt.observability.scheduler_metrics_mixin import PrefillStats, QueueCount

        rows, reqs, own = self.req_to_token_pool, [turn.req for turn in turns], list[torch.Tensor]()
        drafts = not self.spec_algorithm.is_none()
        for turn in turns:
            # A draft slot depends on its token and the next one. At the end of a chunk SGLang uses
            # the target's sampled token instead of the prompt's next one. So with a draft model the
            # next chunk computes the last token of a chunk again, and the tree shares right KV.
            req, start = turn.req, turn.done - (drafts and turn.has_begun)
            slots = rows.req_to_token[req.req_pool_idx, : len(req.fill_ids)].to(torch.int64)
            req.prefix_indices = slots[:start]
            own.append(slots[start:])
            req.set_extend_input_len(len(req.fill_ids) - start)
            # Otherwise the repeated token would lower SGLang's ``cached_tokens``.
            req.already_computed = min(req.already_computed, start)
        hits = sum(turn.done for turn in turns if not turn.has_begun)
        unfinished = reqs[-1] if len(reqs[-1].fill_ids) < len(reqs[-1].origin_input_ids) else None
        set_time_batch(reqs, "set_forward_entry_time")
        # The requests already have their rows and slots. Because ``prepare_for_extend`` allocates,
        # it gets stand-ins for the row pool, the tree and the allocator that return these.
        slots_to_write = torch.cat(own)
        given_rows = SimpleNamespace(
            req_to_token=rows.req_to_token,
            write=rows.write,
            device=rows.device,
            alloc=lambda wanted: [req.req_pool_idx for req in wanted],
        )
        given_slots = SimpleNamespace(
            page_size=self.page_size,
            is_chunk_cache=lambda: True,
            supports_swa=lambda: False,  # pools with sliding windows are refused
            alloc=lambda tokens: slots_to_write,
            alloc_extend=lambda *lengths: slots_to_write,
        )
        given_slots.token_to_kv_pool_allocator = given_slots
        batch = ScheduleBatch.init_new(
            reqs,
            given_rows,
            self.token_to_kv_pool_allocator,
            given_slots,
            self.model_config,
            self.enable_overlap,
            self.spec_algorithm,
            chunked_req=unfinished,
        )
        batch.prepare_for_extend()
        batch.req_to_token_pool, batch.tree_cache = rows, self.tree_cache
        batch.decoding_reqs = None
        for turn in turns:
            turn.done = len(turn.req.fill_ids)
            # A release frees up to these lengths, and a turn holds all its pages from admission on.
            turn.req.kv_committed_len = turn.req.kv_allocated_len = len(turn.req.origin_input_ids)
        if unfinished is not None:
            unfinished.is_chunked += 1
        # SGLang logs these numbers for a prefill batch.
        running = QueueCount.from_reqs(self.running_batch.reqs, False)
        tokens, ratio = batch.extend_num_tokens, self.new_token_ratio
        batch.prefill_stats = PrefillStats(tokens, hits, ratio, running, len(batch.reqs))
        set_schedule_time_batch(batch)
        return batch

    @override
    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        turns = self.local_turns
        turns.result(batch, result, self)
        is_chunk = batch.forward_mode.is_extend()
        if is_chunk:
            turns.before_result()
        super().process_batch_result(batch, result)
        if is_chunk:
            turns.after_result()
            self._drop_aborted()

    @override
    def abort_request(self, recv_req: AbortReq) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache.common import release_kv_cache

        wanted, turns = named_by(recv_req), self.local_turns
        super().abort_request(recv_req)
        for req in turns.requests:  # a launched chunk first runs to its end
            if wanted(req) and not req.finished():
                req.to_finish = FINISH_ABORT()
        self._drop_aborted()
        # Requests that wait for a place end now, because a place may become free only much later.
        # Their first token was sent, so their end follows it on the same way.
        for batch in turns.computed:
            for req in batch.reqs:
                if req.to_finish is not None:
                    req.check_finished()
                    release_kv_cache(req, self.tree_cache)
                    self.stream_output([req], req.return_logprob)
            batch.filter_batch()
        turns.computed = [batch for batch in turns.computed if not batch.is_empty()]

    def _drop_aborted(self) -> None:
        """Release aborted turns that no launched chunk uses."""
        from sglang.srt.disaggregation.utils import prepare_abort
        from sglang.srt.mem_cache.common import release_kv_cache

        turns = self.local_turns
        flying = {id(turn) for _, launched in turns.launched for turn in launched}
        gone = [t for t in turns.queue if t.req.to_finish is not None and id(t) not in flying]
        for turn in gone:
            turns.queue.remove(turn)
            release_kv_cache(turn.req, self.tree_cache, is_insert=False)
            prepare_abort(turn.req, turn.req.to_finish.message)
            self.stream_output([turn.req], turn.req.return_logprob)

    @override
    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return super().is_fully_idle(for_health_check) and not self.local_turns.is_busy

    @override
    def get_load(self, _: Any = None) -> Any:
        load = super().get_load(_)
        turns = len(self.local_turns.requests)  # their pages are in use, and were counted as such
        load.num_reqs, load.num_waiting_reqs = load.num_reqs + turns, load.num_waiting_reqs + turns
        return load

    @override
    def get_loads(self, req: Any = None) -> Any:
        loads = super().get_loads(req)
        loads.num_waiting_reqs += len(self.local_turns.requests)
        return loads

    @override
    def self_check_during_idle(self) -> None:
        # Paused, or in the step in which the last running request leaves the batch, the loop finds
        # nothing to run while turns hold pages and rows that SGLang's check would call leaked.
        if not self.local_turns.is_busy:
            super().self_check_during_idle()

    @override
    def pause_generation(self, recv_req: PauseGenerationReqInput) -> Any:
        if recv_req.mode != "in_place":
            # SGLang would put the requests of a chunk into the running batch, computed or not.
            if self.last_batch and self.last_batch.forward_mode.is_extend():
                if self.enable_overlap:
                    self.process_batch_result(*self.result_queue.popleft())
                self.last_batch = None
            self._join()
        answer = super().pause_generation(recv_req)
        self.local_turns.times.interrupted()
        return answer

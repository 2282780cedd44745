"""SGLang's methods around which local turns run.

Contract: scheduler thread; all ranks of a server call the same methods in the same steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.lead.attach import Function, Wraps
from sglang.srt.disaggregation.lead.batches import adapters_of
from sglang.srt.disaggregation.lead.local import QueuedTurns, ready
from sglang.srt.disaggregation.policy.pace import Limits
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)


def limits(page: int) -> Limits:
    """Return the settings. ``page``: tokens of a page.

    Raises:
        ValueError: a variable is not the number that it must be.
    """
    return Limits(
        tokens=environment.LOCAL_TOKENS.read(),
        chunk=environment.LOCAL_CHUNK.read(),
        share=environment.LOCAL_SHARE.read(),
        when_lost=environment.FALLBACK_PREFILL_TOKENS.read(),
        max_itl=environment.LOCAL_MAX_ITL_MS.read() / 1000 or None,
        page=page,
    )


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.scheduler import Scheduler

    def scheduler(name: str, signature: str) -> Callable[[Function], None]:
        """Wrap a method of the scheduler; ours is called if the scheduler has local turns."""

        def put(ours: Function) -> None:
            @wrap(Scheduler, name, signature)
            def method(stock: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
                turns = self.__dict__.get("lead_turns")
                if turns is None:
                    return stock(*args, **kwargs)
                return ours(stock, turns, self, *args, **kwargs)

        return put

    @wrap(Scheduler, "init_disaggregation", "(self)")
    def init_disaggregation(stock: Function, self: Any) -> None:
        stock()
        if self.disagg_decode_prealloc_queue is None:
            return
        self.lead_turns = QueuedTurns(self, limits(self.tree_cache.page_size))
        if self.metrics_reporter.current_scheduler_metrics_enabled:
            STATS.bind(self.metrics_collector.labels, "local")
        logger.info("local prefill enabled: %s", self.lead_turns.limits)

    @wrap(
        DecodePreallocQueue,
        "_update_handshake_waiters",
        "(self, rids_to_check=None, pp_good_rids=None, pp_bad_rids=None)",
    )
    def _update_handshake_waiters(stock: Function, self: Any, *args: Any, **kw: Any) -> None:
        stock(*args, **kw)
        turns, entries = self.scheduler.lead_turns, ready(self)
        turns.decide(self, entries)
        turns.admit(self, entries)

    @wrap(
        DecodePreallocQueue,
        "pop_preallocated",
        "(self, rids_to_check=None, pp_good_rids=None, pp_bad_rids=None)",
    )
    def pop_preallocated(stock: Function, self: Any, *args: Any, **kw: Any) -> Any:
        admitted, failed = stock(*args, **kw)
        self.scheduler.lead_turns.announced([entry.req for entry in admitted])
        return admitted, failed

    @wrap(DecodePreallocQueue, "_active_req_count", "(self, extra_reserved_reqs=0)")
    def _active_req_count(stock: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) + len(self.scheduler.lead_turns.reqs)

    @wrap(
        DecodePreallocQueue,
        "_allocatable_token_budgets",
        "(self, retractable_tokens=None, count_retracted=True, extra_reserved_reqs=0, "
        "reserved_tokens=None, hicache_reserved_tokens=0)",
    )
    def _allocatable_token_budgets(stock: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) - self.scheduler.lead_turns.pending_tokens

    @scheduler("get_next_disagg_decode_batch_to_run", "(self, running_batch)")
    def get_next_batch(stock: Function, turns: QueuedTurns, self: Any, running_batch: Any) -> Any:
        turns.hook()
        self.running_batch = running_batch = turns.join(running_batch)
        batch = turns.next_batch()
        # With data parallel attention all ranks run each step together. SGLang exchanges the sizes
        # of its batch in ``stock``.
        if batch is not None:
            batch = self.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
            plan = NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
        else:
            max_running = self.max_running_requests
            self.max_running_requests = len(running_batch.reqs) + turns.places
            plan = stock(running_batch=running_batch)
            self.max_running_requests = max_running
        batch = plan.batch_to_run
        if batch is not None and not batch.forward_mode.is_extend():
            turns.stepped(batch)
        turns.others_run = self.attn_dp_enabled and batch is not None
        return plan

    @scheduler("process_batch_result", "(self, batch, result)")
    def process_batch_result(
        stock: Function, turns: QueuedTurns, self: Any, batch: Any, result: Any
    ) -> None:
        turns.result(batch, result, self)
        stock(batch, result)
        if batch.forward_mode.is_extend():
            turns.processed()

    @scheduler("can_schedule_lora_req", "(self, req, running_loras)")
    def can_schedule_lora_req(
        stock: Function, turns: QueuedTurns, self: Any, req: Any, running_loras: Any
    ) -> Any:
        return stock(req, running_loras | adapters_of(turns.reqs))

    @scheduler("_collect_inflight_batches", "(self)")
    def _collect_inflight_batches(stock: Function, turns: QueuedTurns, self: Any) -> Any:
        return [*stock(), turns]  # SGLang reads its ``reqs`` for aborts and deadlines

    @scheduler("is_fully_idle", "(self, for_health_check=False, ignore_waiting=False)")
    def is_fully_idle(stock: Function, turns: QueuedTurns, self: Any, *args: Any, **kw: Any) -> Any:
        return stock(*args, **kw) and not turns.reqs

    @scheduler("pause_generation", "(self, recv_req)")
    def pause_generation(stock: Function, turns: QueuedTurns, self: Any, recv_req: Any) -> Any:
        retracts = recv_req.mode == "retract"
        if retracts:
            # SGLang retracts the requests of the running batch, the last one and ``chunked_req``.
            self.running_batch = turns.join(self.running_batch, but=self.last_batch)
            self.chunked_req = turns.unfinished
        stock(recv_req)
        turns.times.interrupted()
        if retracts:
            turns.retracted()

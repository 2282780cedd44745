"""The start of every admission step: take leases, agree with the other ranks, trim the leases."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.disaggregation.delta.decode import candidates as line
from sglang.srt.disaggregation.delta.decode.admission import DecodeBudget, Memory, Rules, StepPlan
from sglang.srt.disaggregation.delta.decode.candidates import Candidate
from sglang.srt.disaggregation.delta.decode.waiting import Limits, PrefixKey
from sglang.srt.disaggregation.delta.rank_agreement import Agreed, Ballot, Offer, State, agree

logger = logging.getLogger(__name__)
#: Seconds between two complaints about ranks whose pools differ.
COMPLAIN_EVERY_S = 30.0


class AgreedSteps:
    """Runs the steps of one prealloc queue, with one collective each."""

    def __init__(self, queue: Any, budget: DecodeBudget, rules: Rules) -> None:
        self._queue, self._budget, self._rules = queue, budget, rules
        self._memory = Memory()
        self._complained_at: float | None = None

    @contextmanager
    def step(
        self,
        ready: list[Any],
        first: list[Candidate],
        limits: Limits,
        arriving: set[PrefixKey],
        *,
        slots_needed: bool = True,
    ) -> Iterator[tuple[Agreed, list[Candidate]]]:
        """What the ranks agree on, and who may be tried, with leases; takes the leases back.

        ``ready``: entries without pages whose handshake is done; ``first``: the candidates. Both
        are the same requests on all ranks, and there is at least one of either.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        queue, budget, tree = self._queue, self._budget, self._queue.tree_cache
        pool, now, failed = budget.pool(), queue.clock(), KVPoll.Failed
        states = [_state(entry, now, limits, failed) for entry in ready]
        if min(states, default=State.FINE) <= State.EXPIRED:
            ended = {id(e) for e, s in zip(ready, states, strict=True) if s <= State.EXPIRED}
            for candidate in first:
                candidate.given_up = id(candidate.entry) in ended
        rows = queue.req_to_token_pool.available_size()
        slots = queue.req_to_metadata_buffer_idx_allocator.available_size()
        places = min(rows, slots) if slots_needed else rows
        plan = StepPlan(budget, self._memory, self._rules, tree, places, arriving)
        try:
            try:
                offers = line.take_leases(first, plan)
            finally:
                plan.close()
            agreed = agree(
                Ballot(states, offers, rows, slots, pool.free, pool.protected), queue.gloo_group
            )
            if agreed.pools_differ:
                self._complain(agreed, pool.free, pool.protected)
            budget.surplus = pool.free - agreed.free
            tried = line.settle(tree, first, agreed.offers)
            if len(tried) < len(first) and first[len(tried)].offer != Offer.STOP:
                self._memory.note(tree, first[len(tried)])  # another rank stops it
            yield agreed, tried
        finally:
            line.release(first)

    def _complain(self, agreed: Agreed, free: int, protected: int) -> None:
        now: float = self._queue.clock()
        if self._complained_at is not None and now - self._complained_at < COMPLAIN_EVERY_S:
            return
        self._complained_at = now
        logger.error(
            "the pools of this server's ranks differ: here %d tokens are free and %d protected, at "
            "least one rank has %d and %d; admission goes by the smallest",
            free,
            protected,
            agreed.free,
            agreed.protected,
        )


def _state(entry: Any, now: float, limits: Limits, failed: Any) -> State:
    """What this rank thinks of a request without pages. ``failed``: a poll that says so."""
    if entry.req.finished_reason is not None or entry.kv_receiver.poll() == failed:
        return State.FAILED
    if now - entry.ready_since >= limits.for_memory:
        return State.EXPIRED
    since: float | None = getattr(entry, "waits_for_prefix_since", None)
    if since is not None and now - since >= limits.for_prefix:
        return State.WAITED_ENOUGH
    return State.FINE

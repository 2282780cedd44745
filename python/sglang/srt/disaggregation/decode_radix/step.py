"""The start of every admission step: take leases, agree with the other ranks, trim the leases."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.disaggregation.decode_radix import candidates as line
from sglang.srt.disaggregation.decode_radix import inflight, waiting
from sglang.srt.disaggregation.decode_radix.agreement import Agreed, Ballot, State, agree
from sglang.srt.disaggregation.decode_radix.budget import DecodeBudget
from sglang.srt.disaggregation.decode_radix.candidates import Candidate

logger = logging.getLogger(__name__)
#: Seconds between two complaints about ranks whose pools differ.
COMPLAIN_EVERY_S = 30.0


class AgreedSteps:
    """Runs the steps of one prealloc queue, with one collective each."""

    def __init__(self, queue: Any, budget: DecodeBudget) -> None:
        self._queue = queue
        self._budget = budget
        self._complained_at: float | None = None

    @contextmanager
    def step(
        self, ready: list[Any], first: list[Candidate], *, slots_needed: bool = True
    ) -> Iterator[tuple[Agreed, list[Candidate]]]:
        """What the ranks agree on, and who may be tried, with leases; takes the leases back.

        ``ready``: entries without pages whose handshake is done; ``first``: the candidates. Both
        are the same requests on all ranks, and there is at least one of either.
        """
        queue, budget = self._queue, self._budget
        pool = budget.pool([])
        limits = waiting.admission_timeout(), inflight.wait_seconds()
        states = {id(entry): self._state(entry, *limits) for entry in ready}
        for candidate in first:
            candidate.given_up = states.get(id(candidate.entry), State.FINE) <= State.EXPIRED
        rows = queue.req_to_token_pool.available_size()
        slots = queue.req_to_metadata_buffer_idx_allocator.available_size()
        full = rows <= 0 or (slots_needed and slots <= 0)
        try:
            offers = line.take_leases(
                queue.tree_cache, first, lambda req: full or budget.still_blocked(req)
            )
            agreed = agree(
                Ballot(list(states.values()), offers, rows, slots, pool.free, pool.protected),
                queue.gloo_group,
            )
            if agreed.pools_differ:
                self._complain(agreed, pool.free, pool.protected)
            budget.surplus = pool.free - agreed.free
            yield agreed, line.settle(queue.tree_cache, first, agreed.offers)
        finally:
            line.release(first)

    def _state(self, entry: Any, for_memory: float, for_prefix: float) -> State:
        """What this rank thinks of a request without pages, which may wait so many seconds."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        if entry.req.finished_reason is not None or entry.kv_receiver.poll() == KVPoll.Failed:
            return State.FAILED
        now: float = self._queue.clock()
        if now - entry.ready_since >= for_memory:
            return State.EXPIRED
        since: float | None = getattr(entry, "waits_for_prefix_since", None)
        if since is not None and now - since >= for_prefix:
            return State.WAITED_ENOUGH
        return State.FINE

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

"""Whether a request fits into the decode pool now; evicts and allocates."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang.srt.disaggregation.decode_radix import admission
from sglang.srt.disaggregation.decode_radix.claims import Claims, expected_length, final_length
from sglang.srt.disaggregation.decode_radix.lease import PrefixLease
from sglang.srt.disaggregation.decode_radix.quarantine import held_requests
from sglang.srt.disaggregation.decode_radix.waiting import Refusal
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.ranks import alone

logger = logging.getLogger(__name__)


class DecodeBudget:
    """Counts, evicts, and allocates for the prealloc queue; owns the claims on the pool."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._tree = queue.tree_cache
        self._allocator = queue.token_to_kv_pool_allocator
        self._page: int = queue.token_to_kv_pool_allocator.page_size
        self._cap: int = queue.num_reserved_decode_tokens
        #: What admitted requests hold; the tree tells it of every change.
        self.claims = Claims(self._cap, self._page)
        self._tree.claims = self.claims
        #: Tokens that this rank has and another one has not; zero while ranks are in step.
        self.surplus = 0

    def refusal(
        self,
        req: Any,
        node: Any,
        prefix: int,
        length: int,
        *,
        resumes: bool = False,
        taken: int = 0,
    ) -> Refusal | None:
        """Why ``req`` with ``length`` tokens cannot enter; None if it can.

        The tree shares its first ``prefix`` tokens, down to ``node``. Of what looks free,
        ``taken`` tokens are not: the prefix itself if it is not locked, and what others take first.
        A request that ``resumes`` must have room like a running one, or it would be retracted again
        at once.
        """
        pool = self.pool()
        cost = self.cost(req, prefix, length, resumes=resumes)
        if cost > pool.free - taken - self.surplus - pool.reserved:
            return Refusal(req.rid, "no_tokens", cost)
        whole = page_ceil(length, self._page)
        need = page_ceil(expected_length(req, length), self._page) - whole
        total = self._queue.max_total_num_tokens
        if not self.claims.everyone_can_finish(node, whole - prefix, need, total):
            return Refusal(req.rid, "cannot_finish", cost)
        return None

    def reserve(
        self, req: Any, lease: PrefixLease, length: int, *, resumes: bool = False
    ) -> torch.Tensor | Refusal:
        """Slots for the tokens from the lease to ``length`` (1-D int64), or why there are none.

        Called with the lease held: locking takes the prefix out of what can be evicted, and a
        budget from before it would count the same tokens twice.
        """
        refusal = self.refusal(req, lease.node, lease.length, length, resumes=resumes)
        if refusal is not None:
            return refusal
        needed = page_ceil(length, self._page) - lease.length
        slots = self._allocate(req, needed, length - lease.length)
        if slots is None:
            return Refusal(req.rid, "no_tokens", self.cost(req, lease.length, length))
        return slots

    def cost(self, req: Any, prefix: int, length: int, *, resumes: bool = False) -> int:
        """What admitting ``req`` with ``length`` tokens takes beyond a locked ``prefix``."""
        claim = admission.Claim(length, final_length(req))
        if resumes:
            return admission.entry_cost(prefix, claim, self._cap, self._page)
        cap = self.claims.entry_cap
        return admission.entry_cost(prefix, admission.entering(claim), cap, self._page)

    def describe(self) -> str:
        """The pool in words, for a request that waits."""
        pool = self.pool()
        evictable = self._tree.evictable_size()
        held = sum(
            page_ceil(req.kv_allocated_len, self._page) - req.cache_protected_len
            for req in held_requests(self._queue.transfer_queue)
        )
        return (
            f"{pool.free - evictable} free, {evictable} evictable, {pool.protected} protected, "
            f"{pool.reserved} reserved, {held} held in quarantine"
        )

    def pool(self) -> admission.PoolState:
        """The pool as it is now."""
        return admission.PoolState(
            free=self._allocator.available_size() + self._tree.evictable_size(),
            protected=self._tree.protected_size(),
            reserved=self.claims.reserved,
        )

    def _allocate(self, req: Any, needed: int, used: int) -> torch.Tensor | None:
        """``used`` slots of ``needed`` tokens of whole pages; evicts what is missing."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if needed == 0:
            return torch.empty(0, dtype=torch.int64, device=self._allocator.device)
        shortfall = needed - self._allocator.available_size()
        if shortfall > 0:
            self._tree.evict(EvictParams(num_tokens=shortfall))
        slots: torch.Tensor | None = self._allocator.alloc(needed)
        if slots is None:
            if not alone(self._queue.gloo_group):
                # Others may have got theirs. A wrong count is better found here than by a hang.
                raise RuntimeError(
                    f"request {req.rid}: the tree counts {self._tree.evictable_size()} evictable "
                    f"tokens but gave less than the {shortfall} asked for"
                )
            logger.warning(
                "request %s stays queued: %d tokens wanted, %d free after evicting, %d evictable",
                req.rid,
                needed,
                self._allocator.available_size(),
                self._tree.evictable_size(),
            )
            return None
        return slots[:used]

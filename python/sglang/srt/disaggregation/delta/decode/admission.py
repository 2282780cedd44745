"""Whether a request fits into the decode pool now; evicts and allocates.

What this rank would do in a step, before the ranks agree: who would get in, who is refused.

The ranks decide from what they agreed on, and by the same arithmetic. A plan only says for whom it
is worth to ask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.disaggregation.delta.decode import claims
from sglang.srt.disaggregation.delta.decode.candidates import Candidate
from sglang.srt.disaggregation.delta.decode.claims import Claims, expected_length, final_length
from sglang.srt.disaggregation.delta.decode.deferred_free import held_requests
from sglang.srt.disaggregation.delta.decode.prefix_tree import (
    KnownPrefix,
    PrefixLease,
    unlocked_tokens,
)
from sglang.srt.disaggregation.delta.decode.waiting import PrefixKey, Refusal
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import alone

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
        claim = claims.Claim(length, final_length(req))
        if resumes:
            return claims.entry_cost(prefix, claim, self._cap, self._page)
        cap = self.claims.entry_cap
        return claims.entry_cost(prefix, claims.entering(claim), cap, self._page)

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

    def pool(self) -> claims.PoolState:
        """The pool as it is now."""
        return claims.PoolState(
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


@dataclass(frozen=True)
class Rules:
    """What admission asks of the queue whose requests are tried."""

    #: Whether a request may share a prefix.
    may_share: Callable[[Candidate], bool]
    #: Where in the tree it will add KV, and which, if others wait for that.
    arriving_key: Callable[[Candidate], PrefixKey | None]
    #: Whether it is passed by others while the KV of that key arrives.
    waits: Callable[[Candidate, PrefixKey | None, set[PrefixKey]], bool]


class Memory:
    """Where the match of the request that was stopped last ended; the next step begins with it."""

    def __init__(self) -> None:
        #: The request itself, not its name: clients may use a name again for another prompt.
        self._last: tuple[Any, bool, KnownPrefix] | None = None

    def recall(self, tree: Any, candidate: Candidate) -> KnownPrefix | None:
        """Where the match of ``candidate`` ends, if that is known."""
        if self._last is None:
            return None
        req, shared, known = self._last
        same = req is candidate.req and shared == candidate.shares
        return known if same and known.holds(tree) else None

    def note(self, tree: Any, candidate: Candidate) -> None:
        """``candidate`` was looked at, and does not get in now."""
        if candidate.lease is not None:
            ids, key = candidate.token_ids, candidate.req.extra_key
            known = KnownPrefix.of(tree, candidate.lease, ids if candidate.shares else [], key)
            self._last = (candidate.req, candidate.shares, known)


class StepPlan:
    """The plan of one step on one rank. ``places``: how many rows and slots are free."""

    def __init__(
        self,
        budget: DecodeBudget,
        memory: Memory,
        rules: Rules,
        tree: Any,
        places: int,
        arriving: set[PrefixKey],
    ) -> None:
        self._budget, self._memory, self._rules, self._tree = budget, memory, rules, tree
        self._page: int = tree.page_size
        self._places, self._arriving = places, arriving
        #: Keys of those who would get in.
        self._coming: set[PrefixKey] = set()
        self._entering: list[Any] = []
        #: Tokens that look free, and are taken by those who would get in.
        self._taken = 0

    @property
    def has_place(self) -> bool:
        """Whether one more request could get a row and a slot."""
        return len(self._entering) < self._places

    def find(self, candidate: Candidate) -> bool:
        """Lock what the tree holds of it; false if it is known to be refused as before."""
        candidate.shares = self._rules.may_share(candidate)
        known = self._memory.recall(self._tree, candidate)
        if known is None:
            candidate.take(self._tree)
            return True
        taken = self._taken + unlocked_tokens(known.node)
        candidate.refusal = self._refusal(candidate, known, taken)
        if candidate.refusal is None:
            candidate.lease = known.lock(self._tree)
        return candidate.refusal is None

    def waits(self, candidate: Candidate) -> bool:
        """Whether others pass it, because its prefix is just arriving."""
        key = self._rules.arriving_key(candidate)
        return self._rules.waits(candidate, key, self._arriving | self._coming)

    def admit(self, candidate: Candidate) -> bool:
        """Whether it would get in behind those before; if not, it lets go and says why."""
        lease = candidate.lease
        assert lease is not None, "it was found before"
        candidate.refusal = self._refusal(candidate, lease, self._taken)
        if candidate.refusal is not None:
            self._memory.note(self._tree, candidate)
            candidate.release()
            return False
        self._taken += page_ceil(candidate.length, self._page) - lease.length
        self._budget.claims.entered(candidate.req, lease.node, lease.length, candidate.length)
        self._entering.append(candidate.req)
        key = self._rules.arriving_key(candidate)
        if key is not None:
            self._coming.add(key)
        return True

    def _refusal(
        self, candidate: Candidate, prefix: KnownPrefix | PrefixLease, taken: int
    ) -> Refusal | None:
        length, resumes = candidate.length, candidate.resumes
        return self._budget.refusal(
            candidate.req, prefix.node, prefix.length, length, resumes=resumes, taken=taken
        )

    def close(self) -> None:
        """Nobody has entered yet."""
        for req in self._entering:
            self._budget.claims.left(req)

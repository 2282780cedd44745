"""Whether a request fits into the decode pool now; evicts and allocates. How long it may wait."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.disaggregation.delta.decode.claims import Claims
from sglang.srt.disaggregation.delta.decode.growth import (
    Claim,
    entering,
    entry_cost,
    expected_length,
    final_length,
)
from sglang.srt.disaggregation.delta.decode.record import Refusal
from sglang.srt.disaggregation.delta.decode.speculation import step_tokens
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import alone
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.decode.candidates import Candidate
    from sglang.srt.disaggregation.delta.decode.prealloc_queue import RadixPreallocQueue
    from sglang.srt.disaggregation.delta.decode.prefix_tree import KnownPrefix, PrefixLease
    from sglang.srt.disaggregation.delta.decode.protocols import PageAllocator, Req

logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """The settings of admission; all but ``window`` are seconds."""

    #: How long a request waits at most for decode memory after its handshake.
    for_memory: float
    #: How long it waits at most for another one's prefix.
    for_prefix: float
    #: After how long the log says that it waits.
    log_after: float
    #: How many equal next tokens make waiting for another one's prefix worth it; zero: never.
    window: int

    @classmethod
    def read(cls, page: int, pairs: bool = False) -> Limits:
        """From the environment. ``pairs``: keys are pairs of tokens, so that a slot can be shared
        by who has the token behind it as well.

        Raises:
            ValueError: a variable is not the number that it must be.
        """
        window = page_ceil(environment.PREFIX_WAIT_TOKENS.read(), page)
        return cls(
            for_memory=environment.ADMISSION_TIMEOUT.read(),
            for_prefix=environment.PREFIX_WAIT_TIMEOUT.read(),
            log_after=environment.WAIT_LOG.read(),
            window=window + pairs if window else 0,
        )


class PoolState(NamedTuple):
    """The pool in tokens: ``free`` counts the evictable, ``reserved`` is promised."""

    free: int
    protected: int
    reserved: int


class DecodeBudget:
    """Counts, evicts, and allocates for the prealloc queue; owns the claims on the pool."""

    def __init__(self, queue: RadixPreallocQueue) -> None:
        """``queue``: the prealloc queue."""
        self._queue = queue
        self._tree = queue.tree_cache
        self._allocator: PageAllocator = queue.token_to_kv_pool_allocator
        self._page = self._allocator.page_size
        self._cap: int = queue.num_reserved_decode_tokens
        #: What admitted requests hold; the tree tells it of every change.
        self._step = step_tokens(queue.scheduler.server_args, self._page)
        self.claims = Claims(self._cap, self._page, self._step)
        self._tree.claims = self.claims
        #: Tokens that this rank has and another one has not; zero while ranks are in step.
        self.surplus = 0

    def refusal(
        self, candidate: Candidate, prefix: KnownPrefix | PrefixLease, *, taken: int = 0
    ) -> Refusal | None:
        """Why a candidate that shares ``prefix`` cannot enter; None if it can.

        Of what looks free, ``taken`` tokens are not: the prefix itself if it is not locked, and
        what others take first. A request that resumes must have room like a running one, or it
        would be retracted again at once.
        """
        req, length = candidate.req, candidate.length
        pool = self.pool()
        cost = self.cost(candidate, prefix.length)
        if cost > pool.free - taken - self.surplus - pool.reserved:
            return Refusal("no_tokens", cost)
        whole = page_ceil(length, self._page)
        need = page_ceil(expected_length(req, length, self._step), self._page) - whole
        total = self._queue.max_total_num_tokens
        if not self.claims.everyone_can_finish(prefix.node, whole - prefix.length, need, total):
            return Refusal("cannot_finish", cost)
        return None

    def reserve(self, candidate: Candidate, lease: PrefixLease) -> torch.Tensor | Refusal:
        """Slots for the candidate's tokens behind its lease (1-D int64), or why there are none.

        Called with the lease held: locking takes the prefix out of what can be evicted, and a
        budget from before it would count the same tokens twice.
        """
        refusal = self.refusal(candidate, lease)
        if refusal is not None:
            return refusal
        needed = page_ceil(candidate.length, self._page) - lease.length
        slots = self._allocate(candidate.req, needed)
        if slots is None:
            return Refusal("no_tokens", self.cost(candidate, lease.length))
        return slots[: candidate.length - lease.length]

    def cost(self, candidate: Candidate, prefix: int) -> int:
        """What admitting it takes beyond a locked ``prefix``, in tokens."""
        # SGLang lets a text grow to the pool's end; a step's room behind that is nowhere, and who
        # waits for it would wait for ever, with everybody behind.
        final = min(final_length(candidate.req, self._step), self._queue.max_total_num_tokens)
        claim = Claim(candidate.length, final)
        if candidate.resumes:
            return entry_cost(prefix, claim, self.claims.cap, self._page)
        cap = self.claims.entry_cap
        return entry_cost(prefix, entering(claim, self._step), cap, self._page)

    def describe(self) -> str:
        """The pool in words, for a request that waits."""
        pool = self.pool()
        evictable = self._tree.evictable_size()
        deferred = sum(
            page_ceil(req.kv_allocated_len, self._page) - req.cache_protected_len
            for req in self._queue.transfer_queue.deferred_requests
        )
        return (
            f"{pool.free - evictable} free, {evictable} evictable, {pool.protected} protected, "
            f"{pool.reserved} reserved, {deferred} of ended transfers that prefill may still write"
        )

    def pool(self) -> PoolState:
        """The pool as it is now."""
        return PoolState(
            free=self._allocator.available_size() + self._tree.evictable_size(),
            protected=self._tree.protected_size(),
            reserved=self.claims.reserved,
        )

    def _allocate(self, req: Req, needed: int) -> torch.Tensor | None:
        """Slots of ``needed`` tokens of whole pages; evicts what is missing."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if needed == 0:
            return torch.empty(0, dtype=torch.int64, device=self._allocator.device)
        shortfall = needed - self._allocator.available_size()
        if shortfall > 0:
            self._tree.evict(EvictParams(num_tokens=shortfall))
        slots = self._allocator.alloc(needed)
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
        return slots

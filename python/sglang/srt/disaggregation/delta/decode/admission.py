"""Whether a request fits into the decode pool now: what it takes, how long it may wait; allocates.

The arithmetic first: how long requests become, and what that takes of the pool, of one and summed;
all results are tokens of whole pages. Stock reserves ``--num-reserved-decode-tokens`` (512 by
default) for every request in sight. With a pool full of shared prefixes that reserve, and not the
KV, decides how many requests run. Here a *running* request reserves what it can still generate, at
most that number. One that does not run yet reserves half of it: the requests of a steady stream are
half-way through their answers on average. If too many were let in, the youngest is retracted: its
KV goes to the CPU and back, and no work is lost.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.delta.decode.record import Refusal
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import alone
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    import torch

    from sglang.srt.disaggregation.delta.decode.candidates import Candidate
    from sglang.srt.disaggregation.delta.decode.claims import Claims
    from sglang.srt.disaggregation.delta.decode.prealloc_queue import RadixPreallocQueue
    from sglang.srt.disaggregation.delta.decode.prefix_tree import KnownPrefix, PrefixLease
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

logger = logging.getLogger(__name__)


# ---- what one request takes ----


def final_length(req: Req, step: int = 0) -> int:
    """The longest that a request's KV can become, in tokens.

    ``step``: with speculation, what its last step wants free (``speculation.step_tokens``).
    """
    return len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens) + step


def expected_length(req: Req, allocated: int, step: int = 0) -> int:
    """How long its KV is taken to become by SGLang's estimate, in tokens; ``step`` as above.

    Clients ask for far more new tokens than come, so SGLang expects 4,096 at most
    (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``). An answer that is longer already is expected to go
    on to the next multiple.
    """
    from sglang.srt.disaggregation.decode import CLIP_MAX_NEW_TOKEN

    prompt = len(req.origin_input_ids)
    clip = CLIP_MAX_NEW_TOKEN * (1 + max(allocated - prompt, 0) // CLIP_MAX_NEW_TOKEN)
    return int(prompt + min(req.sampling_params.max_new_tokens, clip)) + step


@dataclass(frozen=True)
class Claim:
    """One request's claim on the pool: ``allocated`` tokens now, ``final`` when it has ended."""

    allocated: int
    final: int


def growth(claim: Claim, cap: int, page: int) -> int:
    """New pages, in tokens, that the next ``cap`` generated tokens of a request can need."""
    upto = min(max(claim.final, claim.allocated), claim.allocated + cap)
    return page_ceil(upto, page) - page_ceil(claim.allocated, page)


def entering(claim: Claim, step: int = 0) -> Claim:
    """The claim of a request that does not run yet: half of what it may still generate, but all of
    ``step``, what its first step wants free (``speculation.step_tokens``)."""
    half = (claim.final - claim.allocated + 1) // 2
    return Claim(claim.allocated, min(claim.allocated + max(half, step), claim.final))


def entry_cost(prefix: int, claim: Claim, cap: int, page: int) -> int:
    """What admitting one request takes: its delta pages and its own reserve.

    ``prefix`` tokens are held by the tree already (and no longer evictable: the caller holds a
    lease); ``claim.allocated`` tokens must be there to start.
    """
    return page_ceil(claim.allocated, page) - prefix + growth(claim, cap, page)


# ---- summed over requests: what claims.py counts with ----


class Track(NamedTuple):
    """A value that grows by one a step: ``start`` + steps, up to ``limit``."""

    start: int
    limit: int


class CeilSum:
    """The sum of values in whole pages, each of which grows as its ``Track`` says.

    All requests of a decode batch grow by one token a step, so a step needs no look at any of them:
    of those that have filled their last page, each opens a new one, and how many these are was
    counted when they came.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._steps = 0
        #: Tokens of whole pages.
        self.total = 0
        #: Of the values that still grow, how many have a start with this remainder.
        self._growing = [0] * page
        #: Those that will have reached their limit after so many steps, likewise.
        self._ending: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def add(self, track: Track) -> None:
        """Count a value from now on."""
        self._count(track, 1)

    def remove(self, track: Track) -> None:
        """Count it no longer."""
        self._count(track, -1)

    def _count(self, track: Track, by: int) -> None:
        start, limit = track
        self.total += by * page_ceil(min(start + self._steps, limit), self._page)
        if start + self._steps < limit:
            remainder, end = start % self._page, limit - start
            self._growing[remainder] += by
            ending = self._ending[end]
            ending[remainder] += by
            # With speculation values are counted anew instead of stepped, and no step drops them.
            if not ending[remainder]:
                del ending[remainder]
                if not ending:
                    del self._ending[end]

    def step(self) -> None:
        """Every value grows."""
        self.total += self._page * self._growing[-self._steps % self._page]
        self._steps += 1
        for remainder, count in self._ending.pop(self._steps, Counter()).items():
            self._growing[remainder] -= count


class GrowthSum:
    """The sum of ``growth`` over running requests, for one ``cap`` and ``page``."""

    def __init__(self, cap: int, page: int) -> None:
        self._cap = cap
        self.steps = 0
        self._now, self._then = CeilSum(page), CeilSum(page)

    @property
    def total(self) -> int:
        """New pages, in tokens, that all of them can need within their next ``cap`` tokens."""
        return self._then.total - self._now.total

    def add(self, allocated: int, final: int) -> Track:
        """Count a request that has ``allocated`` tokens now and ends with ``final``."""
        track = Track(allocated - self.steps, max(final, allocated))
        self._now.add(track)
        self._then.add(self._ahead(track))
        return track

    def remove(self, track: Track) -> None:
        """The request with this track ended."""
        self._now.remove(track)
        self._then.remove(self._ahead(track))

    def step(self) -> None:
        """Every request has one token more."""
        self.steps += 1
        self._now.step()
        self._then.step()

    def _ahead(self, track: Track) -> Track:
        return Track(track.start + self._cap, track.limit)


# ---- whether there is room for it ----


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

    def __init__(self, queue: RadixPreallocQueue, claims: Claims) -> None:
        """``claims``: what admitted requests hold; the tree tells it of every change."""
        self._queue = queue
        self._tree = queue.tree_cache
        self._allocator: BaseTokenToKVPoolAllocator = queue.token_to_kv_pool_allocator
        self._page, self._step = claims.page, claims.step
        self.claims = self._tree.claims = claims
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
        """The pool as text, for a request that waits."""
        pool = self.pool()
        evictable = self._tree.evictable_size()
        deferred = sum(
            page_ceil(req.kv_allocated_len, self._page) - req.cache_protected_len
            for req in self._queue.transfer_queue.deferred_requests
        )
        return (
            f"{pool.free - evictable} free, {evictable} evictable, {pool.protected} protected, "
            f"{pool.reserved} reserved, {deferred} in deferred release"
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
        import torch

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
                    f"tokens but freed fewer than the requested {shortfall}"
                )
            logger.warning(
                "request %s stays queued: it needs %d tokens, %d are free after eviction, %d "
                "evictable",
                req.rid,
                needed,
                self._allocator.available_size(),
                self._tree.evictable_size(),
            )
        return slots

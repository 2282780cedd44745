"""Whether a request fits into the decode pool now, and the slots for it; the settings of waits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.disaggregation.delta.decode.claims import (
    Claim,
    Claims,
    entering,
    entry_cost,
    expected_length,
    final_length,
    start_length,
)
from sglang.srt.disaggregation.delta.decode.prefix_tree import (
    DecodeRadixTree,
    KnownPrefix,
    PrefixLease,
)
from sglang.srt.disaggregation.delta.decode.record import Refusal
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

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


class DecodeBudget:
    """Counts, evicts, and allocates for the prealloc queue; owns the claims on the pool."""

    def __init__(
        self,
        tree: DecodeRadixTree,
        allocator: BaseTokenToKVPoolAllocator,
        claims: Claims,
        total: int,
        alone: bool,
    ) -> None:
        """``claims``: what admitted requests hold; the tree tells it of every change. ``total``:
        the pool's size in tokens; ``alone``: whether the server has one rank."""
        self._tree, self._allocator, self._total = tree, allocator, total
        self._page, self._alone = claims.page, alone
        self.claims = tree.claims = claims
        #: Tokens that this rank has and another one has not; zero while ranks are in step.
        self.surplus = 0

    @property
    def free(self) -> int:
        """Tokens that are free or can be evicted."""
        return int(self._allocator.available_size() + self._tree.evictable_size())

    def refusal(
        self, req: Req, prefix: KnownPrefix | PrefixLease, *, taken: int = 0
    ) -> Refusal | None:
        """Why a request that shares ``prefix`` cannot enter; None if it can.

        Of what looks free, ``taken`` tokens are not: the prefix itself if it is not locked, and
        what others take first. A request that resumes must have room like a running one, or it
        would be retracted again at once.
        """
        length, cost = start_length(req), self.cost(req, prefix.length)
        if cost > self.free - taken - self.surplus - self.claims.reserved:
            return Refusal("no_tokens", cost)
        whole = page_ceil(length, self._page)
        need = page_ceil(expected_length(req, length, self.claims.step), self._page) - whole
        private = whole - prefix.length
        if not self.claims.everyone_can_finish(prefix.node, private, need, self._total):
            return Refusal("cannot_finish", cost)
        return None

    def reserve(self, req: Req, lease: PrefixLease) -> torch.Tensor | Refusal:
        """Slots for the request's tokens behind its lease (1-D int64), or why there are none;
        evicts what is missing.

        Called with the lease held: locking takes the prefix out of what can be evicted, and a
        budget from before it would count the same tokens twice.
        """
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        refusal = self.refusal(req, lease)
        if refusal is not None:
            return refusal
        length = start_length(req)
        needed = page_ceil(length, self._page) - lease.length
        if needed == 0:
            return torch.empty(0, dtype=torch.int64, device=self._allocator.device)
        shortfall = needed - self._allocator.available_size()
        if shortfall > 0:
            self._tree.evict(EvictParams(num_tokens=shortfall))
        slots = self._allocator.alloc(needed)
        if slots is not None:
            return slots[: length - lease.length]
        if not self._alone:
            # Others may have got theirs. A wrong count is better found here than by a hang.
            raise RuntimeError(
                f"request {req.rid}: the tree counts {self._tree.evictable_size()} evictable "
                f"tokens but freed fewer than the requested {shortfall}"
            )
        logger.warning(
            "request %s stays queued: it needs %d tokens, %d are free after eviction, %d evictable",
            req.rid,
            needed,
            self._allocator.available_size(),
            self._tree.evictable_size(),
        )
        return Refusal("no_tokens", self.cost(req, lease.length))

    def cost(self, req: Req, prefix: int) -> int:
        """What admitting it takes beyond a locked ``prefix``, in tokens."""
        claims = self.claims
        # SGLang lets a text grow to the pool's end; a step's room behind that is nowhere, and who
        # waits for it would wait for ever, with everybody behind.
        claim = Claim(start_length(req), min(final_length(req, claims.step), self._total))
        if req.is_retracted:
            return entry_cost(prefix, claim, claims.cap, self._page)
        return entry_cost(prefix, entering(claim, claims.step), claims.entry_cap, self._page)

    def describe(self, deferred: Iterable[Req]) -> str:
        """The pool as text, for a request that waits. ``deferred``: whose release is deferred."""
        held = sum(
            page_ceil(req.kv_allocated_len, self._page) - req.cache_protected_len
            for req in deferred
        )
        return (
            f"{self._allocator.available_size()} free, {self._tree.evictable_size()} evictable, "
            f"{self._tree.protected_size()} protected, {self.claims.reserved} reserved, "
            f"{held} in deferred release"
        )

"""The token budget of decode admission: pure arithmetic, all results in tokens of whole pages.

Stock reserves ``--num-reserved-decode-tokens`` (512 by default) for every request in sight. With a
pool full of shared prefixes that reserve, and not the KV, decides how many requests run. Here a
*running* request reserves what it can still generate, at most that number. One that does not run
yet reserves half of it: the requests of a steady stream are half-way through their answers on
average. If too many were let in, the youngest is retracted: its KV goes to the CPU and back, and no
work is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.disaggregation.delta.pages import page_ceil


@dataclass(frozen=True)
class Claim:
    """One request's claim on the pool: ``allocated`` tokens now, ``final`` when it has ended."""

    allocated: int
    final: int


class PoolState(NamedTuple):
    """The pool in tokens: ``free`` counts the evictable, ``reserved`` is promised."""

    free: int
    protected: int
    reserved: int


def growth(claim: Claim, cap: int, page: int) -> int:
    """New pages, in tokens, that the next ``cap`` generated tokens of a request can need."""
    upto = min(max(claim.final, claim.allocated), claim.allocated + cap)
    return page_ceil(upto, page) - page_ceil(claim.allocated, page)


def entering(claim: Claim) -> Claim:
    """The claim of a request that does not run yet: half of what it may still generate."""
    return Claim(claim.allocated, claim.allocated + (claim.final - claim.allocated + 1) // 2)


def reserved(claims: Iterable[Claim], cap: int, page: int) -> int:
    """What all admitted requests together may still need before anybody is retracted."""
    return sum(growth(claim, cap, page) for claim in claims)


def entry_cost(prefix: int, claim: Claim, cap: int, page: int) -> int:
    """What admitting one request takes: its delta pages and its own reserve.

    ``prefix`` tokens are held by the tree already (and no longer evictable: the caller holds a
    lease); ``claim.allocated`` tokens must be there to start.
    """
    return page_ceil(claim.allocated, page) - prefix + growth(claim, cap, page)


def can_finish_alone(final: int, own_pinned: int, pinned: int, total: int, page: int) -> bool:
    """Whether a request could run to its end if every running request but it were retracted.

    ``pinned`` tokens belong to requests that cannot be retracted (their transfer is under way);
    ``own_pinned`` of them are the request's own: its shared prefix, and its private pages if it
    does not run yet. Where this does not hold, admitting one more transfer could leave the last
    running request without memory, and SGLang would abort it.
    """
    return page_ceil(final, page) - own_pinned <= total - pinned


@dataclass
class BlockedHead:
    """Remembers why the head of the queue did not fit, to not match it again on every step.

    Matching costs O(prompt), and refreshes the prefix in the LRU order by mere polling.
    """

    rid: str
    cost: int
    #: The pool when it was refused.
    pool: PoolState
    #: Inserts into the tree until then: a later one may have made the head cheaper.
    inserts: int

    def still_blocked(self, rid: str, pool: PoolState, inserts: int) -> bool:
        """Whether trying again is pointless."""
        if rid != self.rid or inserts != self.inserts:
            return False
        return pool == self.pool or pool.free - pool.reserved < self.cost

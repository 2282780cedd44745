"""The token budget of decode admission: pure arithmetic, all results in tokens of whole pages.

Stock reserves ``--num-reserved-decode-tokens`` (512 by default) for every request in sight. With a
pool full of shared prefixes that reserve, and not the KV, decides how many requests run. Here a
*running* request reserves what it can still generate, at most that number. One that does not run
yet reserves half of it: the requests of a steady stream are half-way through their answers on
average. If too many were let in, the youngest is retracted: its KV goes to the CPU and back, and no
work is lost.
"""

from __future__ import annotations

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


def entry_cost(prefix: int, claim: Claim, cap: int, page: int) -> int:
    """What admitting one request takes: its delta pages and its own reserve.

    ``prefix`` tokens are held by the tree already (and no longer evictable: the caller holds a
    lease); ``claim.allocated`` tokens must be there to start.
    """
    return page_ceil(claim.allocated, page) - prefix + growth(claim, cap, page)

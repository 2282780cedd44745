"""The first requests in line, with a lease each, taken before the ranks agree on its length.

The locks are taken first so that nothing is evicted between what the ranks agree on and its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.decode_radix.agreement import Offer
from sglang.srt.disaggregation.decode_radix.lease import PrefixLease

#: Tried in one step at most: each is matched, and holds a lock until the step ends.
LIMIT = 8


@dataclass
class Candidate:
    """One request in line. ``entry``: what its queue holds for it (may be the request itself)."""

    entry: Any
    req: Any
    #: The tokens whose KV it needs to start.
    token_ids: list[int]
    #: Whether it may share a prefix; after ``settle``, on all ranks.
    shares: bool
    #: Whether this rank has given it up already.
    given_up: bool = False
    lease: PrefixLease | None = None

    @property
    def offer(self) -> int:
        """This rank's word on the candidate."""
        if self.given_up:
            return Offer.ABSTAIN
        if self.lease is None:
            return Offer.STOP
        return Offer.SHARED + self.lease.length if self.shares else Offer.PRIVATE

    def release(self) -> None:
        """Give the lock back, if it still has one."""
        if self.lease is not None:
            self.lease.release()


def take_leases(
    tree: Any, candidates: Sequence[Candidate], blocked: Callable[[Any], bool]
) -> list[int]:
    """Match and lock for each candidate up to the first that is ``blocked``; their offers."""
    for candidate in candidates:
        if candidate.given_up:
            continue
        if blocked(candidate.req):
            break
        if candidate.shares:
            candidate.lease = PrefixLease.take(tree, candidate.token_ids, candidate.req.extra_key)
        else:
            candidate.lease = PrefixLease.empty(tree)
    return [candidate.offer for candidate in candidates]


def settle(tree: Any, candidates: Sequence[Candidate], agreed: Sequence[int]) -> list[Candidate]:
    """Those that may be tried, with leases of the length that the ranks agreed on.

    Everybody from the first stop on lets go of its lease.
    """
    stop = next((at for at, offer in enumerate(agreed) if offer == Offer.STOP), len(agreed))
    release(candidates[stop:])
    tried = list(candidates[:stop])
    for candidate, offer in zip(tried, agreed, strict=False):
        if candidate.lease is None or offer >= Offer.ABSTAIN:
            continue
        candidate.shares = offer >= Offer.SHARED
        length = max(offer - Offer.SHARED, 0)
        if length < candidate.lease.length:
            shorter = candidate.token_ids[:length]
            before = candidate.lease
            # The new lock first: nothing of the path is free for a moment.
            candidate.lease = PrefixLease.take(tree, shorter, candidate.req.extra_key)
            before.release()
    return tried


def release(candidates: Sequence[Candidate]) -> None:
    """Give all locks back that were not handed over."""
    for candidate in candidates:
        candidate.release()

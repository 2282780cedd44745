"""The first requests in line: what the tree holds of each, found before the ranks agree on it.

Matching costs the length of a prompt. So only those are matched that could get in on this rank, one
after the other, and the first that could not. That one is not matched again while its match would
end where it did. Locks are taken before the ranks agree, so that nothing is evicted
between the agreement and its use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from sglang.srt.disaggregation.delta.decode.prefix_tree import PrefixLease
from sglang.srt.disaggregation.delta.decode.waiting import Refusal
from sglang.srt.disaggregation.delta.rank_agreement import Offer

#: Tried in one step at most: each is matched, and holds a lock until the step ends.
LIMIT = 8


@dataclass
class Candidate:
    """One request in line. ``entry``: what its queue holds for it (may be the request itself)."""

    entry: Any
    req: Any
    #: Whether it may share a prefix; after ``settle``, on all ranks.
    shares: bool = False
    #: Whether this rank has given it up already.
    given_up: bool = False
    lease: PrefixLease | None = None
    #: Why it cannot get in, as this rank sees it.
    refusal: Refusal | None = None

    @property
    def resumes(self) -> bool:
        """Whether it was retracted, and not just handshaken."""
        return self.entry is self.req

    @property
    def length(self) -> int:
        """How many tokens need KV to start: all but the last one generated."""
        return len(self.req.origin_input_ids) + max(len(self.req.output_ids) - 1, 0)

    @cached_property
    def token_ids(self) -> list[int]:
        """These tokens."""
        prompt: list[int] = self.req.origin_input_ids
        return (prompt + self.req.output_ids)[:-1] if self.req.output_ids else prompt

    @property
    def offer(self) -> int:
        """This rank's word on the candidate."""
        if self.given_up:
            return Offer.ABSTAIN
        if self.refusal is not None or self.lease is None:
            return Offer.STOP
        return Offer.SHARED + self.lease.length if self.shares else Offer.PRIVATE

    def take(self, tree: Any) -> None:
        """Match it, and lock what the tree holds of it."""
        if self.shares:
            self.lease = PrefixLease.take(tree, self.token_ids, self.req.extra_key)
        else:
            self.lease = PrefixLease.empty(tree)

    def release(self) -> None:
        """Give the lock back, if it still has one."""
        if self.lease is not None:
            self.lease.release()


class Plan(Protocol):
    """What one rank would do in a step (``plan``)."""

    @property
    def has_place(self) -> bool:
        """Whether one more request could get a row, whatever its size."""

    def find(self, candidate: Candidate) -> bool:
        """Lock what the tree holds of it; false if it is known to be refused as before."""

    def waits(self, candidate: Candidate) -> bool:
        """Whether others pass it, because its prefix is just arriving."""

    def admit(self, candidate: Candidate) -> bool:
        """Whether it would get in behind those before; if not, ``refusal`` says why."""


def take_leases(candidates: Sequence[Candidate], plan: Plan) -> list[int]:
    """Match and lock for each candidate up to the first that would not get in; their offers."""
    for candidate in candidates:
        if candidate.given_up:
            continue
        if not plan.has_place:
            break
        if not plan.find(candidate):
            break
        if not plan.waits(candidate) and not plan.admit(candidate):
            break
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

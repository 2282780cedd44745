"""The first requests in line: which of them are attempted in a step, as all ranks agree.

Matching costs the length of a prompt, so only those are matched that could get in on this rank, one
after the other, and the first that could not; that one is not matched again while its match would
end where it did. Locks are taken before the ranks agree, so that nothing is evicted between the
agreement and its use. The ranks then decide from what they agreed on, by the same arithmetic: a
plan only says for whom it is worth to ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: tokens, or pairs of them; what may be None

from sglang.srt.disaggregation.delta.decode.admission import DecodeBudget
from sglang.srt.disaggregation.delta.decode.claims import start_length
from sglang.srt.disaggregation.delta.decode.handshakes import bootstrap_addr
from sglang.srt.disaggregation.delta.decode.prefix_tree import (
    DecodeRadixTree,
    KnownPrefix,
    PrefixLease,
    key_pairs,
    unlocked_tokens,
)
from sglang.srt.disaggregation.delta.decode.record import (
    ArrivingPrefix,
    ArrivingPrefixes,
    Refusal,
    record_of,
)
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import Offer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

#: Tried in one step at most: each is matched, and holds a lock until the step ends.
TRIED = 8
#: Candidates of a step at most, with those that wait for an arriving prefix. They are found without
#: a match, and hold no lock.
LOOKED_AT = 128
#: Requests in line, beside the candidates, whose failure and waiting time a step looks at. A longer
#: line is gone through part by part: a step costs the same however many wait.
CHECKED = 128


# ---- prefixes that are arriving ----
#
# When a burst of requests with one new prefix arrives, none of them hits: the first one's KV is
# still being moved, or computed locally. Admitting them all would do that once for each and fill
# the pool with duplicates. So a request whose *next* tokens after its match are just arriving for
# another one, with the same prefill server, waits for those to land. They are computed first in any
# case, so little is lost. Such followers are found by their tokens: copies of a long prompt would
# otherwise cost a match each before any of them can get in.


def arriving(reqs: Iterable[Req]) -> ArrivingPrefixes:
    """What ``reqs`` bring, whose KV is on its way."""
    found = (record_of(req).arriving for req in reqs)
    return dict.fromkeys(prefix for prefix in found if prefix is not None)


@dataclass
class Candidate:
    """One request in line. ``entry``: SGLang's ``DecodeRequest`` in the prealloc queue; None for a
    retracted request."""

    entry: Any
    req: Req
    #: Whether it may share a prefix; after ``settle``, on all ranks.
    shares: bool = False
    #: Whether this rank has given it up already.
    given_up: bool = False
    #: Whether it waits for an arriving prefix, as this rank sees it in this step.
    waits: bool = False
    #: A ``PrefixLease``; None where it was not attempted.
    lease: Any = None
    #: Why it cannot get in, as this rank sees it in this step.
    refusal: Refusal | None = None
    #: With how many new tokens at most it is admitted: it has no prefill server, and is computed
    #: locally or nowhere.
    most_new: float = math.inf
    #: Whether it is computed locally, once it has its pages.
    is_local: bool = False

    def __post_init__(self) -> None:
        #: Whether it was retracted, and not just handshaken; whether it has no prefill server.
        self.resumes = bool(self.req.is_retracted)
        self.is_alone = record_of(self.req).is_alone
        self.length = start_length(self.req)

    @cached_property
    def token_ids(self) -> list[int]:
        """These tokens."""
        prompt = self.req.origin_input_ids
        return (prompt + self.req.output_ids)[:-1] if self.req.output_ids else prompt

    @property
    def offer(self) -> int:
        """This rank's vote on the candidate."""
        if self.given_up:
            return Offer.ABSTAIN
        if self.waits:
            return Offer.WAITS
        if self.refusal is not None or self.lease is None:
            return Offer.STOP
        return Offer.SHARED + self.lease.length if self.shares else Offer.PRIVATE

    def brings(self, window: int) -> ArrivingPrefix | None:
        """The KV that its transfer brings, if others may wait for that."""
        if self.resumes or not self.shares or self.lease is None or window == 0:
            return None
        token_ids, start = self.req.origin_input_ids, self.lease.length
        if len(token_ids) - start < window:
            return None
        address = bootstrap_addr(self.req)
        return ArrivingPrefix(address, self.req.extra_key, token_ids, start, window)

    def awaits(self, arriving: ArrivingPrefixes) -> ArrivingPrefix | None:
        """What others pass it for while that arrives; needs no match."""
        if self.resumes or not self.shares or record_of(self.req).wait.prefix_timed_out:
            return None
        address = bootstrap_addr(self.req)
        return next((each for each in arriving if each.is_shared_by(address, self.req)), None)

    def key_ids(self, tree: DecodeRadixTree) -> list[Any]:
        """What ``tree`` finds its KV by: these tokens, or the pairs of them."""
        return key_pairs(self.req, self.length) if tree.is_eagle else self.token_ids

    def take(self, tree: DecodeRadixTree) -> None:
        """Match it, and lock what the tree holds of it."""
        if self.shares:
            self.lease = PrefixLease.take(tree, self.key_ids(tree), self.req.extra_key)
        else:
            self.lease = PrefixLease.empty(tree)

    def shorten(self, tree: DecodeRadixTree, length: int) -> None:
        """Share the first ``length`` tokens at most, a whole number of pages."""
        before = self.lease
        if before is None or length >= before.length:
            return
        # The new lock first: nothing of the path is free for a moment.
        shorter = self.key_ids(tree)[:length]
        self.lease = PrefixLease.take(tree, shorter, self.req.extra_key)
        before.release()

    def release(self) -> None:
        """Give the lock back, if it still has one."""
        if self.lease is not None:
            self.lease.release()


class Planner:
    """Takes the leases of each step, for what this rank would do. One for each prealloc queue.

    It remembers where the match of the request that was stopped last ended; the next step begins
    with it.
    """

    def __init__(
        self,
        budget: DecodeBudget,
        tree: DecodeRadixTree,
        may_share: Callable[[Candidate], bool],
        window: int,
    ) -> None:
        """``window``: tokens that are worth waiting for (``Limits.window``)."""
        self._budget, self._tree = budget, tree
        self._may_share, self._window = may_share, window
        #: The request itself, not its name: clients may use a name again for another prompt. And
        #: whether it shared, and its ``KnownPrefix``.
        self._stopped: tuple[Any, bool, Any] = (None, False, None)

    def take_leases(
        self, candidates: Sequence[Candidate], places: int, arriving: ArrivingPrefixes
    ) -> list[int]:
        """Match and lock for each candidate up to the first that would not get in; their offers.

        Those that wait for an arriving prefix are passed over, without a match. ``places``: how
        many rows and slots are free.
        """
        claims, arriving = self._budget.claims, dict(arriving)  # and what those bring who get in
        taken = tried = 0  # tokens that look free, and are taken by those who would get in
        entering: list[Candidate] = []
        try:
            for candidate in candidates:
                if candidate.given_up:
                    continue
                candidate.shares = self._may_share(candidate)
                candidate.waits = candidate.awaits(arriving) is not None
                if candidate.waits:
                    continue
                if tried == TRIED or len(entering) >= places:
                    break
                tried += 1
                if not self._find(candidate, taken):
                    break
                req, lease = candidate.req, candidate.lease
                if candidate.length - lease.length > candidate.most_new:
                    continue  # it gets no memory, so it waits for none, and is in nobody's way
                candidate.refusal = self._budget.refusal(req, lease, taken=taken)
                if candidate.refusal is not None:
                    self.stopped(candidate)
                    candidate.release()
                    break
                taken += page_ceil(candidate.length, claims.page) - lease.length
                claims.entered(req, lease.node, lease.length, candidate.length)
                entering.append(candidate)
                brought = candidate.brings(self._window)
                if brought is not None:
                    arriving[brought] = None
        finally:
            for candidate in entering:  # nobody has entered yet
                claims.left(candidate.req)
        return [candidate.offer for candidate in candidates]

    def _find(self, candidate: Candidate, taken: int) -> bool:
        """Lock what the tree holds of it; false if it is known to be refused as before."""
        tree, (req, shared, known) = self._tree, self._stopped
        is_known = req is candidate.req and shared == candidate.shares and known.holds(tree)
        if not is_known or candidate.length - known.length > candidate.most_new:
            candidate.take(tree)
            return True
        taken += unlocked_tokens(known.node)
        candidate.refusal = self._budget.refusal(candidate.req, known, taken=taken)
        if candidate.refusal is None:
            candidate.lease = known.lock(tree)
        return candidate.refusal is None

    def stopped(self, candidate: Candidate) -> None:
        """``candidate`` was checked, and does not get in now."""
        if candidate.lease is not None:
            ids = candidate.key_ids(self._tree) if candidate.shares else []
            known = KnownPrefix.of(self._tree, candidate.lease, ids, candidate.req.extra_key)
            self._stopped = (candidate.req, candidate.shares, known)


def settle(
    tree: DecodeRadixTree, candidates: Sequence[Candidate], agreed: Sequence[int]
) -> list[Candidate]:
    """Those that may be attempted, with leases of the length that the ranks agreed on.

    Everybody from the first stop on lets go of its lease.
    """
    stop = next((at for at, offer in enumerate(agreed) if offer == Offer.STOP), len(agreed))
    release(candidates[stop:])
    tried = list(candidates[:stop])
    for candidate, offer in zip(tried, agreed, strict=False):
        if offer == Offer.WAITS:
            candidate.shares = True  # as it was on the rank that says so
            continue
        if candidate.lease is None or offer >= Offer.ABSTAIN:
            continue
        candidate.shares = offer >= Offer.SHARED
        candidate.shorten(tree, max(offer - Offer.SHARED, 0))
    return tried


def release(candidates: Sequence[Candidate]) -> None:
    """Give all locks back that were not handed over."""
    for candidate in candidates:
        candidate.release()

"""The first requests in line: which of them are attempted in a step, as all ranks agree.

Matching costs the length of a prompt, so only those are matched that could get in on this rank, one
after the other, and the first that could not; that one is not matched again while its match would
end where it did. Locks are taken before the ranks agree, so that nothing is evicted between the
agreement and its use. The ranks then decide from what they agreed on, by the same arithmetic: a
plan only says for whom it is worth to ask.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: tokens, or pairs of them

from sglang.srt.disaggregation.delta.decode.admission import DecodeBudget, Limits, PoolState
from sglang.srt.disaggregation.delta.decode.handshakes import bootstrap_addr
from sglang.srt.disaggregation.delta.decode.prefix_tree import (
    DecodeRadixTree,
    KnownPrefix,
    PrefixLease,
    unlocked_tokens,
)
from sglang.srt.disaggregation.delta.decode.record import (
    ArrivingPrefix,
    ArrivingPrefixes,
    Refusal,
    record_of,
)
from sglang.srt.disaggregation.delta.decode.speculation import key_pairs
from sglang.srt.disaggregation.delta.observability import RateLimitedLog
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import (
    AdmissionVote,
    Checksum,
    Offer,
    State,
    agree,
    alone,
    over,
)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.delta.decode.prealloc_queue import RadixPreallocQueue
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

#: Tried in one step at most: each is matched, and holds a lock until the step ends.
TRIED = 8
#: Candidates of a step at most, with those that wait for an arriving prefix. They are found without
#: a match, and hold no lock.
LOOKED_AT = 128
#: Requests in line, beside the candidates, whose failure and waiting time a step looks at. A longer
#: line is gone through part by part: a step costs the same however many wait.
CHECKED = 128
#: Seconds between two errors about ranks whose pools differ.
LOG_EVERY_S = 30.0


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


def under_way(queue: RadixPreallocQueue) -> ArrivingPrefixes:
    """What prefill sends to this server, and what it computes itself."""
    reqs, turns = [entry.req for entry in queue.transfer_queue.queue], queue.local_turns
    if turns is not None:
        reqs += [req for req in turns.requests if not record_of(req).committed]
    return arriving(req for req in reqs if queue.tree_cache.may_share(req))


@dataclass
class Candidate:
    """One request in line. ``entry``: the prealloc queue's; None for a retracted request."""

    entry: DecodeRequest | None
    req: Req
    #: Whether it may share a prefix; after ``settle``, on all ranks.
    shares: bool = False
    #: Whether this rank has given it up already.
    given_up: bool = False
    #: Whether it waits for an arriving prefix, as this rank sees it in this step.
    waits: bool = False
    lease: PrefixLease | None = None
    #: Why it cannot get in, as this rank sees it in this step.
    refusal: Refusal | None = None
    #: Whether it has no prefill server, and is computed locally or nowhere; with so many new tokens
    #: at most.
    is_alone: bool = False
    most_new: float = math.inf

    @property
    def resumes(self) -> bool:
        """Whether it was retracted, and not just handshaken."""
        return bool(self.req.is_retracted)

    @property
    def length(self) -> int:
        """How many tokens need KV to start: all but the last one generated."""
        return len(self.req.origin_input_ids) + max(len(self.req.output_ids) - 1, 0)

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


class StoppedMatch:
    """Where the match of the request that was stopped last ended; the next step begins with it."""

    def __init__(self) -> None:
        #: The request itself, not its name: clients may use a name again for another prompt.
        self._last: tuple[Req, bool, KnownPrefix] | None = None

    def recall(self, tree: DecodeRadixTree, candidate: Candidate) -> KnownPrefix | None:
        """Where the match of ``candidate`` ends, if that is known."""
        if self._last is None:
            return None
        req, shared, known = self._last
        same = req is candidate.req and shared == candidate.shares
        return known if same and known.holds(tree) else None

    def note(self, tree: DecodeRadixTree, candidate: Candidate) -> None:
        """``candidate`` was checked, and does not get in now."""
        if candidate.lease is not None:
            ids = candidate.key_ids(tree) if candidate.shares else []
            known = KnownPrefix.of(tree, candidate.lease, ids, candidate.req.extra_key)
            self._last = (candidate.req, candidate.shares, known)


class StepPlan:
    """What one rank would do in a step. ``places``: how many rows and slots are free."""

    def __init__(
        self,
        budget: DecodeBudget,
        stopped: StoppedMatch,
        may_share: Callable[[Candidate], bool],
        tree: DecodeRadixTree,
        places: int,
        arriving: ArrivingPrefixes,
        window: int,
    ) -> None:
        self._budget, self._stopped, self._tree = budget, stopped, tree
        self._may_share = may_share
        self._page: int = tree.page_size
        self._places, self._window = places, window
        #: What is arriving, and what those bring who would get in.
        self._arriving = dict(arriving)
        self._entering: list[Req] = []
        #: Tokens that look free, and are taken by those who would get in.
        self._taken = 0

    @property
    def has_place(self) -> bool:
        """Whether one more request could get a row and a slot, whatever its size."""
        return len(self._entering) < self._places

    def find(self, candidate: Candidate) -> bool:
        """Lock what the tree holds of it; false if it is known to be refused as before."""
        known = self._stopped.recall(self._tree, candidate)
        if known is None or candidate.length - known.length > candidate.most_new:
            candidate.take(self._tree)
            return True
        taken = self._taken + unlocked_tokens(known.node)
        candidate.refusal = self._budget.refusal(candidate, known, taken=taken)
        if candidate.refusal is None:
            candidate.lease = known.lock(self._tree)
        return candidate.refusal is None

    def waits(self, candidate: Candidate) -> bool:
        """Whether others pass it, because its prefix is just arriving."""
        candidate.shares = self._may_share(candidate)
        candidate.waits = candidate.awaits(self._arriving) is not None
        return candidate.waits

    def admit(self, candidate: Candidate) -> bool:
        """Whether it would get in behind those before; if not, it lets go and says why."""
        lease = candidate.lease
        assert lease is not None, "it was found before"
        if candidate.length - lease.length > candidate.most_new:
            return True  # it gets no memory, so it waits for none, and is in nobody's way
        candidate.refusal = self._budget.refusal(candidate, lease, taken=self._taken)
        if candidate.refusal is not None:
            self._stopped.note(self._tree, candidate)
            candidate.release()
            return False
        self._taken += page_ceil(candidate.length, self._page) - lease.length
        self._budget.claims.entered(candidate.req, lease.node, lease.length, candidate.length)
        self._entering.append(candidate.req)
        brought = candidate.brings(self._window)
        if brought is not None:
            self._arriving[brought] = None
        return True

    def close(self) -> None:
        """Nobody has entered yet."""
        for req in self._entering:
            self._budget.claims.left(req)


def take_leases(candidates: Sequence[Candidate], plan: StepPlan) -> list[int]:
    """Match and lock for each candidate up to the first that would not get in; their offers.

    Those that wait for an arriving prefix are passed over, without a match.
    """
    tried = 0
    for candidate in candidates:
        if candidate.given_up or plan.waits(candidate):
            continue
        if tried == TRIED or not plan.has_place:
            break
        tried += 1
        if not plan.find(candidate) or not plan.admit(candidate):
            break
    return [candidate.offer for candidate in candidates]


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


class AgreedSteps:
    """Starts the steps of one prealloc queue, with one collective each."""

    def __init__(
        self,
        queue: RadixPreallocQueue,
        budget: DecodeBudget,
        may_share: Callable[[Candidate], bool],
    ) -> None:
        """``queue``: the prealloc queue."""
        self._queue, self._budget, self._may_share = queue, budget, may_share
        self._stopped = StoppedMatch()
        self._log = RateLimitedLog(logger, LOG_EVERY_S, lambda: self._queue.clock())

    @contextmanager
    def step(
        self,
        checked: list[DecodeRequest],
        first: list[Candidate],
        limits: Limits,
        arriving: ArrivingPrefixes,
        *,
        slots_needed: bool = True,
    ) -> Iterator[tuple[AdmissionVote, list[Candidate]]]:
        """What the ranks agree on, and who may be attempted, with leases; takes the leases back.

        ``checked``: entries without pages whose handshake is done, the candidates' among them;
        ``first``: the candidates. Both are the same requests on all ranks, and there is at least
        one of either.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        queue, budget, tree = self._queue, self._budget, self._queue.tree_cache
        pool, now, failed = budget.pool(), queue.clock(), KVPoll.Failed
        states = [_state(entry, now, limits, failed) for entry in checked]
        if min(states, default=State.FINE) <= State.EXPIRED:
            ended = {id(e) for e, s in zip(checked, states, strict=True) if s <= State.EXPIRED}
            for candidate in first:
                candidate.given_up = id(candidate.entry) in ended
        rows = queue.req_to_token_pool.available_size()
        slots = queue.req_to_metadata_buffer_idx_allocator.available_size()
        places = min(rows, slots) if slots_needed else rows
        plan = StepPlan(
            budget, self._stopped, self._may_share, tree, places, arriving, limits.window
        )
        try:
            try:
                offers = take_leases(first, plan)
            finally:
                plan.close()
            free, protected = pool.free, pool.protected
            turns = queue.local_turns
            costs = [] if turns is None else turns.votes(first)
            vote = AdmissionVote(
                states, offers, rows, slots, free, protected, -free, -protected, costs
            )
            agreed = vote
            if not alone(queue.gloo_group):
                checksum = Checksum()
                checksum.note([entry.req.rid for entry in checked], [one.req.rid for one in first])
                agreed = agree(vote, checksum, over(queue.gloo_group))
            if agreed.pools_differ:
                self._log_difference(agreed, pool)
            budget.surplus = pool.free - agreed.free
            tried = settle(tree, first, agreed.offers)
            if len(tried) < len(first) and first[len(tried)].offer != Offer.STOP:
                self._stopped.note(tree, first[len(tried)])  # another rank stops it
            yield agreed, tried
        finally:
            release(first)

    def _log_difference(self, agreed: AdmissionVote, pool: PoolState) -> None:
        self._log.error(
            "pools",
            "the KV pools of this server's ranks differ: this rank has %d free and %d protected "
            "tokens, the smallest numbers on any rank are %d and %d. Admission uses those. If this "
            "persists, a rank leaks pages: SGLANG_DISAGGREGATION_CHECK_INVARIANTS=1 checks idle "
            "servers, and ends one that leaks",
            pool.free,
            pool.protected,
            agreed.free,
            agreed.protected,
        )


def _state(entry: DecodeRequest, now: float, limits: Limits, failed: int) -> State:
    """What this rank thinks of a request without pages. ``failed``: a poll that says so."""
    if entry.req.finished_reason is not None or entry.kv_receiver.poll() == failed:
        return State.FAILED
    wait = record_of(entry.req).wait
    assert wait.since is not None, "its handshake is done"
    if now - wait.since >= limits.for_memory:
        return State.EXPIRED
    if wait.prefix_since is not None and now - wait.prefix_since >= limits.for_prefix:
        return State.WAITED_ENOUGH
    return State.FINE

"""One step of admission: what one rank sees, what it votes, what all agree on, what is decided.

The queue takes a ``Snapshot``. ``Admission.vote`` makes this rank's vote of it, ``rank_agreement``
that of all ranks, and ``Admission.decide`` decides from that alone, by the same arithmetic on every
rank. ``RadixPreallocQueue.carry_out`` has the effects.

Matching costs the length of a prompt, so only those are matched that could get in on this rank, one
after the other, and the first that could not; that one is not matched again while its match would
end where it did. Locks are taken before the ranks agree, so that nothing is evicted between the
agreement and its use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    TypeAlias,
)  # Any: SGLang's entries; LocalTurns, or None

from sglang.srt.disaggregation.delta.decode.claims import Claims, page_ceil, start_length
from sglang.srt.disaggregation.delta.decode.prefix_tree import (
    DecodeRadixTree,
    PrefixLease,
    key_pairs,
    unlocked_tokens,
)
from sglang.srt.disaggregation.delta.decode.record import Refusal, bootstrap_addr, record_of
from sglang.srt.disaggregation.delta.pages import RECURRENT
from sglang.srt.disaggregation.delta.rank_agreement import AdmissionVote, Offer, State

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

#: Most candidates of one step. Each is matched, and holds a tree lock until the step ends.
TRIED = 8
#: Requests that a step checks beside the candidates: in line, and in a handshake. A longer line is
#: checked slice by slice, so that the cost of a step does not grow with it.
CHECKED = 128


# ---- what one rank sees ----


@dataclass(eq=False)
class Candidate:
    """One request in line. ``entry``: SGLang's ``DecodeRequest`` in the prealloc queue; None for a
    retracted request."""

    entry: Any
    req: Req
    #: Whether it has no prefill server, and with how many new tokens at most it is admitted then.
    is_alone: bool = False
    most_new: float = math.inf
    #: This rank's vote.
    offer: int = Offer.STOP
    #: Whether it may share a prefix; once the ranks have agreed, on all of them.
    shares: bool = False
    #: A ``PrefixLease``; None where it was not attempted.
    lease: Any = None
    #: Why it cannot get in, as this rank sees it in this step.
    refusal: Refusal | None = None

    @property
    def resumes(self) -> bool:
        """Whether it was retracted, and not just handshaken."""
        return self.entry is None

    @cached_property
    def length(self) -> int:
        """How many tokens need KV before it runs."""
        return start_length(self.req)

    @cached_property
    def token_ids(self) -> list[int]:
        """Those that need KV before it runs."""
        prompt = self.req.origin_input_ids
        return (prompt + self.req.output_ids)[:-1] if self.req.output_ids else prompt

    def key_ids(self, tree: DecodeRadixTree) -> list[Any]:
        """What ``tree`` finds its KV by: these tokens, or the pairs of them."""
        return key_pairs(self.req, self.length) if tree.is_eagle else self.token_ids

    def shorten(self, tree: DecodeRadixTree, length: int) -> None:
        """Share the first ``length`` tokens at most, a whole number of pages."""
        before = self.lease
        if length < before.length:
            # The new lock first: nothing of the path is free for a moment.
            shorter = self.key_ids(tree)[:length]
            self.lease = PrefixLease.take(tree, shorter, self.req.extra_key)
            before.release()


def release(candidates: Sequence[Candidate]) -> None:
    """Give all locks back that were not handed over."""
    for candidate in candidates:
        if candidate.lease is not None:
            candidate.lease.release()


class Snapshot(NamedTuple):
    """What one rank sees when a step begins. ``checked`` and ``candidates`` are the same requests
    on all ranks, and there is at least one of either."""

    #: Requests without pages whose state the ranks agree on, and what this rank thinks of each.
    checked: list[Any]
    states: list[State]
    candidates: list[Candidate]
    #: Free request rows and metadata slots.
    rows: int
    slots: int


def states_of(checked: Iterable[Any], now: float, max_wait_s: float) -> list[State]:
    """Return this rank's state of each request without pages whose handshake is done.
    ``max_wait_s``: longest wait for memory."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    states, failed = [], KVPoll.Failed
    for entry in checked:
        wait, state = record_of(entry.req).wait, State.FINE
        if entry.req.finished_reason is not None or entry.kv_receiver.poll() == failed:
            state = State.FAILED
        elif now - (wait.since or 0.0) >= max_wait_s:
            state = State.EXPIRED
        states.append(state)
    return states


# ---- what is decided ----


class Answer(NamedTuple):
    """Requests of the line with their states, none of which is FINE: they leave it without pages,
    or are kept to be computed locally."""

    states: list[tuple[Any, int]]


class Admit(NamedTuple):
    """A request gets pages: it resumes, is announced, or is computed locally."""

    candidate: Candidate
    #: ``local_prefill.policy.Decision``; None where the server computes no turns.
    turn: Any

    @property
    def is_local(self) -> bool:
        """Whether this server computes it."""
        return self.turn is not None and bool(self.turn.local)


class TooLong(NamedTuple):
    """A request without a prefill server has more new tokens than may be computed locally."""

    candidate: Candidate


class Refuse(NamedTuple):
    """A request stays queued, and so do all requests behind it."""

    req: Req
    refusal: Refusal


#: What becomes of a request in a step; ``RadixPreallocQueue.carry_out`` does it.
Outcome: TypeAlias = Answer | Admit | TooLong | Refuse


def lacks_place(agreed: AdmissionVote, taken: int, of_rows: str) -> Refusal | None:
    """Return why no request of any size can be admitted after ``taken`` others in this step, or
    None. ``of_rows``: the reason if all rows are taken."""
    if agreed.rows <= taken:
        return Refusal(of_rows)
    return Refusal("no_metadata_slot") if agreed.slots <= taken else None


class Admission:
    """Votes and decides for one prealloc queue; owns the claims on the pool."""

    def __init__(
        self,
        tree: DecodeRadixTree,
        allocator: Any,
        claims: Claims,
        takes_delta: Callable[[str], bool],
        turns: Any,
    ) -> None:
        """``takes_delta``: whether the prefill server at an address sends the rest of a prefix;
        ``turns``: ``LocalTurns``, or None. The tree notifies ``claims`` of every change."""
        self._tree, self._allocator, self._takes_delta = tree, allocator, takes_delta
        self._turns = turns
        self.claims = tree.claims = claims
        #: Why a request waits for a row; with recurrent state each row has a state slot.
        has_states = hasattr(tree.req_to_token_pool, RECURRENT)
        self._of_rows = "no_state_slot" if has_states else "no_request_row"
        #: Tokens that this rank has and another one has not; zero while ranks are in step.
        self._surplus = 0
        #: Who was stopped last: the request itself, not its name, for clients may use a name again
        #: for another prompt; whether it shared; and the lease that it gave back.
        self._stopped: tuple[Any, bool, Any] = (None, False, None)

    @property
    def _free(self) -> int:
        """Tokens that are free or can be evicted."""
        return int(self._allocator.available_size() + self._tree.evictable_size())

    def vote(self, seen: Snapshot) -> AdmissionVote:
        """Return this rank's vote. Matches and locks each candidate up to the first one that would
        not be admitted."""
        claims, turns = self.claims, self._turns
        claims.recount()
        free, protected = self._free, self._tree.protected_size()
        if min(seen.states, default=State.FINE) <= State.EXPIRED:
            states = zip(seen.checked, seen.states, strict=True)
            ended = {id(entry) for entry, state in states if state <= State.EXPIRED}
            for candidate in seen.candidates:
                if id(candidate.entry) in ended:
                    candidate.offer = Offer.ABSTAIN
        taken = 0  # tokens claimed by earlier candidates of this step
        entering: list[Candidate] = []
        try:
            for candidate in seen.candidates:
                if candidate.offer == Offer.ABSTAIN:
                    continue
                candidate.shares = self._may_share(candidate)
                if len(entering) >= min(seen.rows, seen.slots):
                    break
                if not self._lock(candidate, taken):
                    break
                req, lease = candidate.req, candidate.lease
                if candidate.length - lease.length <= candidate.most_new:
                    candidate.refusal = self._refusal(candidate, lease, taken)
                    if candidate.refusal is not None:
                        self._remember(candidate)
                        lease.release()
                        break
                    taken += page_ceil(candidate.length, claims.page) - lease.length
                    claims.entered(req, lease.node, lease.length, candidate.length)
                    entering.append(candidate)
                # Else it gets no memory, so it waits for none, and is in nobody's way.
                candidate.offer = Offer.SHARED + lease.length if candidate.shares else Offer.PRIVATE
        finally:
            for candidate in entering:  # nobody has entered yet
                claims.left(candidate.req)
        offers = [candidate.offer for candidate in seen.candidates]
        costs = [] if turns is None else turns.votes(seen.candidates)
        pool = free, protected, -free, -protected
        return AdmissionVote(seen.states, offers, seen.rows, seen.slots, *pool, costs)

    def _may_share(self, candidate: Candidate) -> bool:
        """Whether a request may share a prefix; one that resumes asks no prefill server."""
        req, asks_nobody = candidate.req, candidate.resumes or candidate.is_alone
        return self._tree.may_share(req) and (asks_nobody or self._takes_delta(bootstrap_addr(req)))

    def _lock(self, candidate: Candidate, taken: int) -> bool:
        """Lock what the tree holds of a candidate; false if it is known to be refused as before."""
        tree, req, (stopped, shared, known) = self._tree, candidate.req, self._stopped
        is_known = stopped is req and shared == candidate.shares and known.holds()
        if is_known and candidate.length - known.length <= candidate.most_new:
            taken += unlocked_tokens(known.node)
            candidate.refusal = self._refusal(candidate, known, taken)
            if candidate.refusal is not None:
                return False
            known.lock()
            candidate.lease = known
        else:
            ids = candidate.key_ids(tree) if candidate.shares else []
            candidate.lease = PrefixLease.take(tree, ids, req.extra_key)
        return True

    def _refusal(self, candidate: Candidate, prefix: PrefixLease, taken: int = 0) -> Refusal | None:
        free = self._free - taken - self._surplus
        return self.claims.refusal(candidate.req, prefix, free)

    def _remember(self, candidate: Candidate) -> None:
        """``candidate`` was checked, and does not get in now."""
        if candidate.lease is not None:
            ids = candidate.key_ids(self._tree) if candidate.shares else []
            candidate.lease.remember(ids, candidate.req.extra_key)
            self._stopped = (candidate.req, candidate.shares, candidate.lease)

    def decide(
        self, seen: Snapshot, vote: AdmissionVote, agreed: AdmissionVote
    ) -> Iterator[Outcome]:
        """What becomes of the requests of ``seen``, equal on all ranks. Each decision is carried
        out before the next one is asked for, which counts with the pool as it left it."""
        self._surplus = vote.free - agreed.free
        candidates, behind = self._settle(seen.candidates, agreed.offers)
        if min(agreed.states, default=State.FINE) < State.FINE:
            states = zip(seen.checked, agreed.states, strict=True)
            yield Answer([each for each in states if each[1] < State.FINE])
        if self._turns is not None:
            self._turns.agree(agreed.turns)
        entered = 0
        for at, candidate in enumerate(candidates):
            req, turn = candidate.req, None
            if req.finished_reason is not None:
                continue  # answered in this step
            if not candidate.resumes and record_of(req).is_alone != candidate.is_alone:
                continue  # its prefill server was lost in this step
            candidate.refusal = lacks_place(agreed, entered, self._of_rows)
            if candidate.refusal is None:
                if self._turns is not None and not candidate.resumes:
                    turn = self._turns.decide(candidate, at)
                    if turn.local:
                        candidate.shorten(self._tree, self._turns.prefix_here(candidate))
                    elif candidate.is_alone:
                        yield TooLong(candidate)
                        continue
                candidate.refusal = self._refusal(candidate, candidate.lease)
                if candidate.refusal is not None and at + 1 < len(candidates):
                    # Those behind it let go of their prefixes, and are not attempted any more: what
                    # they held may be evicted.
                    release(candidates[at + 1 :])
                    del candidates[at + 1 :]
                    candidate.refusal = self._refusal(candidate, candidate.lease)
                if candidate.refusal is None:
                    yield Admit(candidate, turn)
            if candidate.refusal is not None:
                # Nobody passes it (FIFO: large requests get their turn).
                yield Refuse(req, candidate.refusal)
                return
            entered += 1
        if behind:
            first = behind[0]
            # Without either, another rank stops it.
            refusal = first.refusal or (
                None if candidates else lacks_place(agreed, 0, self._of_rows)
            )
            if refusal is not None:
                yield Refuse(first.req, refusal)

    def _settle(
        self, candidates: list[Candidate], offers: Sequence[int]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Those that may be attempted, with leases of the length that the ranks agreed on; and
        everybody from the first stop on, without a lease."""
        stop = next((at for at, offer in enumerate(offers) if offer == Offer.STOP), len(offers))
        tried, behind = candidates[:stop], candidates[stop:]
        release(behind)
        for candidate, offer in zip(tried, offers, strict=False):
            if candidate.lease is not None and offer < Offer.ABSTAIN:
                candidate.shares = offer >= Offer.SHARED
                candidate.shorten(self._tree, max(offer - Offer.SHARED, 0))
        if behind and behind[0].offer != Offer.STOP:
            self._remember(behind[0])  # another rank stops it
        return tried, behind

"""Which queued requests are admitted to decode's memory: match and lock, vote, budget.

A step of the prealloc queue (``queue.RadixPreallocQueue``) is::

    vote = admission.vote(candidates, states, rows, slots)   # match and lock
    agreed = admission.agree(vote, requests)                 # one reduction over the ranks
    admission.apply(candidates, vote, agreed)                # equal prefixes on all ranks
    for candidate in candidates:                             # first come, first served
        refusal = admission.admit(candidate, later)          # budget, allocate, bind
        if refusal is not None:
            break

No request passes an earlier one that does not fit, so that large requests are admitted in turn.
Prefixes are locked before the reduction and shortened after it, so nothing is evicted between the
agreement and its use.

Contract: the scheduler's thread only. All ranks of an attention TP group call with the same
candidates in the same order.
Only ``vote`` may read what differs between ranks; a decision reads ``agreed``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: SGLang's entries; LocalTurns, or None

from sglang.srt.disaggregation.delta.decode.claims import Claims
from sglang.srt.disaggregation.delta.decode.request import (
    QueueState,
    Refusal,
    Wait,
    bootstrap_addr,
    record_of,
)
from sglang.srt.disaggregation.delta.decode.tree import (
    BlockedHead,
    DecodeRadixTree,
    PrefixLease,
    key_pairs,
    unlocked_tokens,
)
from sglang.srt.disaggregation.delta.observability import RateLimitedLog
from sglang.srt.disaggregation.delta.pages import RECURRENT
from sglang.srt.disaggregation.delta.rank_agreement import Checksum, Vote, agree, alone, over
from sglang.srt.disaggregation.policy.memory import page_ceil, start_length

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

#: Most requests matched per step. Each match holds a tree lock until the step ends.
MAX_MATCHED = 8
#: Most queued requests, and most handshakes, checked per step beside the candidates. A longer queue
#: is checked slice by slice, so that the cost of a step does not grow with it.
MAX_CHECKED = 128

#: A candidate's offer is the length of its prefix in tokens, or one of these. The ranks agree on
#: the smallest.
#: Do not attempt this candidate, nor any later one.
STOP = -2
#: Attempt it without a prefix.
PRIVATE = -1


@dataclass(eq=False)
class Candidate:
    """A queued request that this step may admit. ``entry``: SGLang's ``DecodeRequest`` in the
    prealloc queue; None for a retracted request."""

    entry: Any
    req: Req
    #: True if it has no prefill server.
    is_alone: bool = False
    #: Largest number of new tokens with which it is admitted without a prefill server.
    max_new_tokens: float = math.inf
    #: True if it may share a prefix; on all ranks, once they have agreed.
    shares: bool = False
    #: The locked prefix, a ``PrefixLease``; None before the match.
    lease: Any = None
    #: Why this rank's vote refuses it.
    refusal: Refusal | None = None

    @property
    def resumes(self) -> bool:
        """True for a retracted request."""
        return self.entry is None

    @property
    def is_locked(self) -> bool:
        """True while it holds its prefix, so that it may be admitted in this step."""
        return self.lease is not None and bool(self.lease.is_held)

    @property
    def is_settled(self) -> bool:
        """True if it was answered or lost its prefill server in this step."""
        if self.req.finished_reason is not None:
            return True
        return not self.resumes and record_of(self.req).is_alone != self.is_alone

    @cached_property
    def length(self) -> int:
        """Tokens that need KV before it runs."""
        return start_length(self.req)

    @cached_property
    def token_ids(self) -> list[int]:
        """Ids of these tokens."""
        prompt = self.req.origin_input_ids
        return (prompt + self.req.output_ids)[:-1] if self.req.output_ids else prompt

    def key_ids(self, tree: DecodeRadixTree) -> list[Any]:
        """Return the key of its KV in ``tree``: its tokens or their pairs; empty if it must not
        share."""
        if not self.shares:
            return []
        return key_pairs(self.req, self.length) if tree.is_eagle else self.token_ids

    def takes_memory(self, prefix: int) -> bool:
        """True unless it has too many new tokens behind ``prefix`` to be computed locally."""
        return self.length - prefix <= self.max_new_tokens

    def shorten(self, tree: DecodeRadixTree, length: int) -> None:
        """Shorten the locked prefix to ``length`` tokens, whole pages, if it is longer."""
        lease = self.lease
        if lease is not None and length < lease.length:
            # Lock the new path first, so that no node of it becomes evictable in between.
            shorter = self.key_ids(tree)[:length]
            self.lease = PrefixLease.take(tree, shorter, self.req.extra_key)
            lease.release()


def release(candidates: Iterable[Candidate]) -> None:
    """Release the prefixes that no request owns."""
    for candidate in candidates:
        if candidate.lease is not None:
            candidate.lease.release()


def states_of(checked: Iterable[Any], now: float, max_wait_s: float) -> list[QueueState]:
    """Return this rank's state of each queued request. ``max_wait_s``: longest wait for memory."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    states, failed = [], KVPoll.Failed
    for entry in checked:
        wait, state = record_of(entry.req).wait, QueueState.WAITING
        if entry.req.finished_reason is not None or entry.kv_receiver.poll() == failed:
            state = QueueState.FAILED
        elif now - (wait.since or 0.0) >= max_wait_s:
            state = QueueState.EXPIRED
        states.append(state)
    return states


# ---- the vote of one rank, and the agreed one ----


@dataclass(frozen=True)
class AdmissionVote(Vote):
    """View of one rank at the start of a step; the ranks agree on the smallest of each value.

    ``states`` has a value for each checked request, ``offers`` one for each candidate (``STOP``,
    ``PRIVATE`` or a length). ``rows`` and ``slots``: free request rows and metadata slots.
    ``free``: free and evictable tokens before any lock of this step; negated, the largest over the
    ranks.
    """

    states: Sequence[int]
    offers: Sequence[int]
    rows: int
    slots: int
    free: int
    minus_free: int
    #: Measured costs of local turns, and one number for each candidate; empty without local turns.
    turns: Sequence[int] = field(default=(), metadata={"optional": True})

    diverged = (
        "--disaggregation-decode-enable-radix-cache: the ranks of this server have different "
        "waiting requests and would admit different ones. Restart it, and please report this with "
        "the logs of all ranks."
    )


class Admission:
    """Votes, and checks the budget, for one prealloc queue; owns the claims on the pool."""

    def __init__(
        self,
        tree: DecodeRadixTree,
        allocator: Any,
        claims: Claims,
        takes_delta: Callable[[str], bool],
        turns: Any,
        group: ProcessGroup,
        before_bind: Callable[[], None],
    ) -> None:
        """``takes_delta``: True if the prefill server at an address sends only the delta;
        ``turns``: ``LocalTurns``, or None; ``group``: the ranks of this server; ``before_bind``
        returns when a row may be written. The tree notifies ``claims`` of every change."""
        self._tree, self._allocator, self._takes_delta = tree, allocator, takes_delta
        self._turns, self._group, self._before_bind = turns, group, before_bind
        self._is_alone = alone(group)
        self.claims = tree.claims = claims
        has_states = hasattr(tree.req_to_token_pool, RECURRENT)
        #: Reason of a request that waits for a row; with recurrent state each row has a state slot.
        self._no_row = "no_state_slot" if has_states else "no_request_row"
        #: Free tokens here beyond the minimum over all ranks. Zero unless the ranks have diverged.
        self._surplus = 0
        self._blocked: BlockedHead | None = None
        self._log = RateLimitedLog(logger, 30.0)

    def vote(
        self, candidates: Sequence[Candidate], states: Sequence[QueueState], rows: int, slots: int
    ) -> AdmissionVote:
        """Match and lock the candidates up to the first that is refused; return this rank's vote.

        ``states``: of the checked requests, the candidates first; empty where requests resume.
        """
        claims, turns = self.claims, self._turns
        claims.recount()
        free = self._free
        offers = [STOP] * len(candidates)
        # Candidates that fit so far. Their claims are entered while the vote goes on.
        fitting: list[Req] = []
        claimed_tokens = 0  # pages of these, which still count as free
        for index, candidate in enumerate(candidates):
            if index < len(states) and states[index] < QueueState.WAITING:
                # Answered in this step, on all ranks: it takes no memory.
                offers[index] = PRIVATE
                continue
            candidate.shares = self._may_share(candidate)
            if len(fitting) == min(rows, slots):
                break
            lease = self._lock(candidate, claimed_tokens)
            if lease is None:
                break
            offers[index] = lease.length if candidate.shares else PRIVATE
            if candidate.takes_memory(lease.length):
                claimed_tokens += page_ceil(candidate.length, claims.page) - lease.length
                claims.entered(candidate.req, lease.node, lease.length, candidate.length)
                fitting.append(candidate.req)
        for req in fitting:
            claims.left(req)
        costs = [] if turns is None else turns.votes(candidates)
        return AdmissionVote(states, offers, rows, slots, free, -free, costs)

    def agree(self, vote: AdmissionVote, entries: Sequence[Any]) -> AdmissionVote:
        """Return the vote that the ranks agree on, with one collective. ``entries``: the checked
        ones and the candidates, for the checksum.

        Raises:
            RanksDiverged: the ranks have different requests.
        """
        if self._is_alone:
            return vote
        checksum = Checksum()
        checksum.note(*(entry.req.rid for entry in entries))
        agreed = agree(vote, checksum, over(self._group))
        if agreed.free != -agreed.minus_free:  # harmless here, but a bug elsewhere
            self._log.error(
                "pools",
                "the KV pools of this server's ranks differ: this rank has %d free and evictable "
                "tokens, the ranks have %d to %d. Admission uses the smallest number. If this "
                "persists, a rank leaks pages: SGLANG_DISAGGREGATION_CHECK_INVARIANTS=1 checks "
                "idle servers, and ends one that leaks",
                vote.free,
                agreed.free,
                -agreed.minus_free,
            )
        return agreed

    def apply(
        self, candidates: Sequence[Candidate], vote: AdmissionVote, agreed: AdmissionVote
    ) -> None:
        """Shorten each prefix to the agreed length, and release all from the first stop on."""
        self._surplus = vote.free - agreed.free
        for index, (candidate, offer) in enumerate(zip(candidates, agreed.offers, strict=True)):
            if offer == STOP:
                if vote.offers[index] != STOP:
                    self._remember(candidate)  # another rank refuses it
                release(candidates[index:])
                break
            candidate.shares = offer != PRIVATE
            candidate.shorten(self._tree, max(offer, 0))

    def admit(self, candidate: Candidate, later: Sequence[Candidate]) -> Refusal | None:
        """Allocate the delta of a locked candidate and bind it to the request. Return why it is
        refused, or None. Equal on all ranks.

        If it does not fit, the prefixes of ``later`` candidates are released, because they become
        evictable then; none of these is admitted in this step.
        """
        refusal = self._refusal(candidate, candidate.lease)
        if refusal is not None and later:
            release(later)
            refusal = self._refusal(candidate, candidate.lease)
        if refusal is not None:
            return refusal
        req, lease = candidate.req, candidate.lease
        slots = self._allocate(req, page_ceil(candidate.length, self.claims.page) - lease.length)
        if slots is None:
            return Refusal("no_tokens", self.claims.cost(req, lease.length))
        self._before_bind()
        lease.bind(self._tree.req_to_token_pool, req, slots[: candidate.length - lease.length])
        self.claims.entered(req, lease.node, lease.length, candidate.length)
        record_of(req).wait = Wait()
        return None

    def _allocate(self, req: Req, tokens: int) -> torch.Tensor | None:
        """Return ``tokens`` slots (1-D int64); None if the allocator has fewer than were counted.

        Raises:
            RuntimeError: the same, on a server of several ranks.
        """
        slots = self._tree.allocate(tokens)
        if slots is None:
            free, evictable = self._allocator.available_size(), self._tree.evictable_size()
            text = (
                f"request {req.rid} stays queued: it needs {tokens} tokens, {free} are free after "
                f"eviction, {evictable} evictable"
            )
            if not self._is_alone:
                # Other ranks may have succeeded. Fail here, because diverged ranks would hang in
                # the next collective.
                raise RuntimeError(f"{text}. Other ranks may have admitted it")
            logger.warning(text)
        return slots

    def lacks_place(self, agreed: AdmissionVote, admitted: int) -> Refusal | None:
        """Return why no request of any size can follow ``admitted`` ones of this step, or None."""
        if agreed.rows <= admitted:
            return Refusal(self._no_row)
        return Refusal("no_metadata_slot") if agreed.slots <= admitted else None

    # ---- match, lock, budget ----

    @property
    def _free(self) -> int:
        """Tokens that are free or can be evicted."""
        return int(self._allocator.available_size() + self._tree.evictable_size())

    def _may_share(self, candidate: Candidate) -> bool:
        """True if it may share a prefix; without a prefill server no peer has to support that."""
        req, has_server = candidate.req, not (candidate.resumes or candidate.is_alone)
        return self._tree.may_share(req) and not (
            has_server and not self._takes_delta(bootstrap_addr(req))
        )

    def _refusal(
        self, candidate: Candidate, prefix: PrefixLease | BlockedHead, claimed_tokens: int = 0
    ) -> Refusal | None:
        """Check the budget. ``claimed_tokens``: pages of earlier candidates of this step."""
        free = self._free - claimed_tokens - self._surplus
        return self.claims.refusal(candidate.req, prefix.node, prefix.length, free)

    def _lock(self, candidate: Candidate, claimed_tokens: int) -> PrefixLease | None:
        """Match and lock the prefix; None if the budget refuses the candidate.

        The head of a full queue is checked again in every step, so it is not matched again.
        """
        head = self._blocked
        if (
            head is not None
            and head.req is candidate.req
            and head.shares == candidate.shares
            and head.is_current()
            and candidate.takes_memory(head.length)
        ):
            evictable = unlocked_tokens(head.node)  # until it is locked
            candidate.refusal = self._refusal(candidate, head, claimed_tokens + evictable)
            if candidate.refusal is not None:
                return None
            candidate.lease = head.lease()
            return candidate.lease
        ids = candidate.key_ids(self._tree)
        candidate.lease = lease = PrefixLease.take(self._tree, ids, candidate.req.extra_key)
        if candidate.takes_memory(lease.length):
            # Check with the lock held, because the prefix is not evictable any more.
            candidate.refusal = self._refusal(candidate, lease, claimed_tokens)
        if candidate.refusal is None:
            return lease
        self._remember(candidate)
        lease.release()
        return None

    def _remember(self, candidate: Candidate) -> None:
        """Remember where the match of a refused candidate ended."""
        if candidate.lease is not None:
            ids = candidate.key_ids(self._tree)
            self._blocked = BlockedHead(
                self._tree, candidate.req, candidate.shares, candidate.lease, ids
            )

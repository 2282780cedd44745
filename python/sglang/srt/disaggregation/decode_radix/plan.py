"""What this rank would do in a step, before the ranks agree: who would get in, who is refused.

The ranks decide from what they agreed on, and by the same arithmetic. A plan only says for whom it
is worth to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.decode_radix.budget import DecodeBudget
from sglang.srt.disaggregation.decode_radix.candidates import Candidate
from sglang.srt.disaggregation.decode_radix.inflight import PrefixKey
from sglang.srt.disaggregation.decode_radix.lease import KnownPrefix, PrefixLease, unlocked_tokens
from sglang.srt.disaggregation.decode_radix.waiting import Refusal
from sglang.srt.disaggregation.delta.pages import page_ceil


@dataclass(frozen=True)
class Rules:
    """What admission asks of the queue whose requests are tried."""

    #: Whether a request may share a prefix.
    may_share: Callable[[Candidate], bool]
    #: Where in the tree it will add KV, and which, if others wait for that.
    arriving_key: Callable[[Candidate], PrefixKey | None]
    #: Whether it is passed by others while the KV of that key arrives.
    waits: Callable[[Candidate, PrefixKey | None, set[PrefixKey]], bool]


class Memory:
    """Where the match of the request that was stopped last ended; the next step begins with it."""

    def __init__(self) -> None:
        #: The request itself, not its name: clients may use a name again for another prompt.
        self._last: tuple[Any, bool, KnownPrefix] | None = None

    def recall(self, tree: Any, candidate: Candidate) -> KnownPrefix | None:
        """Where the match of ``candidate`` ends, if that is known."""
        if self._last is None:
            return None
        req, shared, known = self._last
        same = req is candidate.req and shared == candidate.shares
        return known if same and known.holds(tree) else None

    def note(self, tree: Any, candidate: Candidate) -> None:
        """``candidate`` was looked at, and does not get in now."""
        if candidate.lease is not None:
            ids, key = candidate.token_ids, candidate.req.extra_key
            known = KnownPrefix.of(tree, candidate.lease, ids if candidate.shares else [], key)
            self._last = (candidate.req, candidate.shares, known)


class StepPlan:
    """The plan of one step on one rank. ``places``: how many rows and slots are free."""

    def __init__(
        self,
        budget: DecodeBudget,
        memory: Memory,
        rules: Rules,
        tree: Any,
        places: int,
        arriving: set[PrefixKey],
    ) -> None:
        self._budget, self._memory, self._rules, self._tree = budget, memory, rules, tree
        self._page: int = tree.page_size
        self._places, self._arriving = places, arriving
        #: Keys of those who would get in.
        self._coming: set[PrefixKey] = set()
        self._entering: list[Any] = []
        #: Tokens that look free, and are taken by those who would get in.
        self._taken = 0

    @property
    def has_place(self) -> bool:
        """Whether one more request could get a row and a slot."""
        return len(self._entering) < self._places

    def find(self, candidate: Candidate) -> bool:
        """Lock what the tree holds of it; false if it is known to be refused as before."""
        candidate.shares = self._rules.may_share(candidate)
        known = self._memory.recall(self._tree, candidate)
        if known is None:
            candidate.take(self._tree)
            return True
        taken = self._taken + unlocked_tokens(known.node)
        candidate.refusal = self._refusal(candidate, known, taken)
        if candidate.refusal is None:
            candidate.lease = known.lock(self._tree)
        return candidate.refusal is None

    def waits(self, candidate: Candidate) -> bool:
        """Whether others pass it, because its prefix is just arriving."""
        key = self._rules.arriving_key(candidate)
        return self._rules.waits(candidate, key, self._arriving | self._coming)

    def admit(self, candidate: Candidate) -> bool:
        """Whether it would get in behind those before; if not, it lets go and says why."""
        lease = candidate.lease
        assert lease is not None, "it was found before"
        candidate.refusal = self._refusal(candidate, lease, self._taken)
        if candidate.refusal is not None:
            self._memory.note(self._tree, candidate)
            candidate.release()
            return False
        self._taken += page_ceil(candidate.length, self._page) - lease.length
        self._budget.claims.entered(candidate.req, lease.node, lease.length, candidate.length)
        self._entering.append(candidate.req)
        key = self._rules.arriving_key(candidate)
        if key is not None:
            self._coming.add(key)
        return True

    def _refusal(
        self, candidate: Candidate, prefix: KnownPrefix | PrefixLease, taken: int
    ) -> Refusal | None:
        length, resumes = candidate.length, candidate.resumes
        return self._budget.refusal(
            candidate.req, prefix.node, prefix.length, length, resumes=resumes, taken=taken
        )

    def close(self) -> None:
        """Nobody has entered yet."""
        for req in self._entering:
            self._budget.claims.left(req)

"""The first in line: their leases are taken early, trimmed to what ranks agree on, given back."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.disaggregation.delta.decode import candidates as line
from sglang.srt.disaggregation.delta.decode.candidates import Candidate
from sglang.srt.disaggregation.delta.decode.prefix_tree import PrefixLease
from sglang.srt.disaggregation.delta.decode.record import Refusal
from sglang.srt.disaggregation.delta.rank_agreement import Offer

HELD = 64


class Tree:
    """Matches up to ``HELD`` tokens; a node is the length of its path."""

    device = "cpu"
    root_node = 0
    is_eagle = False

    def __init__(self) -> None:
        self.locks: Counter[int] = Counter()

    def inc_lock_ref(self, node: int) -> None:
        self.locks[node] += 1

    def dec_lock_ref(self, node: int) -> None:
        self.locks[node] -= 1
        assert self.locks[node] >= 0


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A tree, and matching without SGLang."""

    def take(tree: Tree, token_ids: list[int], extra_key: str | None) -> PrefixLease:
        length = min(len(token_ids), HELD)
        return PrefixLease(tree, length, torch.arange(length))

    monkeypatch.setattr(PrefixLease, "take", take)
    return Tree()


def candidate(name: str, tokens: int = 100, *, shares: bool = True, given_up: bool = False) -> Any:
    """A request in line."""
    req = SimpleNamespace(
        rid=name,
        extra_key=None,
        origin_input_ids=list(range(tokens)),
        output_ids=[],
        is_retracted=False,
    )
    return Candidate(SimpleNamespace(), req, shares, given_up)


class Plan:
    """Finds every prefix; ``places`` requests get in, and ``waiting`` are passed by others."""

    def __init__(self, tree: Tree, places: int = 8, waiting: str = "", refused: str = "") -> None:
        self.tree, self.places = tree, places
        self.waiting, self.refused = waiting, refused
        self.found: list[str] = []

    @property
    def has_place(self) -> bool:
        return self.places > 0

    def find(self, candidate: Candidate) -> bool:
        self.found.append(candidate.req.rid)
        candidate.take(self.tree)
        return True

    def waits(self, candidate: Candidate) -> bool:
        candidate.waits = candidate.req.rid == self.waiting
        return candidate.waits

    def admit(self, candidate: Candidate) -> bool:
        if candidate.req.rid == self.refused:
            candidate.refusal = Refusal("no_tokens", 1)
            candidate.release()
            return False
        self.places -= 1
        return True


def locked(tree: Tree) -> list[int]:
    """The nodes that somebody holds a lock on."""
    return sorted(+tree.locks)


def test_offers(tree: Tree) -> None:
    """Guards against an offer that says too much: who may not share offers nothing, and who was
    given up leaves it to the others."""
    first = [candidate("a"), candidate("b", 10), candidate("c", shares=False)]
    first.append(candidate("d", given_up=True))
    offers = line.take_leases(first, Plan(tree))
    assert offers == [Offer.SHARED + 64, Offer.SHARED + 10, Offer.PRIVATE, Offer.ABSTAIN]
    line.release(first)
    assert locked(tree) == []


def test_nobody_behind_a_refused_one_is_matched(tree: Tree) -> None:
    """Guards against the cost of matching, on every step, who cannot get in; and against a lock of
    the one that was found not to fit."""
    first = [candidate("a"), candidate("b"), candidate("c")]
    plan = Plan(tree, refused="b")
    assert line.take_leases(first, plan) == [Offer.SHARED + 64, Offer.STOP, Offer.STOP]
    assert plan.found == ["a", "b"] and locked(tree) == [64] and tree.locks[64] == 1


def test_who_is_passed_stops_nobody(tree: Tree) -> None:
    """Guards against a request that waits for a prefix and takes the place of those behind it."""
    first = [candidate("a"), candidate("b"), candidate("c"), candidate("d")]
    plan = Plan(tree, places=2, waiting="a")
    offers = line.take_leases(first, plan)
    assert offers == [Offer.WAITS, *[Offer.SHARED + 64] * 2, Offer.STOP]
    assert plan.found == ["b", "c"], "who waits is not matched"


def test_tokens_of_one_that_has_generated() -> None:
    """Guards against matching the last token of a retracted request, which has no KV yet."""
    queued = candidate("a", 3)
    assert (queued.token_ids, queued.length, queued.resumes) == ([0, 1, 2], 3, False)
    req = SimpleNamespace(origin_input_ids=[0, 1], output_ids=[7, 8], is_retracted=True)
    retracted = Candidate(None, req)
    assert (retracted.token_ids, retracted.length, retracted.resumes) == ([0, 1, 7], 3, True)


@pytest.mark.parametrize(
    ("lengths", "agreed", "leased", "shares", "held"),
    [
        # The agreed length counts: a lock on no more than is shared, and on no less.
        ([100, 32], [Offer.SHARED + 16, Offer.SHARED + 32], [16, 32], [True, True], [16, 32]),
        # What no other rank may share is private: waits for no prefix, and locks none.
        ([100], [Offer.PRIVATE], [0], [False], [0]),
        # A stop of another rank is a stop, and keeps no lock of those behind it.
        ([100] * 3, [Offer.SHARED + 64, Offer.STOP, Offer.SHARED + 64], [64], [True], [64]),
    ],
)
def test_what_ranks_agreed_on_counts(
    tree: Tree,
    lengths: list[int],
    agreed: list[int],
    leased: list[int],
    shares: list[bool],
    held: list[int],
) -> None:
    """Guards against a rank that locks, waits for or tries what the others do not."""
    first = [candidate(str(number), length) for number, length in enumerate(lengths)]
    line.take_leases(first, Plan(tree))
    tried = line.settle(tree, first, agreed)
    assert tried == first[: len(leased)]
    assert [one.lease.length for one in tried] == leased
    assert [one.shares for one in tried] == shares
    assert locked(tree) == held and all(tree.locks[node] == 1 for node in held)


def test_who_was_given_up_here_has_no_lease(tree: Tree) -> None:
    """Guards against a lease for a request that this rank knows to be gone."""
    first = [candidate("a", given_up=True), candidate("b")]
    line.take_leases(first, Plan(tree))
    tried = line.settle(tree, first, [Offer.SHARED + 64, Offer.SHARED + 64])
    assert [one.lease is None for one in tried] == [True, False]
    line.release(first)
    assert locked(tree) == []

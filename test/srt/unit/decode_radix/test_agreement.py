"""What ranks agree on: the worst and the least that any of them sees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.delta import rank_agreement
from sglang.srt.disaggregation.delta.rank_agreement import Ballot, Offer, State, agree

FIRST = Ballot([3, 3, 1], [Offer.SHARED + 64, Offer.SHARED + 32], 5, 7, 1000, 200)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ballot], None]:
    """Sets what the other rank says."""
    said: list[list[int]] = []

    def minimum(values: list[int], group: Any) -> list[int]:
        said.append(values)
        return [min(both) for both in zip(*said, strict=True)]

    monkeypatch.setattr(rank_agreement, "minimum", minimum)

    def say(ballot: Ballot) -> None:
        agree(ballot, None)

    return say


def test_one_rank_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a collective, or changed values, on a server with one rank."""
    monkeypatch.setattr(rank_agreement, "dist", SimpleNamespace(get_world_size=lambda group: 1))
    agreed = agree(FIRST, None)
    assert (agreed.states, agreed.offers) == ([3, 3, 1], [66, 34])
    assert (agreed.rows, agreed.slots, agreed.free, agreed.protected) == (5, 7, 1000, 200)
    assert not agreed.pools_differ


def test_the_least_counts(other: Callable[[Ballot], None]) -> None:
    """Guards against values that slip to a neighbour's place, and against one rank that decides."""
    other(Ballot([3, 0, 2], [Offer.PRIVATE, Offer.ABSTAIN], 6, 2, 1000, 200))
    agreed = agree(FIRST, None)
    assert agreed.states == [State.FINE, State.FAILED, State.EXPIRED]
    assert agreed.offers == [Offer.PRIVATE, Offer.SHARED + 32]
    assert (agreed.rows, agreed.slots, agreed.pools_differ) == (5, 2, False)


@pytest.mark.parametrize(("free", "protected"), [(999, 200), (1001, 200), (1000, 199), (1000, 201)])
def test_pools_that_differ_are_noticed(
    other: Callable[[Ballot], None], free: int, protected: int
) -> None:
    """Guards against a difference that only the poorer rank could see."""
    other(Ballot([3, 3, 3], [66, 34], 5, 7, free, protected))
    agreed = agree(FIRST, None)
    assert agreed.pools_differ
    assert (agreed.free, agreed.protected) == (min(free, 1000), min(protected, 200))


def test_the_order_of_states_and_offers_is_what_a_minimum_needs() -> None:
    """Guards against a new state or offer in a place where the smallest of two means the wrong
    one."""
    assert State.FAILED < State.EXPIRED < State.WAITED_ENOUGH < State.FINE
    assert Offer.STOP < Offer.PRIVATE < Offer.SHARED < Offer.SHARED + 2**24 < Offer.ABSTAIN

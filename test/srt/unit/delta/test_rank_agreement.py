"""What ranks agree on: the worst and the least that any of them sees, in one vector a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from sglang.srt.disaggregation.delta import rank_agreement
from sglang.srt.disaggregation.delta.rank_agreement import (
    BACKUP_SLOTS,
    FETCH_SLOTS,
    PENDING,
    QUERY_SLOTS,
    AdmissionVote,
    AnyVote,
    Checksum,
    Offer,
    RanksDiverged,
    State,
    TransferVote,
    agree,
)

ADMISSION = AdmissionVote(
    (3, 3, 1), (Offer.SHARED + 64, Offer.SHARED + 32), 5, 7, 1000, 200, -1000, -200
)
TRANSFERS = TransferVote(0, 0, 0)


def both(
    mine: AnyVote, other: AnyVote, checksums: tuple[Checksum, Checksum] | None = None
) -> AnyVote:
    """What the first of two ranks learns."""
    first, second = checksums or (Checksum(), Checksum())
    seen: list[list[int]] = []
    agree(other, second, lambda vector: seen.append(vector) or vector)
    return agree(mine, first, lambda v: [min(a, b) for a, b in zip(v, seen[0], strict=True)])


@pytest.mark.parametrize("vote", [ADMISSION, TransferVote(12, 3, 4, (1, PENDING), (7,))])
def test_one_rank_agrees_with_itself(monkeypatch: pytest.MonkeyPatch, vote: AnyVote) -> None:
    """Guards against a collective, or changed values, on a server with one rank."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    assert agree(vote, Checksum(), rank_agreement.over(None)) == vote


def test_the_least_counts() -> None:
    """Guards against values that slip to a neighbour's place, and against one rank that decides."""
    offers = (Offer.PRIVATE, Offer.ABSTAIN)
    other = replace(ADMISSION, states=(3, 0, 2), offers=offers, rows=6, slots=2)
    agreed = both(ADMISSION, other)
    assert agreed.states == (State.FINE, State.FAILED, State.EXPIRED)
    assert agreed.offers == (Offer.PRIVATE, Offer.SHARED + 32)
    assert (agreed.rows, agreed.slots, agreed.pools_differ) == (5, 2, False)


def test_the_slowest_the_fewest_and_nothing_that_is_not_known_to_all() -> None:
    """A page counts when all ranks have it; an operation has ended when all ranks say so."""
    mine = TransferVote(20, 2, 1, (5, PENDING, 3), (8, 0))
    other = TransferVote(18, 3, 0, (2, 6, 3), (PENDING, 4))
    assert both(mine, other) == TransferVote(18, 2, 0, (2, PENDING, 3), (PENDING, 0))


@pytest.mark.parametrize(("free", "protected"), [(999, 200), (1001, 200), (1000, 199), (1000, 201)])
def test_pools_that_differ_are_noticed(free: int, protected: int) -> None:
    """Guards against a difference that only the poorer rank could see."""
    pool = {"free": free, "protected": protected}
    pool |= {f"minus_{name}": -value for name, value in pool.items()}
    agreed = both(ADMISSION, replace(ADMISSION, **pool))
    assert agreed.pools_differ
    assert (agreed.free, agreed.protected) == (min(free, 1000), min(protected, 200))


@pytest.mark.hazard("ranks-part-in-collective")
@pytest.mark.parametrize(("backups", "fetches"), [(0, 0), (3, 1), (BACKUP_SLOTS, FETCH_SLOTS)])
def test_the_length_is_fixed(backups: int, fetches: int) -> None:
    """Or a rank with an empty queue would leave a collective out, and the server hang."""
    lengths = set()
    vote = TransferVote(0, 0, 0, (1,) * backups, (1,) * fetches, (1,) * fetches)
    agree(vote, Checksum(), lambda vector: lengths.add(len(vector)) or vector)
    assert lengths == {11 + BACKUP_SLOTS + QUERY_SLOTS + FETCH_SLOTS}
    with pytest.raises(ValueError, match="at most"):
        agree(TransferVote(0, 0, 0, (1,) * (BACKUP_SLOTS + 1)), Checksum(), list)


@pytest.mark.parametrize("vote", [ADMISSION, TRANSFERS], ids=["decode", "hicache"])
def test_ranks_that_differ_are_noticed(vote: AnyVote) -> None:
    """Going on, they would admit, mark, free and publish different pages."""
    checksums = Checksum(), Checksum()
    for checksum in checksums:
        checksum.note("backup", 3)
    assert both(vote, vote, checksums) == vote
    checksums[0].note("fetch", "r1", 2)
    checksums[1].note("fetch", "r1", 3)
    with pytest.raises(RanksDiverged, match="ranks of this server .* different"):
        both(vote, vote, checksums)


def test_a_request_more_on_one_rank_is_noticed() -> None:
    """Guards against vectors of different lengths, which would hang the very reduction."""
    more = replace(ADMISSION, states=(3, 3, 1, 3))
    checksums = Checksum(), Checksum()
    checksums[0].note(["a", "b", "c"])
    checksums[1].note(["a", "b", "c", "d"])
    with pytest.raises(RanksDiverged, match="--disaggregation-decode-enable-radix-cache"):
        both(ADMISSION, more, checksums)


def test_the_order_of_states_and_offers_is_what_a_minimum_needs() -> None:
    """Guards against a new state or offer in a place where the smallest of two means the wrong
    one."""
    assert State.FAILED < State.EXPIRED < State.WAITED_ENOUGH < State.FINE
    assert (
        Offer.STOP
        < Offer.WAITS
        < Offer.PRIVATE
        < Offer.SHARED
        < Offer.SHARED + 2**24
        < Offer.ABSTAIN
    )

"""One vector a step: its length is fixed, and its minimum keeps what is not known everywhere."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.buffer_only.agreement import (
    PENDING,
    READ_SLOTS,
    WRITE_SLOTS,
    Facts,
    Ledger,
    RanksDiverged,
    agree,
    alone,
)


def both(mine: Facts, other: Facts, ledgers: tuple[Ledger, Ledger] | None = None) -> Facts:
    """What the first of two ranks learns."""
    first, second = ledgers or (Ledger(), Ledger())
    seen: list[list[int]] = []
    agree(other, second, lambda vector: seen.append(vector) or vector)
    return agree(mine, first, lambda v: [min(a, b) for a, b in zip(v, seen[0], strict=True)])


def test_alone():
    """A server of one rank knows all there is to know."""
    facts = Facts(12, 3, 4, (1, PENDING), (7,))
    assert agree(facts, Ledger(), alone) == facts


def test_the_slowest_the_fewest_and_nothing_that_is_not_known_to_all():
    """A page counts when all ranks have it; an operation has ended when all ranks say so."""
    mine = Facts(20, 2, 1, (5, PENDING, 3), (8, 0))
    other = Facts(18, 3, 0, (2, 6, 3), (PENDING, 4))
    assert both(mine, other) == Facts(18, 2, 0, (2, PENDING, 3), (PENDING, 0))


@pytest.mark.hazard("ranks-part-in-collective")
@pytest.mark.parametrize(("writes", "reads"), [(0, 0), (3, 1), (WRITE_SLOTS, READ_SLOTS)])
def test_the_length_is_fixed(writes: int, reads: int):
    """Or a rank with an empty queue would leave a collective out, and the server hang."""
    lengths = set()
    facts = Facts(0, 0, 0, (1,) * writes, (1,) * reads)
    agree(facts, Ledger(), lambda vector: lengths.add(len(vector)) or vector)
    assert lengths == {5 + WRITE_SLOTS + READ_SLOTS}
    with pytest.raises(ValueError, match="at most"):
        agree(Facts(0, 0, 0, (1,) * (WRITE_SLOTS + 1)), Ledger(), alone)


def test_ranks_that_started_different_things_are_noticed():
    """Going on, they would mark, free and publish different pages."""
    ledgers = Ledger(), Ledger()
    for ledger in ledgers:
        ledger.note("write", 3)
    assert both(Facts(0, 0, 0), Facts(0, 0, 0), ledgers)
    ledgers[0].note("fetch", "r1", 2)
    ledgers[1].note("fetch", "r1", 3)
    with pytest.raises(RanksDiverged, match="--hicache-host-memory-mode"):
        both(Facts(0, 0, 0), Facts(0, 0, 0), ledgers)

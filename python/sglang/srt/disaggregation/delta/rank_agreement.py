"""Agreement between the ranks of one server.

What the ranks of one decode server agree on before they admit anybody: one small reduction.

Ranks see different things: a heartbeat fails a room on one of them, their clocks differ, and each
evicts by its own clock, so that one tree holds less than another. If any of that decided alone, the
ranks would admit different requests, and the next collective would hang the server. So each rank
puts what it sees into a ballot, the smallest of every value counts, and everything that is decided
in the step is decided from that.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def alone(group: Any) -> bool:
    """Whether ``group`` has one rank."""
    return bool(dist.get_world_size(group) == 1)


def minimum(values: list[int], group: Any) -> list[int]:
    """The smallest of each value over the ranks of ``group``; one collective, none for one rank.

    Every rank must call it with equally many values, so callers decide *whether* to call it from
    things that are equal on all ranks.
    """
    if alone(group):
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return [int(value) for value in tensor]


class State(enum.IntEnum):
    """What became of a request that has no pages yet. The worst over the ranks counts."""

    FAILED = 0
    #: It waited for memory as long as it may.
    EXPIRED = 1
    #: It waited for another request's prefix as long as it may.
    WAITED_ENOUGH = 2
    FINE = 3


class Offer(enum.IntEnum):
    """One candidate's prefix as a number: to ``SHARED``, its tokens are added."""

    #: This candidate and everybody behind it is not tried in this step.
    STOP = 0
    #: It may be tried, and must not share.
    PRIVATE = 1
    SHARED = 2
    #: This rank has given it up, and leaves the decision to the others.
    ABSTAIN = 2**40


@dataclass(frozen=True)
class Ballot:
    """What one rank sees at the start of a step, or what all of them agreed on.

    ``states`` has a value for each request whose handshake is done, ``offers`` one for each
    candidate; both lists are equally long on all ranks. ``rows`` and ``slots`` are free request
    rows and metadata slots; ``free`` (with the evictable) and ``protected`` are tokens, counted
    before any lease of this step.
    """

    states: Sequence[int]
    offers: Sequence[int]
    rows: int
    slots: int
    free: int
    protected: int


@dataclass(frozen=True)
class Agreed(Ballot):
    """The smallest of every value over the ranks."""

    #: The ranks' pools are not equally full. Harmless for what follows, but it must not happen.
    pools_differ: bool


def agree(ballot: Ballot, group: Any) -> Agreed:
    """One collective over ``group``; every rank of it must call this in the same step."""
    states, offers = len(ballot.states), len(ballot.offers)
    low = minimum(
        [
            *map(int, ballot.states),
            *map(int, ballot.offers),
            ballot.rows,
            ballot.slots,
            ballot.free,
            ballot.protected,
            -ballot.free,
            -ballot.protected,
        ],
        group,
    )
    rows, slots, free, protected, most_free, most_protected = low[states + offers :]
    return Agreed(
        states=low[:states],
        offers=low[states : states + offers],
        rows=rows,
        slots=slots,
        free=free,
        protected=protected,
        pools_differ=(free, protected) != (-most_free, -most_protected),
    )

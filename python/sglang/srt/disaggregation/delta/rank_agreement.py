"""What the ranks of one server agree on in a scheduler step: one MIN over one vector of integers.

Queues, requests and staging pages are the same on all ranks, because all ranks make the same calls
in each step. A heartbeat that fails a room, a clock, an eviction, a finished copy or an answer of
the store is known to one rank only. A rank that decided from such a value alone would admit or free
something else than the others, and the next collective would hang the server. So each rank puts its
values into a *vote*, the smallest of each counts, and the step is decided from the result.

Each vote carries a checksum of what must be equal already. Ranks whose checksums differ end the
server, because they would continue with different pages.

Contract: all ranks of the group call ``agree``, ``minimum``, ``ended`` and ``gathered`` in the same
order;
callers decide *whether* to call from values that are equal on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar  # Any: gathered or voted values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang.srt.managers.schedule_batch import Req

#: Elementwise minimum of a vector over the ranks; the vector has the same length on all of them.
Reduce = Callable[[list[int]], list[int]]


def part_of(queue: list[Any], start: int, max_items: int) -> tuple[list[Any], int]:
    """Return the slice of ``queue`` that a step checks and the offset of the next slice. Equal on
    all ranks with equal queues."""
    start = start if max_items < len(queue) > start else 0
    return queue[start : start + max_items], start + max_items


class RanksDiverged(RuntimeError):
    """The ranks of one server did different things, which is a bug."""


@dataclass
class Checksum:
    """Checksum of everything that a rank has noted, in order."""

    value: int = 0

    def note(self, *what: object) -> None:
        """Add a value that must be the same on all ranks, at this position in the order."""
        self.value = zlib.crc32(repr(what).encode(), self.value)


def alone(group: ProcessGroup) -> bool:
    """True if ``group`` has one rank."""
    import torch.distributed as dist

    return bool(dist.get_world_size(group) == 1)


def minimum(values: list[int], group: ProcessGroup) -> list[int]:
    """Return the smallest of each value over the ranks of ``group``, with one collective; with none
    for one rank. ``values`` has the same length on all ranks."""
    import torch
    import torch.distributed as dist

    if alone(group):
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return tensor.tolist()


def ended(requests: Sequence[Req], groups: Sequence[ProcessGroup]) -> list[str]:
    """Return the ids of the requests that have ended on all ranks of ``groups``, equal on each rank
    (one collective a group). Fail the open part of a request that failed on another rank."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    polls = [int(request.disagg_kv_sender.poll()) for request in requests]
    over = [poll in (KVPoll.Success, KVPoll.Failed) for poll in polls]
    votes = [*polls, *map(int, over)]
    for group in groups if votes else ():
        votes = minimum(votes, group)
    count, found = len(polls), []
    for request, is_over, worst, all_over in zip(
        requests, over, votes[:count], votes[count:], strict=True
    ):
        if all_over:
            found.append(request.rid)
        elif worst == KVPoll.Failed and not is_over:
            request.disagg_kv_sender.fail_with_others()
    return found


def gathered(mine: Any, group: ProcessGroup) -> list[Any]:
    """Return the values of all ranks of ``group``, in the order of the ranks."""
    import torch.distributed as dist

    if alone(group):
        return [mine]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return values


def over(group: ProcessGroup) -> Reduce:
    """Return the reduction over a ``torch.distributed`` CPU group."""
    return unchanged if alone(group) else lambda values: minimum(values, group)


def unchanged(values: list[int]) -> list[int]:
    """Return ``values``: the reduction over one rank."""
    return values


@dataclass(frozen=True)
class Vote:
    """The values of one rank, or the agreed ones: integers, and sequences of integers that have the
    same length on all ranks."""

    #: Error text for checksums that differ: what happened, and what to do.
    diverged: ClassVar[str]


AnyVote = TypeVar("AnyVote", bound=Vote)

#: Sequences without ``slots`` are padded to a multiple of this, so that ranks that differ by a few
#: requests still reduce vectors of one length, and find the difference.
_BLOCK = 64


def agree(vote: AnyVote, checksum: Checksum, reduce_min: Reduce) -> AnyVote:
    """Return the smallest of every value over the ranks, which all call this in the same step.

    Raises:
        RanksDiverged: the ranks' checksums are not equal.
        ValueError: a sequence is longer than its ``slots``.
    """
    if reduce_min is unchanged:
        return vote  # building the vector costs as much as the rest of a step without any request
    vector, places = [checksum.value, -checksum.value], {}
    for part in fields(vote):
        value = getattr(vote, part.name)
        places[part.name] = len(vector)
        if isinstance(value, int):
            vector.append(value)
            continue
        if not value and part.metadata.get("optional"):
            continue
        slots = part.metadata.get("slots", (len(value) // _BLOCK + 1) * _BLOCK)
        if len(value) > slots:
            raise ValueError(f"{len(value)} values for {part.name}, at most {slots} are allowed")
        vector += [*map(int, value), *[0] * (slots - len(value))]
    smallest = reduce_min(vector)
    if smallest[0] != -smallest[1]:
        raise RanksDiverged(vote.diverged)
    agreed: dict[str, Any] = {}
    for name, start in places.items():
        value = getattr(vote, name)
        is_single = isinstance(value, int)
        agreed[name] = smallest[start] if is_single else tuple(smallest[start : start + len(value)])
    return replace(vote, **agreed)

"""What the ranks of one server agree on in a scheduler step: one MIN over one vector of integers.

Queues, requests and staging pages are the same on all ranks, because all ranks do the same in each
step. Other things only one rank can know: a heartbeat that fails a room, its clock, what its tree
has evicted, a copy that has ended, what the store answered. If any of that decided alone, the ranks
would admit or free different things, and the next collective would hang the server. So each rank
puts what it sees into a *vote*, the smallest of every value counts, and everything that is decided
in the step is decided from that.

With each vote goes a checksum of what must be equal already. Ranks whose checksums differ end the
server: they would go on with different pages.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar  # Any: what is gathered, or voted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: The elementwise minimum of a vector over the ranks; as long on all of them.
Reduce = Callable[[list[int]], list[int]]


def part_of(queue: list[Any], start: int, max_items: int) -> tuple[list[Any], int]:
    """Return the slice of ``queue`` that a step checks and the offset of the next slice. Equal on
    all ranks with equal queues."""
    start = start if max_items < len(queue) > start else 0
    return queue[start : start + max_items], start + max_items


class RanksDiverged(RuntimeError):
    """The ranks of one server did different things, which must not happen."""


@dataclass
class Checksum:
    """Of all that a rank has noted, in order."""

    value: int = 0

    def note(self, *what: object) -> None:
        """Something that must be the same on all ranks, at this position in the order."""
        self.value = zlib.crc32(repr(what).encode(), self.value)


def alone(group: ProcessGroup) -> bool:
    """Whether ``group`` has one rank."""
    import torch.distributed as dist

    return bool(dist.get_world_size(group) == 1)


def minimum(values: list[int], group: ProcessGroup) -> list[int]:
    """The smallest of each value over the ranks of ``group``; one collective, none for one rank.

    Every rank must call it with equally many values, so callers decide *whether* to call it from
    things that are equal on all ranks.
    """
    import torch
    import torch.distributed as dist

    if alone(group):
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return tensor.tolist()


def gathered(mine: Any, group: ProcessGroup) -> list[Any]:
    """What each rank of ``group`` has given, in the order of the ranks, on all of them."""
    import torch.distributed as dist

    if alone(group):
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def over(group: ProcessGroup) -> Reduce:
    """The reduction over a ``torch.distributed`` CPU group."""
    return unchanged if alone(group) else lambda values: minimum(values, group)


def unchanged(values: list[int]) -> list[int]:
    """The reduction over one rank."""
    return values


@dataclass(frozen=True)
class Vote:
    """What one rank sees, or what all have agreed on: integers, and sequences of integers that are
    equally long on all ranks."""

    #: What has happened when checksums differ, and what to do.
    diverged: ClassVar[str]


AnyVote = TypeVar("AnyVote", bound=Vote)

#: Sequences without a bound of their own are padded to a multiple of this: ranks that differ by a
#: few requests still reduce vectors of one length, and find out.
_BLOCK = 64


def agree(vote: AnyVote, checksum: Checksum, reduce_min: Reduce) -> AnyVote:
    """The smallest of every value over the ranks; each of them must call this in the same step.

    Raises:
        RanksDiverged: the ranks' checksums are not equal.
        ValueError: a sequence is longer than its ``slots``.
    """
    if reduce_min is unchanged:
        return vote  # the vector takes as long to make as the rest of a step without anything to do
    vector, places = [checksum.value, -checksum.value], {}
    for each in fields(vote):
        value = getattr(vote, each.name)
        places[each.name] = len(vector)
        if isinstance(value, int):
            vector.append(value)
            continue
        if not value and each.metadata.get("optional"):
            continue
        slots = each.metadata.get("slots", (len(value) // _BLOCK + 1) * _BLOCK)
        if len(value) > slots:
            raise ValueError(f"{len(value)} values for {each.name}, at most {slots} are allowed")
        vector += [*map(int, value), *[0] * (slots - len(value))]
    smallest = reduce_min(vector)
    if smallest[0] != -smallest[1]:
        raise RanksDiverged(vote.diverged)
    found: dict[str, Any] = {}
    for name, at in places.items():
        value = getattr(vote, name)
        single = isinstance(value, int)
        found[name] = smallest[at] if single else tuple(smallest[at : at + len(value)])
    return replace(vote, **found)


# ---- admission on a decode server ----


class State(enum.IntEnum):
    """What became of a request that has no pages yet. The worst over the ranks counts."""

    FAILED = 0
    #: It waited for memory as long as it may.
    EXPIRED = 1
    FINE = 2


# ---- transfers between stage and store on a server with buffer-only HiCache ----

#: A store job that has not ended on some rank. Less than any number of pages, so that MIN keeps it.
PENDING = -1
#: Transfers that the vector has room for: its length is the same whatever the queues hold. A fetch
#: may leave pages behind that an overdue call of the store still uses.
BACKUP_SLOTS, QUERY_SLOTS, FETCH_SLOTS = 16, 48, 32


@dataclass(frozen=True)
class TransferVote(Vote):
    """In every step, so that no rank can wait for a collective that another one left out."""

    #: Since the cache was built; the slowest rank's is everybody's time.
    clock_ms: int
    #: Leading device-to-stage and stage-to-device copies that have ended.
    backup_copies: int
    load_back_copies: int
    #: For each backup in order, its durable pages, or ``PENDING``; the same for what each query has
    #: found, and each fetch has brought.
    backups: Sequence[int] = field(default=(), metadata={"slots": BACKUP_SLOTS})
    queries: Sequence[int] = field(default=(), metadata={"slots": QUERY_SLOTS})
    fetches: Sequence[int] = field(default=(), metadata={"slots": FETCH_SLOTS})
    #: 1 if the store is asked, 0 while it is silent.
    store_up: int = 1
    #: Leading tokens that the store has of the path that is looked up, or ``PENDING``.
    touched: int = 0
    #: Of ``worth.Speeds``, the slowest rank's: the times of a call and of a query negated.
    minus_call_us: int = 0
    minus_query_us: int = 0
    call_bytes: int = 0
    tokens_per_s: int = 0

    diverged = (
        "--hicache-host-memory-mode buffer_only: the ranks of this server have started different "
        "transfers between device and store, and their caches differ now. Restart it, and please "
        "report this with the logs of all ranks."
    )

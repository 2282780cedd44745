"""What the ranks of one server agree on in a scheduler step: one MIN over a vector of fixed length.

Trees, queues and staging pages are the same on all ranks, because all ranks do the same in each
step. What only one rank can know (a copy that has ended, what the store answered, the time) goes
into the vector; every decision is made from the reduced one. The vector has the same length
whatever the queues hold, and is reduced in every step, so that no rank can wait for a collective
that another one left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: A store job that has not ended on some rank. Less than any number of pages, so that MIN keeps it.
PENDING = -1

#: Transfers that the vector has room for, each way. A read may leave pages behind that a given-up
#: call of the store still uses: half of the slots are for these.
WRITE_SLOTS, READ_SLOTS = 16, 64

Reduce = Callable[[list[int]], list[int]]


class RanksDiverged(RuntimeError):
    """The ranks of one server did different things, which must not happen."""


@dataclass(frozen=True)
class Facts:
    """What one rank knows, or, reduced, what all of them do.

    Attributes:
        clock_ms: since this cache was built; the slowest rank's is everybody's time.
        written: leading device-to-stage copies that have ended.
        loaded: leading stage-to-device copies that have ended.
        writes: for each write job in order, its durable pages, or ``PENDING``.
        reads: the same for queries and fetches.
    """

    clock_ms: int
    written: int
    loaded: int
    writes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()


@dataclass
class Ledger:
    """A running checksum of all that a rank has started, to notice ranks that differ."""

    value: int = field(default=0)

    def note(self, *what: object) -> None:
        """Something was started that all ranks must start, in this order."""
        self.value = zlib.crc32(repr(what).encode(), self.value)


def agree(facts: Facts, ledger: Ledger, reduce_min: Reduce) -> Facts:
    """The facts that hold on all ranks.

    Raises:
        RanksDiverged: the ranks have not started the same transfers.
    """
    head = [ledger.value, -ledger.value, facts.clock_ms, facts.written, facts.loaded]
    vector = reduce_min(
        [*head, *_padded(facts.writes, WRITE_SLOTS), *_padded(facts.reads, READ_SLOTS)]
    )
    if vector[0] != -vector[1]:
        raise RanksDiverged(
            "--hicache-host-memory-mode buffer_only: the ranks of this server have started "
            "different transfers between device and store, so that their caches are no longer "
            "the same. Restart it."
        )
    results = vector[len(head) :]
    return Facts(
        clock_ms=vector[2],
        written=vector[3],
        loaded=vector[4],
        writes=tuple(results[: len(facts.writes)]),
        reads=tuple(results[WRITE_SLOTS : WRITE_SLOTS + len(facts.reads)]),
    )


def alone(vector: list[int]) -> list[int]:
    """The reduction of a server with one rank."""
    return vector


def group_min(group: object) -> Reduce:
    """The reduction over a ``torch.distributed`` CPU group."""
    import torch

    def reduce_min(vector: list[int]) -> list[int]:
        tensor = torch.tensor(vector, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=group)
        return list(map(int, tensor.tolist()))

    return reduce_min


def _padded(values: Sequence[int], length: int) -> list[int]:
    if len(values) > length:
        raise ValueError(f"{len(values)} transfers in flight, at most {length} may be")
    return [*values, *[0] * (length - len(values))]

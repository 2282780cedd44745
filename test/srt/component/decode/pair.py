"""Two ranks of one decode server, moved in step; a divergence is noticed at once.

Each rank is a thread with its own pool, tree and queues. Before a collective both state its kind
and size, and at the end of an action that they have finished. If only one rank reduces, or with
another number of values, the test fails immediately, where a server would hang.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from component.decode.decoder import Decoder

RANKS = (0, 1)
END = "no more collectives"


class Diverged(AssertionError):
    """The ranks no longer agree."""


class Exchange:
    """The meeting point of the two threads."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._barrier = threading.Barrier(2, timeout=timeout_s)
        self._said: list[Any] = [None, None]

    def meet(self, rank: int, what: Any, values: Any = None) -> list[Any]:
        """Return both ranks' values for the same ``what``, once both have arrived."""
        self._said[rank] = (what, values)
        self._barrier.wait()
        (first, ours), (second, theirs) = self._said
        self._barrier.wait()
        if first != second:
            raise Diverged(f"rank 0: {first}\nrank 1: {second}")
        return [ours, theirs]

    def abort(self) -> None:
        """Release the other rank, because this one failed."""
        self._barrier.abort()

    def reset(self) -> None:
        """Prepare for the next action."""
        self._barrier.reset()


class RankGroup:
    """The process group of one rank. Reduces between the threads, or over gloo."""

    def __init__(self, rank: int, exchange: Exchange, gloo: Any = None) -> None:
        self.rank, self._exchange, self._gloo = rank, exchange, gloo
        #: Number of values of each collective since the test last read them.
        self.collectives: list[int] = []

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MIN
        self.collectives.append(tensor.numel())
        # A copy, because the other rank reads it while this one writes its result.
        both = self._exchange.meet(self.rank, f"reduce {tensor.numel()} values", tensor.clone())
        if self._gloo is not None:
            _all_reduce(tensor, op=op, group=self._gloo)
        else:
            torch.minimum(*both, out=tensor)


_all_reduce = dist.all_reduce
_get_world_size = dist.get_world_size


@contextmanager
def ranks_reduce() -> Iterator[None]:
    """Let ``torch.distributed`` use ``RankGroup`` within the context."""

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if isinstance(group, RankGroup):
            group.all_reduce(tensor, op)
        else:
            _all_reduce(tensor, op=op, group=group)

    def get_world_size(group: Any = None) -> int:
        return 2 if isinstance(group, RankGroup) else int(_get_world_size(group))

    dist.all_reduce, dist.get_world_size = all_reduce, get_world_size
    try:
        yield
    finally:
        dist.all_reduce, dist.get_world_size = _all_reduce, _get_world_size


def view(decoder: Decoder) -> tuple[Any, ...]:
    """Return everything that must be equal on all ranks."""
    allocator, tree = decoder.token_to_kv_pool_allocator, decoder.tree_cache
    transfer = decoder.disagg_decode_transfer_queue
    return (
        allocator.available_size() + tree.evictable_size(),
        tree.protected_size(),
        tree.inserts,
        [(req.rid, req.cache_protected_len) for req in decoder.in_transfer],
        [deferred.entry.req.rid for deferred in transfer.deferred],
        [req.rid for req in decoder.queued],
        [req.rid for req in decoder.waiting_queue],
        [req.rid for req in decoder.local],
        [(req.rid, len(req.output_ids)) for req in decoder.running_batch.reqs],
        [req.rid for req in decoder.disagg_decode_prealloc_queue.retracted_queue],
        sorted(decoder.mailbox.ends.items()),
    )


class Pair:
    """Runs one action after another on both ranks, and compares both after each.

    ``build`` makes the object that a rank's actions get; it has a ``decoder``.
    """

    def __init__(self, build: Callable[[int, RankGroup], Any], *, gloo: bool = False) -> None:
        self._exchange = Exchange()
        self._threads = [ThreadPoolExecutor(1) for _ in RANKS]
        store = dist.HashStore() if gloo else None
        self.groups: list[RankGroup] = self.call(lambda rank: self._group(rank, store))
        self.sides: list[Any] = self.call(lambda rank: build(rank, self.groups[rank]))

    def _group(self, rank: int, store: Any) -> RankGroup:
        gloo = None
        if store is not None:
            gloo = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))
        return RankGroup(rank, self._exchange, gloo)

    def call(self, function: Callable[[int], Any]) -> list[Any]:
        """Call ``function`` with each rank on its thread; nothing is compared."""
        futures = [self._threads[rank].submit(function, rank) for rank in RANKS]
        errors = [error for future in futures if (error := future.exception())]
        # The other rank gets a broken barrier.
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            self._exchange.reset()
            raise error
        return [future.result() for future in futures]

    def run(self, action: Callable[[Any], Any]) -> list[Any]:
        """Call ``action`` with each rank's side; raise ``Diverged`` if the ranks part."""

        def on_rank(rank: int) -> Any:
            try:
                result = action(self.sides[rank])
                ours, theirs = self._exchange.meet(rank, END, view(self.sides[rank].decoder))
                if ours != theirs:
                    raise Diverged(f"rank 0: {ours}\nrank 1: {theirs}")
            except BaseException:
                self._exchange.abort()
                raise
            return result

        return self.call(on_rank)

    def collectives(self) -> list[int]:
        """Return the number of values of each collective since the last call, equal on both."""
        ours, theirs = (list(group.collectives) for group in self.groups)
        assert ours == theirs
        for group in self.groups:
            group.collectives.clear()
        return ours

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()

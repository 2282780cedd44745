"""The ranks of one server: each has its own cache, and all agree in each step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from component.buffer_only.cache import Cache
from component.buffer_only.checks import check, check_idle, nodes, path

PATIENCE_S = 20.0


class Group:
    """MIN over one vector from each rank; records the vectors' lengths."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, action=self._reduce)
        self._vectors: dict[int, list[int]] = {}
        self._result: list[int] = []
        #: Lengths of the vectors of each collective.
        self.log: list[set[int]] = []

    def of(self, rank: int) -> Callable[[list[int]], list[int]]:
        def reduce_min(vector: list[int]) -> list[int]:
            self._vectors[rank] = vector
            self._barrier.wait(PATIENCE_S)
            return list(self._result)

        return reduce_min

    def _reduce(self) -> None:
        self.log.append(set(map(len, self._vectors.values())))
        self._result = [min(values) for values in zip(*self._vectors.values(), strict=True)]


class Ranks:
    """The caches of all ranks, with the calls of their schedulers."""

    def __init__(self, ranks: int, **changes: Any) -> None:
        self.group = Group(ranks)
        self.caches = [
            Cache(reduce_min=self.group.of(rank), rank=rank, **changes) for rank in range(ranks)
        ]
        self._threads = ThreadPoolExecutor(ranks)
        Cache.instances.append(self)

    def on_all(self, action: Callable[[Cache], Any]) -> Any:
        """Run ``action`` on all ranks; return their common result."""
        results = [action(cache) for cache in self.caches]
        assert all(result == results[0] for result in results), f"the ranks differ: {results}"
        return results[0]

    def step(self) -> None:
        """Run one scheduler step of all ranks at the same time."""
        for future in [self._threads.submit(cache.step, False) for cache in self.caches]:
            future.result()

    def live(self, steps: int = 1) -> None:
        """Run steps, each after the threads of all ranks have done their work."""
        for _ in range(steps):
            for cache in self.caches:
                cache.work()
            self.step()
            self.check()

    def check(self, content: bool = True) -> None:
        for cache in self.caches:
            check(cache, content)
        self.on_all(shape)

    def store(self, tokens: list[int]) -> None:
        """Put a prompt into all stores and into no tree."""
        self.on_all(lambda cache: cache.compute(tokens))
        self.live(6)
        self.on_all(lambda cache: cache.flush())

    def end(self) -> None:
        """Disconnect all clients, let all stores answer, and check that all ranks are idle."""
        Cache.instances.remove(self)
        for cache in self.caches:
            cache.slow = False
            cache.open_gates()
        self.on_all(lambda cache: cache.buffer.prefetches.in_line([]))
        for _ in range(200):
            self.live()
            if not self.caches[0].buffer.busy and not self.caches[0].stage.used():
                break
        for cache in self.caches:
            check_idle(cache)
            assert not cache.store.disturbed, "a page was overwritten while the store read it"
        lengths: set[int] = set().union(*self.group.log)
        assert len(lengths) <= 1, f"collectives of different lengths: {lengths}"
        self._threads.shutdown()


def shape(cache: Cache) -> Any:
    """Return everything in which ranks must not differ."""
    tree = sorted(
        ([t for above in path(node) for t in above.key.token_ids], str(node.key.extra_key),
         node.stored, node.launched, node.lock_ref, node.host_ref_counter)
        for node in nodes(cache.tree)
    )  # fmt: skip
    prefetches = cache.buffer.prefetches
    states = [
        (prefetch.rid, prefetch.state.name, prefetch.place, prefetch.begin, len(prefetch.keys),
         prefetch.waited_ms,
         [(piece.start, piece.staged, piece.staging.pages) for piece in prefetch.pieces])
        for prefetch in prefetches.line
    ]  # fmt: skip
    return (
        tree,
        states,
        [(piece.start, piece.overdue, piece.staging.pages) for piece in prefetches.calls.fetches],
        [op.pages for op in cache.buffer.backups.running],
        cache.stage.used(),
        cache.allocator.available_size(),
        cache.buffer.busy,
    )

"""Questions to the store: how much of a prompt it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import PENDING, QUERY_SLOTS
from sglang.srt.mem_cache.buffer_only.page_store import Found, page_hashes, search
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, Query

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.pipelines import Context
    from sglang.srt.mem_cache.buffer_only.upstream import Node

#: Threads that ask the store; see ``fetch.THREADS``.
THREADS = 2


class Queries:
    """Those of one rank, oldest first: what the ranks vote on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._threads = context.make_thread("query", THREADS)
        self._under_way: list[Query] = []

    @property
    def under_way(self) -> tuple[Query, ...]:
        """Those without an answer of all ranks."""
        return tuple(self._under_way)

    @property
    def has_slot(self) -> bool:
        """Whether another one may be asked."""
        return len(self._under_way) < QUERY_SLOTS

    def start(self, prefetch: Prefetch, held: int, node: Node) -> None:
        """Ask for what comes behind the ``held`` pages that the tree has, which end in ``node``."""
        context, key = self._context, prefetch.key
        last_hash = page_hashes(node, context.page_size)[-1] if held else None
        before = context.prefix_keys(node)
        wanted = key.token_ids[held * context.page_size :]
        work = search(context.store, wanted, context.page_size, last_hash, key.extra_key, before)
        context.checksum.note("query", prefetch.rid, held)
        prefetch.query = Query(prefetch, self._threads.submit(work))
        self._under_way.append(prefetch.query)
        prefetch.queries += 1
        prefetch.begin, prefetch.prefix_keys = held, before
        prefetch.hashes, prefetch.keys = [], []

    def apply(self, outcomes: Sequence[int]) -> list[Prefetch]:
        """Act on what the store has answered on all ranks; whose hit is known now."""
        answered = []
        for query, pages in zip(list(self._under_way), outcomes, strict=True):
            if pages == PENDING:
                continue
            self._under_way.remove(query)
            self._context.counters["store_query_failures"] += query.job.fault is not None
            prefetch = query.owner
            if prefetch is not None:
                found = query.job.found or Found()
                prefetch.query = None
                prefetch.hashes, prefetch.keys = found.hashes[:pages], found.keys[:pages]
                answered.append(prefetch)
        return answered

    def cancel(self, prefetch: Prefetch) -> None:
        """Nobody wants the answer any more."""
        if prefetch.query is not None:
            prefetch.query.job.cancel()
            prefetch.query.owner = None
            prefetch.query = None

    def close(self, timeout: float) -> bool:
        """End the threads; False if that takes more than ``timeout`` seconds."""
        return self._threads.close(timeout)

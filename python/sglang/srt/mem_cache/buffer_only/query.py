"""Questions to the store: how much of a prompt it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import PENDING, QUERY_SLOTS
from sglang.srt.mem_cache.buffer_only.page_store import Found, search
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, Query
from sglang.srt.mem_cache.buffer_only.settings import minimal_transfer
from sglang.srt.mem_cache.buffer_only.worth import Mean

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.buffer_only.page_store import Job
    from sglang.srt.mem_cache.buffer_only.prefetch import FirstFetch

#: Threads that ask the store; see ``fetch.THREADS``.
THREADS = 2


class Queries:
    """Those of one rank, oldest first: what the ranks vote on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._threads = context.make_thread("query", THREADS)
        self._under_way: list[Query] = []
        #: Of those that were answered, on this rank. Where few are asked, because the last ones
        #: were slow, a few that are not must tell.
        self.seconds = Mean(keep=0.5)

    @property
    def under_way(self) -> tuple[Query, ...]:
        """Those without an answer of all ranks."""
        return tuple(self._under_way)

    @property
    def rounds(self) -> int:
        """Queries one behind the other until another one is answered."""
        return len(self._under_way) // THREADS + 1

    @property
    def has_slot(self) -> bool:
        """Whether another one may be asked."""
        return len(self._under_way) < QUERY_SLOTS

    def start(
        self,
        prefetch: Prefetch,
        begin: int,
        last_hash: str | None,
        prefix_keys: list[str] | None,
        tail: bool = False,
        first: FirstFetch | None = None,
    ) -> None:
        """Ask for what comes behind the first ``begin`` pages of a prompt.

        Args:
            last_hash: page hash of the last of these; None at the start.
            prefix_keys: keys of all of them, where the backend wants them.
            tail: whether these are a hit already.
            first: the fetch that is to follow.
        """
        context, key = self._context, prefetch.key
        wanted = key.token_ids[begin * context.page_size :]
        look = search(
            context.store,
            wanted,
            context.page_size,
            last_hash,
            key.extra_key,
            begin,
            prefix_keys,
            minimal_transfer(context.page_size, context.settings.prefetch_threshold),
        )

        def work(job: Job) -> int:
            pages = look(job)
            if first is not None:
                first.follow(job)
            return pages

        context.checksum.note("query", prefetch.rid, begin)
        query = Query(prefetch, self._threads.submit(work), begin, prefix_keys, tail, first)
        prefetch.query = query
        self._under_way.append(query)

    def apply(self, outcomes: Sequence[int]) -> list[tuple[Query, Found]]:
        """Take what the store has answered on all ranks: queries, and what all ranks found."""
        answered = []
        for query, pages in zip(list(self._under_way), outcomes, strict=True):
            if pages == PENDING:
                continue
            self._under_way.remove(query)
            # One that was given up may have ended early: it counts if it took longer all the same.
            if not query.job.cancelled or query.job.seconds > self.seconds.value:
                self.seconds.add(query.job.seconds)
            self._context.counters["store_query_failures"] += query.job.fault is not None
            if query.owner is not None:
                query.owner.query = None
            found = query.job.found or Found()
            answered.append((query, Found(found.hashes[:pages], found.keys[:pages])))
        return answered

    def wait(self, queries: Iterable[Query], seconds: float) -> bool:
        """Whether the store has answered ``queries``, at most ``seconds`` later."""
        return self._threads.wait([query.job for query in queries], seconds)

    def cancel(self, prefetch: Prefetch) -> None:
        """Nobody wants the answer any more."""
        if prefetch.query is not None:
            prefetch.query.job.cancel()
            prefetch.query.owner = None
            prefetch.query = None

    def close(self, until: float) -> bool:
        """End the threads; False if one runs on at ``until``, of ``time.monotonic``."""
        return self._threads.close(until)

"""Store calls for the prefetches of one rank: queries, and pages being fetched into the staging
buffer or staged there for a request.

Contract: scheduler thread. ``votes`` is local; every other method runs in the same step on all
ranks, with arguments that are agreed or derived from the queue and the tree. A piece keeps its
staging pages until the store has answered on all ranks, and after an overdue call until that call
has returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.prefetch import Piece, Prefetch, Query
from sglang.srt.mem_cache.buffer_only.staging import Direction, slots_of
from sglang.srt.mem_cache.buffer_only.transfer_vote import FETCH_SLOTS, PENDING
from sglang.srt.mem_cache.buffer_only.worth import FETCH_THREADS, Mean
from sglang.srt.patchset.staging_size import minimal_transfer

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context

#: Threads that query the store; ``FETCH_THREADS`` read from it.
QUERY_THREADS = 2
#: Maximum pieces in flight, because more would be fetched before requests that arrive ahead.
MAX_FETCHES = 2 * FETCH_THREADS
#: Maximum bytes of a piece.
PIECE_BYTES = 32 * 2**20


class Calls:
    """Queries and pieces of all prefetches of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queriers = context.threads("query", QUERY_THREADS)
        self._fetchers = context.threads("fetch", FETCH_THREADS)
        #: Queries not answered by all ranks, oldest first: the ranks vote on them in this order.
        self.queries: list[Query] = []
        #: Pieces not answered by all ranks, or in use by an overdue call; voted on in this order.
        self.fetches: list[Piece] = []
        #: Page key -> the prefetch that is fetching or has staged it.
        self.fetched_by: dict[str, Prefetch] = {}
        #: ``changes`` grows whenever a prefetch might fetch more. ``withdrawals`` grows when a
        #: prefetch no longer delivers pages, or moves back in the queue.
        self.changes = self.withdrawals = 0
        #: Mean query time on this rank. Fades fast, because a slow mean makes queries rare, and a
        #: few fast ones must correct it.
        self.query_seconds = Mean(keep=0.5)
        #: Mean fetch time and size on this rank.
        self.call_seconds, self.call_bytes = Mean(), Mean()
        round_pages = max(1, context.staging_pool.shares[Direction.PREFETCH].ceiling // 2)
        #: Pages of the smallest hit that is fetched.
        self._min_hit_pages = minimal_transfer(
            context.page_size, context.settings.prefetch_threshold
        )
        #: Minimum pages of a call, unless fewer are missing.
        self.min_call_pages = min(self._min_hit_pages, round_pages)
        #: Maximum pages of a piece: half of the staging buffer, so that one half is copied to the
        #: device while the other half is fetched.
        self.piece_pages = max(1, min(PIECE_BYTES // max(1, context.page_bytes), round_pages))

    @property
    def running(self) -> int:
        """Number of fetches in flight, overdue ones excluded."""
        return sum(not piece.overdue for piece in self.fetches)

    @property
    def capacity(self) -> int:
        """Pages that can be fetched now."""
        return self._context.staging_pool.capacity(Direction.PREFETCH)

    @property
    def max_capacity(self) -> int:
        """Pages that can be fetched once all but stranded pages are released."""
        return self._context.staging_pool.capacity(Direction.PREFETCH, eventually=True)

    @property
    def can_fetch(self) -> bool:
        """True if another piece may be started. Each running one may leave an overdue one."""
        return self.running < MAX_FETCHES and len(self.fetches) < FETCH_SLOTS - MAX_FETCHES

    @property
    def stuck(self) -> bool:
        """True if nothing can be fetched until an overdue call returns."""
        overdue = len(self.fetches) - self.running
        return self.max_capacity < self.min_call_pages or overdue >= FETCH_SLOTS - MAX_FETCHES

    def votes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return this rank's outcome of each query and of each fetch."""
        jobs = [(piece.job, piece.overdue) for piece in self.fetches]
        fetches = tuple(job.outcome(overdue) for job, overdue in jobs if job is not None)
        return tuple(query.job.pages for query in self.queries), fetches

    # ---- queries ----

    def query(
        self,
        prefetch: Prefetch,
        begin: int,
        last_hash: str | None,
        prefix_keys: list[str] | None,
    ) -> None:
        """Start a query for the pages after the first ``begin`` pages of a prompt.

        Args:
            last_hash: hash of page ``begin - 1``; None at the start.
            prefix_keys: keys of the first ``begin`` pages, if the backend takes them.
        """
        context, key = self._context, prefetch.key
        search = context.store.search(
            key.token_ids[begin * context.page_size :],
            last_hash,
            key.extra_key,
            begin,
            prefix_keys,
            self._min_hit_pages,
        )

        context.checksum.note("query", prefetch.rid, begin)
        prefetch.query = Query(prefetch, self._queriers.submit(search), begin, prefix_keys)
        self.queries.append(prefetch.query)

    def take_answered(
        self, outcomes: Sequence[int]
    ) -> list[tuple[Prefetch, Query, list[str], list[str]]]:
        """Remove the queries answered on all ranks. Return each one's prefetch, the query, and the
        hashes and keys of the pages that all ranks found."""
        answered = []
        for query, pages in zip(list(self.queries), outcomes, strict=True):
            if pages == PENDING:
                continue
            job, owner = query.job, query.owner
            self.queries.remove(query)
            # A cancelled query may have ended early, so that it counts only if it was slow.
            if not job.cancelled or job.seconds > self.query_seconds.value:
                self.query_seconds.add(job.seconds)
            self._context.counters["store_query_failures"] += job.fault is not None
            if owner is not None:
                owner.query = None
                hashes, keys = job.found
                answered.append((owner, query, hashes[:pages], keys[:pages]))
        return answered

    def forget_query(self, prefetch: Prefetch) -> None:
        """Cancel the query of ``prefetch``, if any."""
        if prefetch.query is not None:
            prefetch.query.job.cancelled = True
            prefetch.query.owner = None
            prefetch.query = None

    # ---- pieces ----

    def fetch(self, prefetch: Prefetch, start: int, stop: int) -> None:
        """Fetch the pages ``start .. stop`` of a prompt; the caller has checked the capacity."""
        context, store = self._context, self._context.store
        staging = context.staging_pool.allocate(Direction.PREFETCH, stop - start)
        keys = prefetch.keys[start - prefetch.begin : stop - prefetch.begin]
        prefix_keys = prefetch.prefix_keys
        if prefix_keys is not None:  # the call passes the keys of all pages before ``start``
            prefix_keys = [*prefix_keys, *prefetch.keys[: start - prefetch.begin]]
        slots = slots_of(staging.pages, context.page_size)
        context.checksum.note("fetch", prefetch.rid, start, stop)
        job = self._fetchers.submit(
            lambda job: store.call(job, store.client.read, keys, prefix_keys, slots)
        )
        piece = Piece(prefetch, start, keys, staging, job)
        prefetch.pieces.append(piece)
        prefetch.pieces.sort(key=lambda piece: piece.start)
        self.fetches.append(piece)
        for key in keys:
            self.fetched_by.setdefault(key, prefetch)
        self.changes += 1

    def take_fetched(self, outcomes: Sequence[int]) -> list[Prefetch]:
        """Process the fetches answered on all ranks. Return the prefetches that got pages."""
        owners = []
        for piece, pages in zip(list(self.fetches), outcomes, strict=True):
            if pages == PENDING:
                if piece.overdue:
                    piece.staging.strand()
                continue
            self.changes += 1
            if piece.overdue:
                self.fetches.remove(piece)
                piece.staging.release()
            elif piece.owner is None:
                piece.overdue = True  # until the ranks agree that no call writes into it
            else:
                owners.append(piece.owner)
                self._record_staged(piece.owner, piece, pages)
        return owners

    def _record_staged(self, prefetch: Prefetch, piece: Piece, pages: int) -> None:
        """Record that the first ``pages`` pages of ``piece`` are staged and the rest is lost."""
        counters, length, job = self._context.counters, len(piece.keys), piece.job
        assert job is not None
        counters["store_read_failures"] += job.fault is not None
        counters["store_read_pages"] += pages
        if job.fault is None and pages:
            self.call_seconds.add(job.seconds)
            self.call_bytes.add(pages * self._context.page_bytes)
        rest = piece
        if 0 < pages < length:
            staging = piece.staging.split(pages)
            rest = Piece(None, piece.start + pages, piece.keys[pages:], staging, job)
            piece.keys = piece.keys[:pages]
            self._forget(prefetch, rest.keys)
            self.fetches.append(rest)
        if pages:
            self.fetches.remove(piece)
            piece.job = None
        if pages < length:  # the store has lost the rest since the query
            self.truncate(prefetch, rest.start)
            rest.overdue = True

    def drop(self, prefetch: Prefetch, pieces: Iterable[Piece]) -> None:
        """Release ``pieces``; those in flight once the store no longer uses their pages."""
        for piece in list(pieces):
            self.detach(prefetch, [piece])
            prefetch.covered_at = piece.owner = None
            if piece.job is None:
                piece.staging.release()
            else:
                piece.job.cancelled = True

    def truncate(self, prefetch: Prefetch, end: int) -> None:
        """Shorten the hit of ``prefetch`` to end at page ``end``."""
        pages = max(0, end - prefetch.begin)
        lost = max(0, len(prefetch.keys) - pages) * self._context.page_size
        self._context.counters["prefetch_unfulfilled_tokens"] += lost
        prefetch.hashes, prefetch.keys = prefetch.hashes[:pages], prefetch.keys[:pages]
        prefetch.unready = None
        self.drop(prefetch, [piece for piece in prefetch.pieces if piece.stop > end])

    def detach(self, prefetch: Prefetch, pieces: Iterable[Piece]) -> None:
        """Remove ``pieces`` from ``prefetch``. The caller releases their staging pages."""
        for piece in pieces:
            self.changes += 1
            prefetch.pieces.remove(piece)
            self._forget(prefetch, piece.keys)

    def _forget(self, prefetch: Prefetch, keys: Iterable[str]) -> None:
        self.withdrawals += 1
        for key in keys:
            if self.fetched_by.get(key) is prefetch:
                del self.fetched_by[key]

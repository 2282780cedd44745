"""What is asked of the store for the prefetches of one rank: questions, and pages on their way into
the staging buffer or there for a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import FETCH_SLOTS, PENDING
from sglang.srt.mem_cache.buffer_only.prefetch import Piece, Prefetch, Query
from sglang.srt.mem_cache.buffer_only.stage import Direction, slots_of
from sglang.srt.mem_cache.buffer_only.worth import SIDE_BY_SIDE, Mean
from sglang.srt.patchset.stage_size import minimal_transfer

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context

#: Threads that ask the store; those that fetch are ``SIDE_BY_SIDE``.
QUERY_THREADS = 2
#: Pieces that the threads have at a time: more of them would be fetched out of turn.
MAX_FETCHES = 2 * SIDE_BY_SIDE
#: Most bytes of a piece.
PIECE_BYTES = 32 * 2**20


class Calls:
    """Queries and pieces of all prefetches of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._askers = context.threads("query", QUERY_THREADS)
        self._fetchers = context.threads("fetch", SIDE_BY_SIDE)
        #: Without an answer of all ranks, oldest first: what the ranks vote on.
        self.queries: list[Query] = []
        #: Pieces that the store works for, or may still write into; the same.
        self.fetches: list[Piece] = []
        #: Who brings a page, or has it in the staging buffer.
        self.brought: dict[str, Prefetch] = {}
        #: Grows whenever there may be something else to fetch for somebody; and when somebody does
        #: not bring pages any more, or brings them later than others.
        self.changes = self.let_go = 0
        #: Of queries that were answered, on this rank. Where few are asked, because the last ones
        #: were slow, a few that are not must tell.
        self.query_seconds = Mean(keep=0.5)
        #: Of fetches that were answered, on this rank: seconds and bytes.
        self.call_seconds, self.call_bytes = Mean(), Mean()
        round_pages = max(1, context.stage.shares[Direction.PREFETCH].ceiling // 2)
        #: Pages of the smallest hit that is fetched.
        self._least_hit = minimal_transfer(context.page_size, context.settings.prefetch_threshold)
        #: Fewer pages than this are not worth a call, unless they are all that is missing.
        self.least_pages = min(self._least_hit, round_pages)
        #: Most pages of a piece: half of the staging buffer, so that one half can be copied to the
        #: device while the other one is fetched.
        self.piece_pages = max(1, min(PIECE_BYTES // max(1, context.page_bytes), round_pages))

    @property
    def running(self) -> int:
        """Fetches under way without those that were given up."""
        return sum(not piece.overdue for piece in self.fetches)

    @property
    def capacity(self) -> int:
        """Pages that could be fetched now."""
        return self._context.stage.capacity(Direction.PREFETCH)

    @property
    def most(self) -> int:
        """Pages that could be fetched if nothing else were in the staging buffer."""
        return self._context.stage.capacity(Direction.PREFETCH, eventually=True)

    @property
    def can_fetch(self) -> bool:
        """Whether another piece may be started; each may leave one behind."""
        return self.running < MAX_FETCHES and len(self.fetches) < FETCH_SLOTS - MAX_FETCHES

    @property
    def stuck(self) -> bool:
        """Whether nothing can be fetched until a call returns that was given up."""
        overdue = len(self.fetches) - self.running
        return self.most < self.least_pages or overdue >= FETCH_SLOTS - MAX_FETCHES

    def votes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What this rank knows of each query, and of each fetch."""
        jobs = [(piece.job, piece.overdue) for piece in self.fetches]
        fetches = tuple(job.outcome(overdue) for job, overdue in jobs if job is not None)
        return tuple(query.job.pages for query in self.queries), fetches

    # ---- queries ----

    def ask(
        self,
        prefetch: Prefetch,
        begin: int,
        last_hash: str | None,
        prefix_keys: list[str] | None,
    ) -> None:
        """Ask for what comes behind the first ``begin`` pages of a prompt.

        Args:
            last_hash: page hash of the last of these; None at the start.
            prefix_keys: keys of all of them, where the backend wants them.
        """
        context, key = self._context, prefetch.key
        look = context.store.search(
            key.token_ids[begin * context.page_size :],
            last_hash,
            key.extra_key,
            begin,
            prefix_keys,
            self._least_hit,
        )

        context.checksum.note("query", prefetch.rid, begin)
        prefetch.query = Query(prefetch, self._askers.submit(look), begin, prefix_keys)
        self.queries.append(prefetch.query)

    def answered(
        self, outcomes: Sequence[int]
    ) -> list[tuple[Prefetch, Query, list[str], list[str]]]:
        """Take what the store has answered on all ranks: for whom, to what, and the hashes and keys
        of the pages that all ranks found."""
        found = []
        for query, pages in zip(list(self.queries), outcomes, strict=True):
            if pages == PENDING:
                continue
            job, owner = query.job, query.owner
            self.queries.remove(query)
            # One that was given up may have ended early: it counts if it took longer all the same.
            if not job.cancelled or job.seconds > self.query_seconds.value:
                self.query_seconds.add(job.seconds)
            self._context.counters["store_query_failures"] += job.fault is not None
            if owner is not None:
                owner.query = None
                hashes, keys = job.found
                found.append((owner, query, hashes[:pages], keys[:pages]))
        return found

    def forget_query(self, prefetch: Prefetch) -> None:
        """Nobody wants the answer any more."""
        if prefetch.query is not None:
            prefetch.query.job.cancelled = True
            prefetch.query.owner = None
            prefetch.query = None

    # ---- pieces ----

    def fetch(self, prefetch: Prefetch, start: int, stop: int) -> None:
        """Fetch the pages ``start .. stop`` of a prompt, for which there is capacity."""
        context, store = self._context, self._context.store
        staging = context.stage.allocate(Direction.PREFETCH, stop - start)
        keys = prefetch.keys[start - prefetch.begin : stop - prefetch.begin]
        prefix_keys = prefetch.prefix_keys
        if prefix_keys is not None:  # then of all pages before these
            prefix_keys = [*prefix_keys, *prefetch.keys[: start - prefetch.begin]]
        slots = slots_of(staging.pages, context.page_size)
        context.checksum.note("fetch", prefetch.rid, start, stop)
        job = self._fetchers.submit(
            lambda job: store.call(job, store.client.read, keys, prefix_keys, slots)
        )
        piece = Piece(prefetch, start, keys, staging, job)
        prefetch.pieces.append(piece)
        prefetch.pieces.sort(key=lambda one: one.start)
        self.fetches.append(piece)
        for key in keys:
            self.brought.setdefault(key, prefetch)
        self.changes += 1

    def fetched(self, outcomes: Sequence[int]) -> list[Prefetch]:
        """Act on what the store has answered on all ranks; whose pieces have come."""
        came = []
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
                piece.overdue = True  # until it is known that nothing writes into it any more
            else:
                came.append(piece.owner)
                self._came(piece.owner, piece, pages)
        return came

    def _came(self, prefetch: Prefetch, piece: Piece, pages: int) -> None:
        """``piece`` is in the staging buffer, as far as it is good."""
        counters, whole, job = self._context.counters, len(piece.keys), piece.job
        assert job is not None
        counters["store_read_failures"] += job.fault is not None
        counters["store_read_pages"] += pages
        if job.fault is None and pages:
            self.call_seconds.add(job.seconds)
            self.call_bytes.add(pages * self._context.page_bytes)
        rest = piece
        if 0 < pages < whole:
            staging = piece.staging.split(pages)
            rest = Piece(None, piece.start + pages, piece.keys[pages:], staging, job)
            piece.keys = piece.keys[:pages]
            self._forget(prefetch, rest.keys)
            self.fetches.append(rest)
        if pages:
            self.fetches.remove(piece)
            piece.job = None
        if pages < whole:  # the store has lost the rest since it was asked
            self.cut(prefetch, rest.start)
            rest.overdue = True

    def drop(self, prefetch: Prefetch, pieces: Iterable[Piece]) -> None:
        """Give pieces back; those on their way, as soon as the store has let go of them."""
        for piece in list(pieces):
            self.hand_over(prefetch, [piece])
            prefetch.all_comes = piece.owner = None
            if piece.job is None:
                piece.staging.release()
            else:
                piece.job.cancelled = True

    def cut(self, prefetch: Prefetch, end: int) -> None:
        """Its hit ends at page ``end``."""
        pages = max(0, end - prefetch.begin)
        lost = max(0, len(prefetch.keys) - pages) * self._context.page_size
        self._context.counters["prefetch_unfulfilled_tokens"] += lost
        prefetch.hashes, prefetch.keys = prefetch.hashes[:pages], prefetch.keys[:pages]
        prefetch.unready = None
        self.drop(prefetch, [one for one in prefetch.pieces if one.stop > end])

    def hand_over(self, prefetch: Prefetch, pieces: Iterable[Piece]) -> None:
        """The staging pages of ``pieces`` are a copy's to give back."""
        for piece in pieces:
            self.changes += 1
            prefetch.pieces.remove(piece)
            self._forget(prefetch, piece.keys)

    def _forget(self, prefetch: Prefetch, keys: Iterable[str]) -> None:
        self.let_go += 1
        for key in keys:
            if self.brought.get(key) is prefetch:
                del self.brought[key]

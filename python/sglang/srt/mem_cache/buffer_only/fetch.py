"""Pages on their way from the store into the staging buffer, and those that are there for a
request.

The first fetch of a hit follows its query at once where one rank decides. The ranks of a server
agree on what the store has before they fetch it, in a step of the scheduler, and a step may take as
long as a batch. A server of one rank need not wait: the scheduler reserves staging pages with the
query, and what the query finds is fetched into them, without coming back. What the scheduler makes
of it, in its next step, is a piece like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import FETCH_SLOTS, PENDING
from sglang.srt.mem_cache.buffer_only.page_store import hashes_of
from sglang.srt.mem_cache.buffer_only.prefetch import FirstFetch, Piece, Prefetch
from sglang.srt.mem_cache.buffer_only.settings import minimal_transfer
from sglang.srt.mem_cache.buffer_only.stage import Direction, slots_of
from sglang.srt.mem_cache.buffer_only.worth import Choice, Mean

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context

#: Threads that fetch. With the other threads they stay below the most calls of the store that may
#: be under way (``SGLANG_HICACHE_STORE_MAX_CALLS``).
THREADS = 4
#: Pieces that the threads have at a time: more of them would be fetched out of turn.
MAX_FETCHES = 2 * THREADS
#: Most bytes of a piece.
PIECE_BYTES = 32 * 2**20


class Fetches:
    """The pieces of all prefetches of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._threads = context.make_thread("fetch", THREADS)
        #: Those that the store works for, oldest first: what the ranks vote on.
        self._under_way: list[Piece] = []
        #: Who brings a page, or has it in the staging buffer.
        self._brought: dict[str, Prefetch] = {}
        #: Grows whenever pages came, or went; when some went into the tree; and when somebody does
        #: not bring pages any more, or brings them later than others.
        self.changes = self.handed_over = self.let_go = 0
        #: Of calls that were answered, on this rank: seconds and bytes.
        self.call_seconds, self.call_bytes = Mean(), Mean()
        #: Staging pages that queries may have filled, by the key of the first page.
        self._reserved: dict[str, FirstFetch] = {}
        round_pages = max(1, context.stage.shares[Direction.PREFETCH].ceiling // 2)
        least = minimal_transfer(context.page_size, context.settings.prefetch_threshold)
        #: Fewer pages than this are not worth a call, unless they are all that is missing.
        self.least_pages = min(least, round_pages)
        #: Most pages of a piece: half of the staging buffer, so that one half can be copied to the
        #: device while the other one is fetched.
        self.piece_pages = max(1, min(PIECE_BYTES // max(1, context.page_bytes), round_pages))

    @property
    def under_way(self) -> tuple[Piece, ...]:
        """Pieces that the store works for, or may still write into, oldest first."""
        return tuple(self._under_way)

    @property
    def running(self) -> int:
        """The same without those that were given up."""
        return sum(not piece.overdue for piece in self._under_way)

    @property
    def capacity(self) -> int:
        """Pages that could be fetched now."""
        return self._context.stage.capacity(Direction.PREFETCH)

    @property
    def most(self) -> int:
        """Pages that could be fetched if nothing else were in the staging buffer."""
        return self._context.stage.eventual_capacity(Direction.PREFETCH)

    @property
    def has_slot(self) -> bool:
        """Whether another piece may be started; each may leave one behind."""
        reserved = len(self._reserved)
        return (
            self.running + reserved < MAX_FETCHES
            and len(self._under_way) + reserved < FETCH_SLOTS - MAX_FETCHES
        )

    @property
    def stuck(self) -> bool:
        """Whether nothing can be fetched until an overdue call returns."""
        overdue = len(self._under_way) - self.running
        return self.most < self.least_pages or overdue >= FETCH_SLOTS - MAX_FETCHES

    def comes_before(self, prefetch: Prefetch) -> Callable[[str], bool]:
        """Whether somebody earlier in line brings a page, or has it in the staging buffer: a burst
        of requests with one prefix would fetch it once for each of them."""

        def comes(key: str) -> bool:
            other = self._brought.get(key)
            return other is not None and other.place < prefetch.place

        return comes

    def start(self, prefetch: Prefetch, start: int, stop: int) -> None:
        """Fetch the pages ``start .. stop`` of a prompt, for which there is capacity."""
        context = self._context
        staging = context.stage.allocate(Direction.PREFETCH, stop - start)
        assert staging is not None, "there was capacity for it"
        keys = prefetch.keys[start - prefetch.begin : stop - prefetch.begin]
        before, slots = prefetch.keys_before(start), slots_of(staging.pages, context.page_size)
        context.checksum.note("fetch", prefetch.rid, start, stop)
        job = self._threads.submit(lambda job: context.store.read(keys, slots, before, job))
        piece = Piece(prefetch, start, keys, staging, job)
        prefetch.add(piece)
        self._under_way.append(piece)
        for key in keys:
            self._brought.setdefault(key, prefetch)
        self.changes += 1

    @property
    def reserved(self) -> list[FirstFetch]:
        """What queries that are under way may have filled."""
        return list(self._reserved.values())

    def reserve(
        self,
        prefetch: Prefetch,
        begin: int,
        last_hash: str | None,
        prefix_keys: list[str] | None,
        choose: Callable[[int], Choice],
    ) -> FirstFetch | None:
        """Staging pages for what the store may have behind the first ``begin`` pages of a prompt;
        None where they could be missed elsewhere, or somebody brings the first one already.

        Args: as for ``Queries.start`` and ``FirstFetch``.
        """
        context, page, key = self._context, self._context.page_size, prefetch.key
        ceiling = context.stage.shares[Direction.PREFETCH].ceiling
        spare = ceiling // 2 - sum(len(one.staging.pages) for one in self.reserved)
        wanted = min(len(key) // page - begin, self.piece_pages)
        pages = min(wanted, spare, self.capacity // 2)
        if pages < min(wanted, self.least_pages) or not self.has_slot:
            return None
        if len(self._reserved) == THREADS:
            return None  # the other half of the slots is for what was found
        (page_hash,) = hashes_of(key.token_ids[begin * page : (begin + 1) * page], last_hash, page)
        (first_key,) = context.store.keys([page_hash], key.extra_key, begin)
        if first_key in self._brought or first_key in self._reserved:
            return None
        staging = context.stage.allocate(Direction.PREFETCH, pages)
        assert staging is not None, "there was capacity for it"
        first = self._reserved[first_key] = FirstFetch(
            begin,
            first_key,
            staging,
            prefix_keys,
            context.store,
            self._threads,
            page,
            minimal_transfer(page, context.settings.prefetch_threshold),
            choose,
        )
        return first

    def adopt(self, first: FirstFetch, prefetch: Prefetch | None) -> None:
        """The query has ended: what was started is a piece of ``prefetch``, or nobody's, and what
        was reserved and is not used goes back."""
        del self._reserved[first.first_key]
        self.changes += 1
        pages = len(first.keys)
        if first.job is None or not pages:
            first.staging.release()
            return
        if pages < len(first.staging.pages):
            first.staging.split(pages).release()
        piece = Piece(prefetch, first.begin, first.keys, first.staging, first.job)
        self._under_way.append(piece)
        if prefetch is None:
            first.job.cancel()
            return
        prefetch.add(piece)
        for key in piece.keys:
            self._brought.setdefault(key, prefetch)

    def apply(self, outcomes: Sequence[int]) -> list[tuple[Prefetch, int | None]]:
        """Act on what the store has answered on all ranks.

        Returns:
            For each piece that has come: whose it is, and where its hit ends now, if the store did
            not have all of the piece any more.
        """
        came = []
        for piece, pages in zip(list(self._under_way), outcomes, strict=True):
            if pages == PENDING:
                if piece.overdue:
                    self._context.strand(piece.staging)
                continue
            self.changes += 1
            if piece.overdue:
                self._under_way.remove(piece)
                piece.staging.release()
            elif piece.owner is None:
                piece.overdue = True  # until it is known that nothing writes into it any more
            else:
                came.append((piece.owner, self._came(piece.owner, piece, pages)))
        return came

    def _came(self, prefetch: Prefetch, piece: Piece, pages: int) -> int | None:
        """``piece`` is in the staging buffer, as far as it is good."""
        counters, whole = self._context.counters, len(piece.keys)
        assert piece.job is not None
        counters["store_read_failures"] += piece.job.fault is not None
        counters["store_read_pages"] += pages
        if piece.job.fault is None and pages:
            self.call_seconds.add(piece.job.seconds)
            self.call_bytes.add(pages * self._context.page_bytes)
        rest = piece
        if 0 < pages < whole:
            staging = piece.staging.split(pages)
            rest = Piece(None, piece.start + pages, piece.keys[pages:], staging, piece.job)
            piece.keys = piece.keys[:pages]
            self._forget(prefetch, rest.keys)
            self._under_way.append(rest)
        if pages:
            self._under_way.remove(piece)
            piece.job = None
        if pages == whole:
            return None
        if not pages:
            self.drop(prefetch, [piece])
        rest.overdue = True
        return rest.start

    def drop(self, prefetch: Prefetch, pieces: Iterable[Piece]) -> None:
        """Give pieces back; those on their way, as soon as the store has let go of them."""
        for piece in list(pieces):
            self.changes += 1
            prefetch.pieces.remove(piece)
            prefetch.all_comes = None
            self._forget(prefetch, piece.keys)
            piece.owner = None
            if piece.job is None:
                piece.staging.release()
            else:
                piece.job.cancel()

    def hand_over(self, prefetch: Prefetch, pieces: Iterable[Piece]) -> None:
        """The staging pages of ``pieces`` are a copy's to give back."""
        self.handed_over += 1
        for piece in list(pieces):
            self.changes += 1
            prefetch.pieces.remove(piece)
            self._forget(prefetch, piece.keys)

    def close(self, until: float) -> bool:
        """End the threads; False if one runs on at ``until``, of ``time.monotonic``."""
        return self._threads.close(until)

    def _forget(self, prefetch: Prefetch, keys: Iterable[str]) -> None:
        self.let_go += 1
        for key in keys:
            if self._brought.get(key) is prefetch:
                del self._brought[key]

"""The prefetch of one request: its state, its pages in the staging buffer, its place in the queue.

States: WAITING (to be queried) and QUERYING hold nothing. FOUND: the store has pages that are not
being fetched. FETCHING: some are in flight. STAGED: all that will arrive is in the staging buffer.
MISSED: nothing will arrive. No state holds device resources: no lock, no pin, no pages. So the tree
may lose the prefix before admission; the store is then queried again.

A prompt's pages are numbered from its start. Pages in the staging buffer belong to *pieces*, each
the pages of one store call. A piece without an owner keeps its staging pages until the store has
answered on all ranks, and after an overdue call until that call has returned.

Contract: scheduler thread. Every field but ``Job`` results is equal on all ranks.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.worth import FetchChoice

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.jobs import Job
    from sglang.srt.mem_cache.buffer_only.staging import StagingPages
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


class PrefetchState(enum.Enum):
    """States of a prefetch (module docstring). From any state it may become MISSED, or STAGED with
    the pages that are there, or WAITING after the tree has lost the prefix."""

    WAITING = enum.auto()
    #: After WAITING only.
    QUERYING = enum.auto()
    #: After QUERYING, or after staged pages were released.
    FOUND = enum.auto()
    #: After FOUND, and from one store call to the next.
    FETCHING = enum.auto()
    STAGED = enum.auto()
    MISSED = enum.auto()


@dataclass(eq=False)
class Piece:
    """Pages ``start .. stop`` of a prompt, staged or being fetched."""

    #: None once the pages are not needed.
    owner: Prefetch | None
    start: int
    keys: list[str]
    staging: StagingPages
    #: None as soon as the pages are in the staging buffer on all ranks.
    job: Job | None
    #: True if answered on all ranks while an overdue call may still write to the staging pages.
    overdue: bool = False

    @property
    def stop(self) -> int:
        """Index after the last page."""
        return self.start + len(self.keys)

    @property
    def staged(self) -> bool:
        """True if the pages are in the staging buffer on all ranks."""
        return self.job is None


@dataclass(eq=False)
class Query:
    """A store query."""

    #: None once the answer is not needed.
    owner: Prefetch | None
    job: Job
    #: Index of the first page queried.
    begin: int
    #: Keys of the pages before ``begin``, if the backend takes them.
    prefix_keys: list[str] | None


@dataclass(eq=False)
class Prefetch:
    """The prefetch of one request."""

    rid: str
    #: The prompt's whole pages, at least one token short of its end.
    key: RadixKey
    #: When the state was entered, and the time spent in each state before; agreed milliseconds.
    since_ms: int = 0
    spent_ms: Counter[PrefetchState] = field(default_factory=Counter)
    state: PrefetchState = PrefetchState.WAITING
    #: Place in the queue; smaller is earlier.
    place: int = 0
    #: Index of the first page queried, and hashes and keys of the hit, which starts there.
    begin: int = 0
    hashes: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    #: Keys of the pages before ``begin``, if the backend takes them.
    prefix_keys: list[str] | None = None
    #: In prompt order.
    pieces: list[Piece] = field(default_factory=list)
    query: Query | None = None
    #: Tokens counted as its hit, so that later queries count only more.
    hit_tokens: int = 0
    #: Number of queries repeated because the tree had lost the prefix.
    requeries: int = 0
    #: Duration of the steps in which the scheduler waited for it; None while it does not wait.
    waited_ms: int | None = None
    #: True if its hit was counted as deferred.
    deferred: bool = False
    #: Decision for the hit; None before.
    choice: FetchChoice | None = None
    #: True if the store is queried only to measure its current speed.
    trial: bool = False
    #: ``Calls.withdrawals`` when every missing page was being fetched, by this prefetch or by an
    #: earlier one. While the number is the same, nothing needs to be fetched for this prefetch.
    covered_at: int | None = None
    #: State of the last check that was not ready: ``inserts`` of the tree, pages of the prompt in
    #: the tree, and their last node.
    unready: tuple[int, int, TreeNode] | None = None

    def enter(self, state: PrefetchState, now_ms: int) -> None:
        """Change to ``state``. No other code writes the state."""
        self.spent_ms[self.state] += now_ms - self.since_ms
        self.state, self.since_ms = state, now_ms

    @property
    def end(self) -> int:
        """Index after the last page of the hit."""
        return self.begin + len(self.keys)

    def staged_from(self, tree_pages: int) -> int:
        """Return the number of staged pages that follow the tree's ``tree_pages`` without a gap."""
        if tree_pages < self.begin:
            return 0  # the pages between tree and hit were evicted
        index = tree_pages
        for piece in self.pieces:
            if piece.staged and piece.start <= index < piece.stop:
                index = piece.stop
        return max(0, min(index, self.end) - tree_pages)

    def missing(
        self, tree_pages: int, max_pages: int, fetched_by: Mapping[str, Prefetch]
    ) -> tuple[int, int] | None:
        """Return the first gap to fetch as (first page, page after the last), or None.

        Args:
            tree_pages: pages of the prompt in the tree.
            max_pages: maximum length of the gap.
            fetched_by: page key -> the prefetch that fetches it. A page of an earlier request is
                not missing, or a burst of requests with one prefix would fetch it once each.
        """

        def is_coming(page: int) -> bool:
            other = fetched_by.get(self.keys[page - self.begin])
            return other is not None and other.place < self.place

        start = tree_pages
        while start < self.end:
            stops = [piece.stop for piece in self.pieces if piece.start <= start < piece.stop]
            if stops:
                start = max(stops)
            elif is_coming(start):
                start += 1
            else:
                break
        else:
            return None
        later = [piece.start for piece in self.pieces if piece.start > start]
        limit, stop = min([start + max_pages, self.end, *later]), start + 1
        while stop < limit and not is_coming(stop):
            stop += 1
        return start, stop

    def staging_of(self, start: int, stop: int) -> list[int]:
        """Return the staging pages of ``start .. stop``, which must all be staged."""
        staging_pages: list[int] = []
        for piece in self.pieces:
            index = start + len(staging_pages)
            if piece.staged and piece.start <= index < min(piece.stop, stop):
                staging_pages += piece.staging.pages[index - piece.start : stop - piece.start]
        assert len(staging_pages) == stop - start, "some pages are not in the staging buffer"
        return staging_pages


class WaitingLine:
    """Prefetches of the waiting requests, in queue order. Iterates over a snapshot.

    The order is recomputed only when the scheduler's queue has changed, so that an unchanged step
    costs nothing, however long the queue is.
    """

    def __init__(self) -> None:
        #: In queue order.
        self._by_rid: dict[str, Prefetch] = {}
        #: The scheduler's queue when the order was last computed; None after an arrival.
        self._queue: list[str] | None = None
        self._last_place = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Prefetch]:
        return iter(list(self._by_rid.values()))

    def get(self, rid: str) -> Prefetch | None:
        """Return the prefetch of a request, or None."""
        return self._by_rid.get(rid)

    def add(self, prefetch: Prefetch) -> None:
        """Append ``prefetch``; its request id must be new."""
        self._by_rid[prefetch.rid] = prefetch
        self._queue = None
        self._last_place += 1
        prefetch.place = self._last_place

    def remove(self, prefetch: Prefetch) -> None:
        """Remove ``prefetch``."""
        del self._by_rid[prefetch.rid]

    def arrange(self, queue: list[str]) -> tuple[list[Prefetch], bool]:
        """Sort by ``queue``, the ids of the waiting requests in order.

        Returns:
            The prefetches whose request is not in ``queue``, which the caller removes, and True if
            the rest has changed its order.
        """
        if queue == self._queue:
            return [], False
        self._queue = queue
        waiting = {rid: self._by_rid[rid] for rid in queue if rid in self._by_rid}
        gone = [prefetch for rid, prefetch in self._by_rid.items() if rid not in waiting]
        old_order = [rid for rid in self._by_rid if rid in waiting] if gone else list(self._by_rid)
        moved = old_order != list(waiting)
        if moved:
            self._by_rid = waiting | {prefetch.rid: prefetch for prefetch in gone}
            for prefetch in self._by_rid.values():
                self._last_place += 1
                prefetch.place = self._last_place
        return gone, moved

    def ahead(self, page_size: int) -> Iterator[tuple[Prefetch, int]]:
        """Yield each prefetch with the number of tokens that earlier requests will compute,
        evaluated when the prefetch is reached."""
        tokens = 0
        for prefetch in self:
            yield prefetch, tokens
            tokens += len(prefetch.key) - prefetch.end * page_size

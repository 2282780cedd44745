"""What one request wants of the store: its states, the pages of it that are in the staging buffer,
and its place in line.

WAITING and QUERYING hold nothing. FOUND: the store has pages that nobody fetches yet; FETCHING:
some are on their way; STAGED: all that will come is in the staging buffer; MISSED: nothing will.
None of them holds anything of the device: no lock, no pin, no pages. What the tree held at the
query may be gone by the time of admission; then the store is queried once more for what is missing.

A prompt's pages are numbered from its start. Those in the staging buffer are kept in *pieces*, each
the pages of one call of the store. A piece that nobody wants any more keeps its staging pages until
the store has answered on all ranks, and after a call that was given up until that has returned.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.worth import Choice

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.jobs import Job
    from sglang.srt.mem_cache.buffer_only.stage import StagingPages
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


class State(enum.Enum):
    """See the module's text. From any state a prefetch may become MISSED, or STAGED with what is
    there, or WAITING, where the tree has lost what came before."""

    WAITING = enum.auto()
    #: After WAITING alone.
    QUERYING = enum.auto()
    #: After QUERYING, and where staged pages were given back.
    FOUND = enum.auto()
    #: After FOUND, and from one call to the next.
    FETCHING = enum.auto()
    STAGED = enum.auto()
    MISSED = enum.auto()


@dataclass(eq=False)
class Piece:
    """Pages ``start .. stop`` of a prompt, in the staging buffer or on their way there."""

    #: None when nobody wants it any more.
    owner: Prefetch | None
    start: int
    keys: list[str]
    staging: StagingPages
    #: None as soon as the pages are in the staging buffer on all ranks.
    job: Job | None
    #: Answered on all ranks; but an overdue call may still write into the staging pages.
    overdue: bool = False

    @property
    def stop(self) -> int:
        """The page behind the last one."""
        return self.start + len(self.keys)

    @property
    def staged(self) -> bool:
        """Whether the pages are there."""
        return self.job is None


@dataclass(eq=False)
class Query:
    """A question to the store; ``owner`` is None when nobody wants the answer any more."""

    owner: Prefetch | None
    job: Job
    #: Page of the prompt from which it was asked, and keys of all before, where the backend wants
    #: them.
    begin: int
    prefix_keys: list[str] | None


@dataclass(eq=False)
class Prefetch:
    """What one request wants of the store."""

    rid: str
    #: Of the prompt, whole pages, at least one token short of the end.
    key: RadixKey
    #: When the state was entered, and how long each one lasted before; agreed milliseconds.
    since_ms: int = 0
    spent_ms: Counter[State] = field(default_factory=Counter)
    state: State = State.WAITING
    #: Place in line; smaller is earlier.
    place: int = 0
    #: The store was asked for the pages from ``begin`` on; the hit, from there to ``end``.
    begin: int = 0
    hashes: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    #: Keys of the pages before ``begin``, where the backend wants them.
    prefix_keys: list[str] | None = None
    #: In the order of the prompt.
    pieces: list[Piece] = field(default_factory=list)
    query: Query | None = None
    #: Tokens that were counted as its hit; what is found again is not counted again.
    hit_tokens: int = 0
    #: How often all was asked for anew, since the tree had lost what came before.
    anews: int = 0
    #: Time of the steps in which the scheduler waited for it; None if it does not wait for it.
    waited_ms: int | None = None
    deferred: bool = False
    #: Whether the hit is fetched, and why; None before that was decided.
    choice: Choice | None = None
    #: Whether the store was asked only to see how fast it is by now.
    trial: bool = False
    #: ``Calls.let_go`` when all that is missing was on its way, by its own pieces or with those of
    #: others: so it is until somebody lets go of pages.
    all_comes: int | None = None
    #: Of when it was last not ready: ``inserts`` of the tree, and how far the tree reached for it,
    #: pages and the node in which they end.
    unready: tuple[int, int, TreeNode] | None = None

    def enter(self, state: State, now_ms: int) -> None:
        """It is in ``state`` from now on. Nothing else writes the state."""
        self.spent_ms[self.state] += now_ms - self.since_ms
        self.state, self.since_ms = state, now_ms

    @property
    def end(self) -> int:
        """The page behind the last one of the hit."""
        return self.begin + len(self.keys)

    def staged_from(self, held: int) -> int:
        """Pages in the staging buffer without a gap, behind the ``held`` pages that the tree
        has."""
        if held < self.begin:
            return 0  # what connects them to the tree was evicted
        at = held
        for piece in self.pieces:
            if piece.staged and piece.start <= at < piece.stop:
                at = piece.stop
        return max(0, min(at, self.end) - held)

    def missing(
        self, held: int, most: int, brought: Mapping[str, Prefetch]
    ) -> tuple[int, int] | None:
        """The first pages that somebody has to fetch: from where, and behind where; at most
        ``most``. None if there are none.

        Args:
            held: pages that the tree has.
            brought: who brings the page of a key. What somebody earlier in line does is not
                missing: a burst of requests with one prefix would fetch it once for each of them.
        """

        def comes(page: int) -> bool:
            other = brought.get(self.keys[page - self.begin])
            return other is not None and other.place < self.place

        at = held
        while at < self.end:
            mine = [piece.stop for piece in self.pieces if piece.start <= at < piece.stop]
            if mine:
                at = max(mine)
            elif comes(at):
                at += 1
            else:
                break
        else:
            return None
        ahead = [piece.start for piece in self.pieces if piece.start > at]
        limit, stop = min([at + most, self.end, *ahead]), at + 1
        while stop < limit and not comes(stop):
            stop += 1
        return at, stop

    def staging_of(self, start: int, stop: int) -> list[int]:
        """Staging pages of the pages ``start .. stop``, which are all staged."""
        found: list[int] = []
        for piece in self.pieces:
            at = start + len(found)
            if piece.staged and piece.start <= at < min(piece.stop, stop):
                found += piece.staging.pages[at - piece.start : stop - piece.start]
        assert len(found) == stop - start, "pages that are not in the stage"
        return found


class WaitingLine:
    """The prefetches of the requests that wait, in the order of the queue. Iterates over a
    snapshot, first in line first.

    A step with nothing new costs nothing here, however many wait: the order is looked at when the
    scheduler's queue is another one.
    """

    def __init__(self) -> None:
        #: First in line first.
        self._by_rid: dict[str, Prefetch] = {}
        #: The scheduler's queue when the order was last looked at; None after an arrival.
        self._queue: list[str] | None = None
        self._last_place = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Prefetch]:
        return iter(list(self._by_rid.values()))

    def get(self, rid: str) -> Prefetch | None:
        """The prefetch of a request, if it has one."""
        return self._by_rid.get(rid)

    def add(self, prefetch: Prefetch) -> None:
        """At the end of the line; nobody else in it has its request id."""
        self._by_rid[prefetch.rid] = prefetch
        self._queue = None
        self._last_place += 1
        prefetch.place = self._last_place

    def remove(self, prefetch: Prefetch) -> None:
        """It is in line no more."""
        del self._by_rid[prefetch.rid]

    def arrange(self, queue: list[str]) -> tuple[list[Prefetch], bool]:
        """``queue`` has the request ids that wait, first in line first.

        Returns:
            Whose request is not among them, to be removed; and whether the others have changed
            places.
        """
        if queue == self._queue:
            return [], False
        self._queue = queue
        here = {rid: self._by_rid[rid] for rid in queue if rid in self._by_rid}
        gone = [one for rid, one in self._by_rid.items() if rid not in here]
        before = [rid for rid in self._by_rid if rid in here] if gone else list(self._by_rid)
        moved = before != list(here)
        if moved:
            self._by_rid = here | {one.rid: one for one in gone}
            for prefetch in self._by_rid.values():
                self._last_place += 1
                prefetch.place = self._last_place
        return gone, moved

    def ahead(self, page_size: int) -> Iterator[tuple[Prefetch, int]]:
        """Each of the line, with the tokens that those before it will compute; first in line
        first, as things stand when it is its turn."""
        tokens = 0
        for prefetch in self:
            yield prefetch, tokens
            tokens += len(prefetch.key) - prefetch.end * page_size

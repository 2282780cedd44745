"""What one request wants of the store, and the pages of it that are in the staging buffer.

WAITING -> QUERYING -> FOUND <-> FETCHING -> STAGED, or MISSED.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import PENDING
from sglang.srt.mem_cache.buffer_only.stage import slots_of
from sglang.srt.mem_cache.buffer_only.worth import Choice

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.page_store import IOThreads, Job, PageStore
    from sglang.srt.mem_cache.buffer_only.stage import StagingPages
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


class State(enum.Enum):
    """See the module's text."""

    WAITING = enum.auto()
    QUERYING = enum.auto()
    FOUND = enum.auto()
    FETCHING = enum.auto()
    STAGED = enum.auto()
    MISSED = enum.auto()


@dataclass(eq=False)
class FirstFetch:
    """Staging pages reserved for what a query may find. ``keys``, ``job`` and ``choice`` are set on
    the query's thread, and read by the scheduler when the query has ended."""

    #: Page of the prompt from which the store is asked, and its key.
    begin: int
    first_key: str
    staging: StagingPages
    #: Keys of all pages before ``begin``, where the backend wants them.
    prefix_keys: list[str] | None
    store: PageStore
    threads: IOThreads
    page_size: int
    #: Pages of the smallest hit that is fetched.
    least: int
    #: Whether a hit of so many pages is fetched, by what is known when the query starts.
    choose: Callable[[int], Choice]
    keys: list[str] = field(default_factory=list)
    job: Job | None = None
    choice: Choice | None = None

    def follow(self, query: Job) -> None:
        """``query`` has found what it has found."""
        found = query.found.keys if query.found is not None else []
        if query.cancelled or len(found) < self.least:
            return
        choice = self.choose(len(found))
        if choice is Choice.SLOWER or choice is Choice.TRIAL:
            return  # the scheduler counts those
        self.choice = choice
        keys = self.keys = found[: len(self.staging.pages)]
        slots = slots_of(self.staging.pages[: len(keys)], self.page_size)
        self.job = self.threads.submit(
            lambda job: self.store.read(keys, slots, self.prefix_keys, job)
        )


@dataclass(eq=False)
class Query:
    """A question to the store; ``owner`` is None when nobody wants the answer any more."""

    owner: Prefetch | None
    job: Job
    #: Page of the prompt from which it was asked, and keys of all before, where the backend wants
    #: them.
    begin: int
    prefix_keys: list[str] | None
    #: Whether it is about what comes behind a hit.
    tail: bool = False
    #: The fetch that follows, if one does.
    first: FirstFetch | None = None

    @property
    def outcome(self) -> int:
        """Pages found on this rank, or ``PENDING``."""
        return PENDING if self.job.pages is None else self.job.pages


@dataclass(eq=False)
class Piece:
    """Pages ``start .. stop`` of a prompt, in the staging buffer or on their way there."""

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

    @property
    def outcome(self) -> int:
        """Leading good pages on this rank, or ``PENDING``; of an overdue one, any number."""
        assert self.job is not None
        if self.overdue:
            return 0 if self.job.drained else PENDING
        return PENDING if self.job.pages is None else self.job.pages


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
    pieces: list[Piece] = field(default_factory=list)
    query: Query | None = None
    #: How often it was asked again whether the store has more by now, and when it may be for the
    #: next time; agreed milliseconds.
    repeats: int = 0
    again_ms: int | None = None
    #: How often all was asked for anew, since the tree had lost what came before.
    anews: int = 0
    #: When the scheduler first waited for it, until it need not.
    asked_ms: int | None = None
    #: Whether its time was over while the device had no room for it.
    keeps_place: bool = False
    deferred: bool = False
    #: Whether the hit is fetched, and why; None before that was decided.
    choice: Choice | None = None
    #: Whether the store was asked only to see how fast it is by now.
    trial: bool = False
    #: Set while all that is missing is on its way: by its own pieces, or with those of others, and
    #: then until somebody lets go of pages (``Fetches.let_go`` is another number).
    all_comes: int | None = None
    #: What was known when it was last not ready, and how far the tree reached for it: pages, and
    #: the node in which they end.
    unready: object = None
    reached: tuple[int, TreeNode] | None = None
    #: Tokens that came into the tree for it.
    loaded: int = 0

    def enter(self, state: State, now_ms: int) -> None:
        """It is in ``state`` from now on."""
        self.spent_ms[self.state] += now_ms - self.since_ms
        self.state, self.since_ms = state, now_ms

    @property
    def end(self) -> int:
        """The page behind the last one of the hit."""
        return self.begin + len(self.keys)

    @property
    def fetching(self) -> bool:
        """Whether pages are on their way."""
        return any(not piece.staged for piece in self.pieces)

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

    def missing(self, held: int, most: int, comes: Callable[[str], bool]) -> tuple[int, int] | None:
        """The first pages that somebody has to fetch: from where, and behind where; at most
        ``most``. None if there are none.

        Args:
            held: pages that the tree has.
            comes: whether another request brings the page of a key.
        """
        at = held
        while at < self.end:
            mine = [piece.stop for piece in self.pieces if piece.start <= at < piece.stop]
            if mine:
                at = max(mine)
            elif comes(self.keys[at - self.begin]):
                at += 1
            else:
                break
        else:
            return None
        ahead = [piece.start for piece in self.pieces if piece.start > at]
        limit, stop = min([at + most, self.end, *ahead]), at + 1
        while stop < limit and not comes(self.keys[stop - self.begin]):
            stop += 1
        return at, stop

    def add(self, piece: Piece) -> None:
        """Another piece, in the order of the prompt."""
        self.pieces.append(piece)
        self.pieces.sort(key=lambda one: one.start)

    def staging_of(self, start: int, stop: int) -> list[int]:
        """Staging pages of the pages ``start .. stop``, which are all staged."""
        found: list[int] = []
        for piece in self.pieces:
            at = start + len(found)
            if piece.staged and piece.start <= at < min(piece.stop, stop):
                found += piece.staging.pages[at - piece.start : stop - piece.start]
        assert len(found) == stop - start, "pages that are not in the stage"
        return found

    def keys_before(self, page: int) -> list[str] | None:
        """Keys of all pages before ``page``, where the backend wants them."""
        if self.prefix_keys is None:
            return None
        return [*self.prefix_keys, *self.keys[: page - self.begin]]

"""Prefetch: store to stage to device tree, ahead of the request's admission.

WAITING -> QUERYING -> FOUND -> FETCHING -> STAGED -> DONE, and from STAGED back to FOUND while
there is more to come than fits into the stage at once.

WAITING holds nothing. From QUERYING on, the prefix that the tree holds (the anchor) is pinned, and
each published part moves the pin to its own end. FETCHING and STAGED hold staging pages, for what
the store was found to have and not for what the request asked for. DONE keeps the pin until the
scheduler admits the request, or for a while.

A prefetch that is abandoned while the store works for it is DRAINING: without pin and request, it
keeps its staging pages until the store has answered on all ranks. OVERDUE waits for calls of the
store that were given up, which may still write into the pages.

Only the scheduler thread changes the states, in ``apply`` and ``launch``, from what the ranks
agreed on, so that they are the same on all ranks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import PENDING, PREFETCH_SLOTS, TransferVote
from sglang.srt.mem_cache.buffer_only.load_back import LoadBacks, Pin, pinned_tokens
from sglang.srt.mem_cache.buffer_only.page_store import Found, Job, page_hashes, search
from sglang.srt.mem_cache.buffer_only.settings import minimal_transfer
from sglang.srt.mem_cache.buffer_only.stage import Direction, StagingPages, slots_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.pipelines import Context
    from sglang.srt.mem_cache.buffer_only.upstream import Key, Node

#: Prefetches that may have begun; each may leave another one behind.
MAX_RUNNING = PREFETCH_SLOTS // 2


class State(enum.Enum):
    """See the module's text."""

    WAITING = enum.auto()
    QUERYING = enum.auto()
    FOUND = enum.auto()
    FETCHING = enum.auto()
    STAGED = enum.auto()
    DONE = enum.auto()
    DRAINING = enum.auto()
    OVERDUE = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class Prefetch:
    """What one request wants of the store."""

    rid: str
    #: Of the prompt, whole pages, at least one token short of the end.
    key: Key
    state: State = State.WAITING
    pin: Pin | None = None
    #: Tokens of the prompt that the tree holds, up to the pin.
    begin: int = 0
    #: Page hashes and store keys of what is still to be fetched, from ``begin`` on.
    hashes: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    prefix_keys: list[str] | None = None
    job: Job | None = None
    staging: StagingPages | None = None
    #: Pages that are in the stage (STAGED).
    staged: int = 0
    #: Tokens published so far.
    loaded: int = 0
    #: When the state was entered, and when the scheduler first waited for it; agreed milliseconds.
    since_ms: int = 0
    asked_ms: int | None = None
    #: Whether room for all of ``keys`` was reserved among the pinned tokens.
    admitted: bool = False
    deferred: bool = False
    blocked_at: int = -1

    @property
    def outcome(self) -> int:
        """What the store's job of this prefetch has answered on this rank."""
        if self.job is None:
            return 0
        if self.state is State.OVERDUE:
            return 0 if self.job.drained else PENDING
        if self.state in (State.QUERYING, State.FETCHING, State.DRAINING):
            return PENDING if self.job.pages is None else self.job.pages
        return 0


class Prefetches:
    """All prefetches of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._query_thread = context.make_thread("query")
        self._fetch_thread = context.make_thread("fetch")
        #: What requests want; those that are not WAITING are also in ``_running``.
        self._by_rid: dict[str, Prefetch] = {}
        self._running: list[Prefetch] = []
        self.load_backs = LoadBacks(context)
        #: Grows whenever room for others may have been made.
        self._changes = 0
        # Half of the ceiling a round: one part is copied to the device while another one is
        # fetched.
        ceiling = context.stage.shares[Direction.PREFETCH].ceiling
        self._round_pages = max(1, ceiling // 2)
        least = minimal_transfer(context.page_size, context.settings.prefetch_threshold)
        self._least_pages = min(least, self._round_pages)

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way; what the store was given up for does not
        count."""
        overdue = sum(prefetch.state is State.OVERDUE for prefetch in self._running)
        return bool(self._by_rid or len(self.load_backs) or len(self._running) > overdue)

    @property
    def running(self) -> tuple[Prefetch, ...]:
        """Prefetches that have begun, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> list[Prefetch]:
        """Prefetches that have not begun, oldest first."""
        return [one for one in self._by_rid.values() if one.state is State.WAITING]

    def request(self, rid: str, key: Key) -> None:
        """Fetch what the store has of ``key`` beyond what the tree holds."""
        self.cancel(rid)
        if len(key) >= self._context.settings.prefetch_threshold:
            self._by_rid[rid] = Prefetch(rid, key)

    def ready(self, rid: str) -> bool:
        """Whether the request can be scheduled; asked in each step that could admit it.

        True ends the prefetch: the request is about to match, and lock, what was published.
        """
        prefetch = self._by_rid.get(rid)
        if prefetch is None:
            return True
        if prefetch.state is State.DONE or self._context.settings.policy == "best_effort":
            self._abandon(prefetch)
            return True
        if prefetch.asked_ms is None:
            prefetch.asked_ms = self._context.now_ms
        return False

    def cancel(self, rid: str) -> None:
        """The request is gone, or asks again."""
        prefetch = self._by_rid.get(rid)
        if prefetch is not None:
            self._abandon(prefetch)

    def vote(self) -> tuple[int, tuple[int, ...]]:
        """Copies that have ended, and what is known of each prefetch, on this rank."""
        return self.load_backs.ended(), tuple(prefetch.outcome for prefetch in self._running)

    def apply(self, agreed: TransferVote) -> None:
        """Act on what has ended on all ranks, and on time that has run out."""
        self.load_backs.finish(agreed.load_back_copies)
        for prefetch, pages in zip(list(self._running), agreed.prefetches, strict=True):
            if pages == PENDING:
                if prefetch.state is State.OVERDUE and prefetch.staging is not None:
                    self._context.strand(prefetch.staging)
            elif prefetch.state is State.QUERYING:
                self._found(prefetch, pages)
            elif prefetch.state is State.FETCHING:
                self._fetched(prefetch, pages)
            elif prefetch.state is State.DRAINING:
                self._drained(prefetch)
            elif prefetch.state is State.OVERDUE:
                self._end(prefetch)
        for prefetch in list(self._by_rid.values()):
            if self._out_of_time(prefetch):
                self._context.counters["prefetch_timeouts"] += prefetch.state is not State.DONE
                self._unfulfilled(len(prefetch.keys))
                self._abandon(prefetch)
        self._publish()

    def launch(self) -> None:
        """Start what stage, slots and pins have room for, in order of arrival."""
        if self._stuck():
            self._give_up_for_the_stage()
        for prefetch in self.waiting:
            if len(self._running) >= MAX_RUNNING or not self._query(prefetch):
                break
        for prefetch in [one for one in self._running if one.state is State.FOUND]:
            if not self._fetch(prefetch):
                break

    def reset(self) -> None:
        """The tree is about to be emptied: end everything, but keep what the store still fills."""
        self.cancel_all()
        self.load_backs.finish(len(self.load_backs))

    def cancel_all(self) -> None:
        """The store was cleared: what it was found to have would enter the tree as stored."""
        for prefetch in list(self._by_rid.values()):
            self._abandon(prefetch)

    def close(self, timeout: float) -> bool:
        """End the threads; False if one takes more than ``timeout`` seconds."""
        return self._query_thread.close(timeout) and self._fetch_thread.close(timeout)

    # ---- from state to state ----

    def _query(self, prefetch: Prefetch) -> bool:
        """WAITING -> QUERYING; False where it has to wait for pins of others."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        context, settings = self._context, self._context.settings
        if prefetch.blocked_at == self._changes:
            return False  # nothing has changed since it was last in the way
        match = context.tree.match_prefix(MatchPrefixParams(key=prefetch.key))
        begin = len(match.device_indices)
        if len(prefetch.key) - begin < settings.prefetch_threshold:
            self._abandon(prefetch)  # the tree has it by now
            return True
        anchor = match.last_device_node
        if self._pinned_with(anchor) > settings.pinned_tokens:
            if any(other.pin for other in self._running):
                prefetch.blocked_at = self._changes
                return False
            self._unfulfilled((len(prefetch.key) - begin) // context.page_size)
            self._abandon(prefetch)
            return True
        prefetch.pin, prefetch.begin = Pin(context.tree, anchor), begin
        prefetch.prefix_keys = context.prefix_keys(anchor)
        last_hash = page_hashes(anchor, context.page_size)[-1] if begin else None
        context.checksum.note("query", prefetch.rid, begin)
        self._running.append(prefetch)
        self._enter(prefetch, State.QUERYING)
        work = search(
            context.store,
            prefetch.key.token_ids[begin:],
            context.page_size,
            last_hash,
            prefetch.key.extra_key,
            prefetch.prefix_keys,
        )
        prefetch.job = self._query_thread.submit(work)
        return True

    def _found(self, prefetch: Prefetch, pages: int) -> None:
        """QUERYING -> FOUND, if the hit is worth it."""
        assert prefetch.job is not None
        found = prefetch.job.found or Found()
        self._context.counters["store_query_failures"] += prefetch.job.fault is not None
        tokens = pages * self._context.page_size
        if tokens < self._context.settings.prefetch_threshold:
            self._abandon(prefetch, answered=True)
            return
        self._context.counters["prefetch_hit_tokens"] += tokens
        prefetch.hashes, prefetch.keys = found.hashes[:pages], found.keys[:pages]
        self._enter(prefetch, State.FOUND)

    def _fetch(self, prefetch: Prefetch) -> bool:
        """FOUND -> FETCHING; False where it has to wait for room."""
        context = self._context
        if self._on_its_way(prefetch.keys[0]):
            return True  # another request's prefetch brings it; this one goes on from there
        if not (self._least_fits(prefetch) and self._let_in(prefetch)):
            return self._defer(prefetch)
        if prefetch.state is not State.FOUND:
            return True  # nothing is left to fetch, or it would never fit
        capacity = context.stage.capacity(Direction.PREFETCH)
        pages = min(len(prefetch.keys), self._round_pages, capacity)
        staging = prefetch.staging = context.stage.allocate(Direction.PREFETCH, pages)
        assert staging is not None, "there was capacity for it"
        keys, prefix_keys = prefetch.keys[:pages], prefetch.prefix_keys
        slots = slots_of(staging.pages, context.page_size)
        context.checksum.note("fetch", prefetch.rid, pages)
        self._enter(prefetch, State.FETCHING)
        prefetch.job = self._fetch_thread.submit(
            lambda job: context.store.read(keys, slots, prefix_keys, job)
        )
        return True

    def _on_its_way(self, key: str) -> bool:
        """Whether another prefetch is just bringing the page ``key``.

        A burst of requests with one prefix would otherwise fetch it once for each of them.
        """
        under_way = (State.FETCHING, State.STAGED)
        return any(
            key in one.keys[: len(one.staging.pages)]
            for one in self._running
            if one.state in under_way and one.staging is not None
        )

    def _least_fits(self, prefetch: Prefetch) -> bool:
        if prefetch.blocked_at == self._changes:
            return False
        capacity = self._context.stage.capacity(Direction.PREFETCH)
        return capacity >= min(len(prefetch.keys), self._least_pages)

    def _let_in(self, prefetch: Prefetch) -> bool:
        """Leave out what the tree has got since the query, and, the first time, set aside what the
        rest of the hit will pin, so that none stops half-way for another one. False: later."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        assert prefetch.pin is not None
        page = self._context.page_size
        end = prefetch.begin + len(prefetch.keys) * page
        match = self._context.tree.match_prefix(MatchPrefixParams(key=prefetch.key[:end]))
        came = (len(match.device_indices) - prefetch.begin) // page
        if not prefetch.admitted:
            pinned = self._pinned_with(match.last_device_node)
            spare = (self._context.settings.pinned_tokens - pinned) // page
            if len(prefetch.keys) - came > spare:
                if any(other.pin for other in self._running if other is not prefetch):
                    prefetch.blocked_at = self._changes
                    return False
                # Nobody's end would make room for more.
                self._cut(prefetch, came + spare if spare > 0 else 0)
                if not prefetch.keys:
                    self._abandon(prefetch)
                    return True
            prefetch.admitted = True
        if came:
            prefetch.pin.move(match.last_device_node)
            self._advance(prefetch, came)
        if not prefetch.keys:
            self._enter(prefetch, State.DONE)
        return True

    def _defer(self, prefetch: Prefetch) -> bool:
        """FOUND it stays; nobody behind it gets ahead of it."""
        if not prefetch.deferred:
            prefetch.deferred = True
            tokens = len(prefetch.keys) * self._context.page_size
            self._context.counters["prefetch_deferred_tokens"] += tokens
        return False

    def _fetched(self, prefetch: Prefetch, pages: int) -> None:
        """FETCHING -> STAGED, with the pages that are good on all ranks."""
        assert prefetch.job is not None and prefetch.staging is not None
        self._context.counters["store_read_failures"] += prefetch.job.fault is not None
        self._context.counters["store_read_pages"] += pages
        if pages < len(prefetch.staging.pages):
            self._cut(prefetch, pages)  # the store has lost the rest since it was asked
            if not pages:
                self._abandon(prefetch, answered=True)
                return
            self._leave_behind(prefetch, prefetch.staging.split(pages))
        prefetch.staged = pages
        self._enter(prefetch, State.STAGED)

    def _publish(self) -> None:
        """STAGED -> FOUND or DONE, for all that are staged."""
        staged = [one for one in self._running if one.state is State.STAGED]
        for prefetch, published in self.load_backs.publish(staged):
            if published is None:
                self._unfulfilled(len(prefetch.keys))
                self._abandon(prefetch)
                continue
            new = prefetch.staged * self._context.page_size - published.covered
            prefetch.loaded += new
            self._context.counters["prefetch_loaded_tokens"] += new
            self._advance(prefetch, prefetch.staged)
            self._enter(prefetch, State.FOUND if prefetch.keys else State.DONE)

    # ---- ways out ----

    def _abandon(self, prefetch: Prefetch, answered: bool = False) -> None:
        """The request does not need it any more, or has waited long enough. In any state.

        ``answered``: the store's job has ended on all ranks. That it has on this one is not enough,
        since all ranks have to give the staging pages back in the same step.
        """
        if self._by_rid.get(prefetch.rid) is prefetch:
            del self._by_rid[prefetch.rid]
            if prefetch.loaded:
                loaded = self._context.tree.prefetch_loaded_tokens_by_reqid
                loaded[prefetch.rid] = prefetch.loaded
        if prefetch.pin is not None:
            prefetch.pin.release()
            prefetch.pin = None
        self._changes += 1
        if prefetch.state not in (State.QUERYING, State.FETCHING):
            self._end(prefetch)
        elif answered:
            self._drained(prefetch)
        else:
            assert prefetch.job is not None
            prefetch.job.cancel()
            prefetch.state = State.DRAINING

    def _leave_behind(self, prefetch: Prefetch, staging: StagingPages) -> None:
        """``staging`` was not filled, and an overdue call may still be at work in it."""
        rid, key, job = prefetch.rid, prefetch.key, prefetch.job
        self._running.append(Prefetch(rid, key, State.OVERDUE, job=job, staging=staging))

    def _drained(self, prefetch: Prefetch) -> None:
        """The store has answered, on all ranks; an overdue call may still be at work."""
        prefetch.state = State.OVERDUE
        if prefetch.staging is None:
            self._end(prefetch)

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.state = State.ENDED
        if prefetch.staging is not None:
            prefetch.staging.release()
        if prefetch in self._running:
            self._running.remove(prefetch)

    def _out_of_time(self, prefetch: Prefetch) -> bool:
        now, settings = self._context.now_ms, self._context.settings
        if prefetch.state is State.DONE:
            return now - prefetch.since_ms > settings.hold_ms
        waited = 0 if prefetch.asked_ms is None else now - prefetch.asked_ms
        return waited > settings.timeout_ms(len(prefetch.key) // settings.page_size)

    def _stuck(self) -> bool:
        """Whether nothing can be fetched until an overdue call returns."""
        capacity = self._context.stage.eventual_capacity(Direction.PREFETCH)
        stranded = sum(one.staging.stranded for one in self._running if one.staging is not None)
        return capacity < self._least_pages or stranded >= MAX_RUNNING

    def _give_up_for_the_stage(self) -> None:
        """Who waits to be fetched computes, rather than wait for a store that may never answer."""
        for prefetch in list(self._by_rid.values()):
            if prefetch.state in (State.WAITING, State.FOUND):
                self._unfulfilled(len(prefetch.keys))
                self._abandon(prefetch)

    # ---- small things ----

    def _enter(self, prefetch: Prefetch, state: State) -> None:
        prefetch.state, prefetch.since_ms = state, self._context.now_ms
        self._changes += 1

    def _advance(self, prefetch: Prefetch, pages: int) -> None:
        """The next ``pages`` pages of the hit are in the tree."""
        if prefetch.prefix_keys is not None:
            prefetch.prefix_keys = [*prefetch.prefix_keys, *prefetch.keys[:pages]]
        prefetch.begin += pages * self._context.page_size
        prefetch.hashes, prefetch.keys = prefetch.hashes[pages:], prefetch.keys[pages:]

    def _cut(self, prefetch: Prefetch, pages: int) -> None:
        """Only ``pages`` pages of the hit will come."""
        self._unfulfilled(len(prefetch.keys) - pages)
        prefetch.hashes, prefetch.keys = prefetch.hashes[:pages], prefetch.keys[:pages]

    def _pinned_with(self, node: Node | None) -> int:
        return pinned_tokens(self._running, node, self._context.page_size)

    def _unfulfilled(self, pages: int) -> None:
        tokens = pages * self._context.page_size
        self._context.counters["prefetch_unfulfilled_tokens"] += tokens

"""Prefetch: store to stage to device tree, ahead of the request's admission.

WAITING -> QUERYING -> PARKED -> FETCHING -> STAGED -> DONE, and from STAGED back to PARKED while
there is more to come than fits into the stage at once.

WAITING holds nothing. From QUERYING on, the prefix that the tree holds (the anchor) is pinned, and
each published part moves the pin to its own end. FETCHING and STAGED hold staging pages, for what
the store was found to have and not for what the request asked for. DONE keeps the pin until the
scheduler admits the request, or for a while.

A read that is abandoned while the store works for it is DRAINING: without pin and request, it keeps
its staging pages until the store has answered on all ranks. LINGERING waits for calls of the store
that were given up, which may still write into the pages.

Only the scheduler thread changes the states, in ``apply`` and ``pump``, from what the ranks agreed
on, so that they are the same on all ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.buffer_only.agreement import PENDING, READ_SLOTS, Facts
from sglang.srt.mem_cache.buffer_only.load_back import Loads, Pin, Published
from sglang.srt.mem_cache.buffer_only.page_store import Found, Job, page_hashes, search
from sglang.srt.mem_cache.buffer_only.settings import minimal_transfer
from sglang.srt.mem_cache.buffer_only.stage import Direction, Lease, slots_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.pipelines import Parts


class State(enum.Enum):
    """See the module's text."""

    WAITING = enum.auto()
    QUERYING = enum.auto()
    PARKED = enum.auto()
    FETCHING = enum.auto()
    STAGED = enum.auto()
    DONE = enum.auto()
    DRAINING = enum.auto()
    LINGERING = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class Read:
    """One request's prefetch."""

    rid: str
    #: ``RadixKey`` of the prompt, whole pages, at least one token short of the end.
    key: Any
    state: State = State.WAITING
    pin: Pin | None = None
    #: Tokens of the prompt that the tree holds, up to the pin.
    begin: int = 0
    #: Page hashes and store keys of what is still to be fetched, from ``begin`` on.
    hashes: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    prefix_keys: list[str] | None = None
    job: Job | None = None
    lease: Lease | None = None
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


def pinned_tokens(reads: Iterable[Read], node: Any, page_size: int) -> int:
    """Tokens that ``reads`` keep from eviction, or will when all that was let in has come, together
    with those up to ``node``; what several share counts once."""
    pinned = [read for read in reads if read.pin is not None]
    seen: set[Any] = set()
    for last in [*(read.pin.node for read in pinned if read.pin), node]:
        while last is not None and last.parent is not None and last not in seen:
            seen.add(last)
            last = last.parent
    coming = sum(len(read.keys) for read in pinned if read.admitted)
    return sum(len(one.key) for one in seen) + coming * page_size


#: Reads that may have begun; each may leave another one behind.
MOST_LIVE = READ_SLOTS // 2


class Reads:
    """All reads of one rank."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._query_lane = parts.make_lane("query")
        self._fetch_lane = parts.make_lane("fetch")
        #: What requests want; those that are not WAITING are also in ``_live``.
        self._by_rid: dict[str, Read] = {}
        self._live: list[Read] = []
        self.loads = Loads(parts)
        #: Grows whenever room for others may have been made.
        self._changes = 0
        # Half of the ceiling a round: one part is copied to the device while another one is
        # fetched.
        ceiling = parts.stage.shares[Direction.READ].ceiling
        self._round_pages = max(1, ceiling // 2)
        least = minimal_transfer(parts.page_size, parts.settings.prefetch_threshold)
        self._least_pages = min(least, self._round_pages)

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way; what the store was given up for does not
        count."""
        lingering = sum(read.state is State.LINGERING for read in self._live)
        return bool(self._by_rid or len(self.loads) or len(self._live) > lingering)

    @property
    def live(self) -> tuple[Read, ...]:
        """Reads that have begun, oldest first."""
        return tuple(self._live)

    @property
    def waiting(self) -> list[Read]:
        """Reads that have not begun, oldest first."""
        return [read for read in self._by_rid.values() if read.state is State.WAITING]

    def want(self, rid: str, key: Any) -> None:
        """Fetch what the store has of ``key`` beyond what the tree holds."""
        self.forget(rid)
        if len(key) >= self._parts.settings.prefetch_threshold:
            self._by_rid[rid] = Read(rid, key)

    def ready(self, rid: str) -> bool:
        """Whether the request can be scheduled; asked in each step that could admit it.

        True ends the prefetch: the request is about to match, and lock, what was published.
        """
        read = self._by_rid.get(rid)
        if read is None:
            return True
        if read.state is State.DONE or self._parts.settings.policy == "best_effort":
            self._abandon(read)
            return True
        if read.asked_ms is None:
            read.asked_ms = self._parts.now_ms
        return False

    def forget(self, rid: str) -> None:
        """The request is gone, or asks again."""
        read = self._by_rid.get(rid)
        if read is not None:
            self._abandon(read)

    def facts(self) -> tuple[int, tuple[int, ...]]:
        """Copies that have ended, and what is known of each read, on this rank."""
        return self.loads.ended(), tuple(map(_outcome, self._live))

    def apply(self, agreed: Facts) -> None:
        """Act on what has ended on all ranks, and on time that has run out."""
        self.loads.finish(agreed.loaded)
        for read, pages in zip(list(self._live), agreed.reads, strict=True):
            if pages == PENDING:
                if read.state is State.LINGERING and read.lease is not None:
                    self._parts.strand(read.lease)
            elif read.state is State.QUERYING:
                self._found(read, pages)
            elif read.state is State.FETCHING:
                self._fetched(read, pages)
            elif read.state is State.DRAINING:
                self._linger(read)
            elif read.state is State.LINGERING:
                self._end(read)
        for read in list(self._by_rid.values()):
            if self._out_of_time(read):
                self._parts.tally["prefetch_timeouts"] += read.state is not State.DONE
                self._unfulfilled(len(read.keys) * self._parts.page_size)
                self._abandon(read)
        self._publish()

    def pump(self) -> None:
        """Start what stage, slots and pins have room for, in order of arrival."""
        if self._stuck():
            self._give_up_for_the_stage()
        for read in self.waiting:
            if len(self._live) >= MOST_LIVE or not self._query(read):
                break
        for read in [read for read in self._live if read.state is State.PARKED]:
            if not self._fetch(read):
                break

    def reset(self) -> None:
        """The tree is about to be emptied: end everything, but keep what the store still fills."""
        self.forget_found()
        self.loads.finish(len(self.loads))

    def forget_found(self) -> None:
        """The store was cleared: what it was found to have would enter the tree as stored."""
        for read in list(self._by_rid.values()):
            self._abandon(read)

    def close(self, timeout: float) -> bool:
        """End the lanes' threads."""
        return self._query_lane.close(timeout) and self._fetch_lane.close(timeout)

    # Steps of a read.

    def _query(self, read: Read) -> bool:
        """WAITING -> QUERYING; False where the read has to wait for pins of others."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        parts, settings = self._parts, self._parts.settings
        if read.blocked_at == self._changes:
            return False  # nothing has changed since it was last in the way
        match = parts.tree.match_prefix(MatchPrefixParams(key=read.key))
        begin = len(match.device_indices)
        if len(read.key) - begin < settings.prefetch_threshold:
            self._abandon(read)  # the tree has it by now
            return True
        anchor = match.last_device_node
        if self._pinned_with(anchor) > settings.pinned_tokens:
            if any(other.pin for other in self._live):
                read.blocked_at = self._changes
                return False
            self._unfulfilled(len(read.key) - begin)
            self._abandon(read)
            return True
        read.pin, read.begin = Pin(parts.tree, anchor), begin
        read.prefix_keys = parts.prefix_keys(anchor)
        last_hash = page_hashes(anchor, parts.page_size)[-1] if begin else None
        parts.ledger.note("query", read.rid, begin)
        self._live.append(read)
        self._enter(read, State.QUERYING)
        work = search(
            parts.store,
            read.key.token_ids[begin:],
            parts.page_size,
            last_hash,
            read.key.extra_key,
            read.prefix_keys,
        )
        read.job = self._query_lane.submit(work)
        return True

    def _found(self, read: Read, pages: int) -> None:
        """QUERYING -> PARKED, if the hit is worth it."""
        assert read.job is not None
        found = read.job.found or Found()
        self._failure(read.job, "store_query_failures")
        tokens = pages * self._parts.page_size
        if tokens < self._parts.settings.prefetch_threshold:
            self._abandon(read, answered=True)
            return
        self._parts.tally["prefetch_hit_tokens"] += tokens
        read.hashes, read.keys = found.hashes[:pages], found.keys[:pages]
        self._enter(read, State.PARKED)

    def _fetch(self, read: Read) -> bool:
        """PARKED -> FETCHING; False where the read has to wait for room."""
        parts = self._parts
        if self._on_its_way(read.keys[0]):
            return True  # another request's fetch brings it; this one goes on from there
        if not (self._least_fits(read) and self._let_in(read)):
            return self._defer(read)
        if read.state is not State.PARKED:
            return True  # nothing is left to fetch, or it would never fit
        pages = min(len(read.keys), self._round_pages, parts.stage.room(Direction.READ))
        lease = read.lease = parts.stage.lease(Direction.READ, pages)
        assert lease is not None, "the room was asked for"
        keys, prefix_keys = read.keys[:pages], read.prefix_keys
        slots = slots_of(lease.pages, parts.page_size)
        parts.ledger.note("fetch", read.rid, pages)
        self._enter(read, State.FETCHING)
        read.job = self._fetch_lane.submit(
            lambda job: parts.store.fetch(keys, slots, prefix_keys, job)
        )
        return True

    def _on_its_way(self, key: str) -> bool:
        """Whether another read is just bringing the page ``key``.

        A burst of requests with one prefix would otherwise fetch it once for each of them.
        """
        under_way = (State.FETCHING, State.STAGED)
        return any(
            key in x.keys[: len(x.lease.pages)]
            for x in self._live
            if x.state in under_way and x.lease is not None
        )

    def _least_fits(self, read: Read) -> bool:
        if read.blocked_at == self._changes:
            return False
        return self._parts.stage.room(Direction.READ) >= min(len(read.keys), self._least_pages)

    def _let_in(self, read: Read) -> bool:
        """Leave out what the tree has got since the query, and, the first time, set aside what the
        rest of the hit will pin, so that no read stops half-way for another one. False: later."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        assert read.pin is not None
        page = self._parts.page_size
        end = read.begin + len(read.keys) * page
        match = self._parts.tree.match_prefix(MatchPrefixParams(key=read.key[:end]))
        came = (len(match.device_indices) - read.begin) // page
        if not read.admitted:
            pinned = self._pinned_with(match.last_device_node)
            spare = (self._parts.settings.pinned_tokens - pinned) // page
            if len(read.keys) - came > spare:
                if any(other.pin for other in self._live if other is not read):
                    read.blocked_at = self._changes
                    return False
                # Nobody's end would make room for more.
                cut = came + spare if spare > 0 else 0
                self._unfulfilled((len(read.keys) - cut) * page)
                read.hashes, read.keys = read.hashes[:cut], read.keys[:cut]
                if not cut:
                    self._abandon(read)
                    return True
            read.admitted = True
        if came:
            read.pin.move(match.last_device_node)
            self._advance(read, came)
        if not read.keys:
            self._enter(read, State.DONE)
        return True

    def _advance(self, read: Read, pages: int) -> None:
        """The next ``pages`` pages of the hit are in the tree."""
        if read.prefix_keys is not None:
            read.prefix_keys = [*read.prefix_keys, *read.keys[:pages]]
        read.begin += pages * self._parts.page_size
        read.hashes, read.keys = read.hashes[pages:], read.keys[pages:]

    def _defer(self, read: Read) -> bool:
        """PARKED it stays; nobody behind it gets ahead of it."""
        if not read.deferred:
            read.deferred = True
            self._parts.tally["prefetch_deferred_tokens"] += len(read.keys) * self._parts.page_size
        return False

    def _fetched(self, read: Read, pages: int) -> None:
        """FETCHING -> STAGED, with the pages that are good on all ranks."""
        assert read.job is not None and read.lease is not None
        self._failure(read.job, "store_read_failures")
        self._parts.tally["store_read_pages"] += pages
        if pages < len(read.lease.pages):
            # The store has lost the rest since it was asked.
            self._unfulfilled((len(read.keys) - pages) * self._parts.page_size)
            read.hashes, read.keys = read.hashes[:pages], read.keys[:pages]
            if not pages:
                self._abandon(read, answered=True)
                return
            self._leave_behind(read, read.lease.split(pages))
        read.staged = pages
        self._enter(read, State.STAGED)

    def _publish(self) -> None:
        """STAGED -> PARKED or DONE, for all that are staged."""
        staged = [read for read in self._live if read.state is State.STAGED]
        for read, published in self.loads.publish(staged):
            if published is None:
                self._unfulfilled(len(read.keys) * self._parts.page_size)
                self._abandon(read)
            else:
                self._published(read, published)

    def _published(self, read: Read, published: Published) -> None:
        new = read.staged * self._parts.page_size - published.covered
        read.loaded += new
        self._parts.tally["prefetch_loaded_tokens"] += new
        self._advance(read, read.staged)
        self._enter(read, State.PARKED if read.keys else State.DONE)

    # Ways out.

    def _abandon(self, read: Read, answered: bool = False) -> None:
        """The request does not need it any more, or has waited long enough. In any state.

        ``answered``: the store's job has ended on all ranks. That it has on this one is not enough,
        since all ranks have to give the staging pages back in the same step.
        """
        if self._by_rid.get(read.rid) is read:
            del self._by_rid[read.rid]
            if read.loaded:
                self._parts.tree.prefetch_loaded_tokens_by_reqid[read.rid] = read.loaded
        if read.pin is not None:
            read.pin.release()
            read.pin = None
        self._changes += 1
        if read.state not in (State.QUERYING, State.FETCHING):
            self._end(read)
        elif answered:
            self._linger(read)
        else:
            assert read.job is not None
            read.job.cancel()
            read.state = State.DRAINING

    def _leave_behind(self, read: Read, lease: Lease) -> None:
        """``lease`` was not filled, and a call that was given up may still be at work in it."""
        rest = Read(read.rid, read.key, State.LINGERING, job=read.job, lease=lease)
        self._live.append(rest)

    def _linger(self, read: Read) -> None:
        """The store has answered, on all ranks; a call that was given up may still be at work."""
        read.state = State.LINGERING
        if read.lease is None:
            self._end(read)

    def _end(self, read: Read) -> None:
        read.state = State.ENDED
        if read.lease is not None:
            read.lease.release()
        if read in self._live:
            self._live.remove(read)

    def _out_of_time(self, read: Read) -> bool:
        now, settings = self._parts.now_ms, self._parts.settings
        if read.state is State.DONE:
            return now - read.since_ms > settings.claim_ms
        waited = 0 if read.asked_ms is None else now - read.asked_ms
        return waited > settings.patience_ms(len(read.key) // settings.page_size)

    def _stuck(self) -> bool:
        """Whether nothing can be fetched until a call returns that was given up."""
        stranded = sum(read.lease.stranded for read in self._live if read.lease is not None)
        return (
            self._parts.stage.reachable(Direction.READ) < self._least_pages or stranded >= MOST_LIVE
        )

    def _give_up_for_the_stage(self) -> None:
        """Who waits to be fetched computes, rather than wait for a store that may never answer."""
        for read in list(self._by_rid.values()):
            if read.state in (State.WAITING, State.PARKED):
                self._unfulfilled(len(read.keys) * self._parts.page_size)
                self._abandon(read)

    # Small things.

    def _enter(self, read: Read, state: State) -> None:
        read.state, read.since_ms = state, self._parts.now_ms
        self._changes += 1

    def _pinned_with(self, node: Any) -> int:
        return pinned_tokens(self._live, node, self._parts.page_size)

    def _unfulfilled(self, tokens: int) -> None:
        self._parts.tally["prefetch_unfulfilled_tokens"] += tokens

    def _failure(self, job: Job, name: str) -> None:
        if job.fault is not None:
            self._parts.tally[name] += 1


def _outcome(read: Read) -> int:
    """What the store's job of this read has answered on this rank."""
    if read.job is None:
        return 0
    if read.state is State.LINGERING:
        return 0 if read.job.quiet else PENDING
    if read.state in (State.QUERYING, State.FETCHING, State.DRAINING):
        return PENDING if read.job.pages is None else read.job.pages
    return 0

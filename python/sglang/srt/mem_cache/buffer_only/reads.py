"""The read pipeline: store to stage to device tree, ahead of the request's admission.

``read_state`` has the states of a read. Only the scheduler thread changes them, in ``apply`` and
``pump``, from what the ranks agreed on, so that they are the same on all ranks.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.buffer_only.agreement import PENDING, READ_SLOTS, Facts
from sglang.srt.mem_cache.buffer_only.copies import LOADS, Copies, slots_of
from sglang.srt.mem_cache.buffer_only.lanes import Job
from sglang.srt.mem_cache.buffer_only.namespaces import store_keys
from sglang.srt.mem_cache.buffer_only.parts import Parts, Pin, page_hashes
from sglang.srt.mem_cache.buffer_only.publish import publish
from sglang.srt.mem_cache.buffer_only.read_state import Load, Read, State, hashed_batches
from sglang.srt.mem_cache.buffer_only.sizing import minimal_transfer
from sglang.srt.mem_cache.buffer_only.stage import Direction, Lease


class Reads:
    """All reads of one rank."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._query_lane = parts.make_lane("query")
        self._fetch_lane = parts.make_lane("fetch")
        #: What requests want; those that are not WAITING are also in ``_live``.
        self._by_rid: dict[str, Read] = {}
        self._live: list[Read] = []
        self._loads = Copies()
        self._consumer_index = -1
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
        return bool(self._by_rid or len(self._loads) or len(self._live) > lingering)

    @property
    def live(self) -> tuple[Read, ...]:
        """Reads that have begun, oldest first."""
        return tuple(self._live)

    @property
    def loads(self) -> list[Load]:
        """Copies to the device that have not been seen to end."""
        return self._loads.owners

    @property
    def waiting(self) -> list[Read]:
        """Reads that have not begun, oldest first."""
        return [read for read in self._by_rid.values() if read.state is State.WAITING]

    @property
    def consumer_index(self) -> int:
        """The last copy to the device that a batch may have to wait for; -1 if all have ended."""
        return self._consumer_index if len(self._loads) else -1

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
        return self._loads.ended(), tuple(map(_outcome, self._live))

    def apply(self, agreed: Facts) -> None:
        """Act on what has ended on all ranks, and on time that has run out."""
        for load in self._loads.pop(agreed.loaded):
            self._loaded(load)
        for read, pages in zip(list(self._live), agreed.reads, strict=True):
            if pages == PENDING:
                continue
            if read.state is State.QUERYING:
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
        for read in self.waiting:
            if len(self._live) >= READ_SLOTS // 2 or not self._query(read):
                break
        for read in [read for read in self._live if read.state is State.PARKED]:
            if not self._fetch(read):
                break

    def reset(self) -> None:
        """The tree is about to be emptied: end everything, but keep what the store still fills."""
        for read in list(self._by_rid.values()):
            self._abandon(read)
        for load in self._loads.pop(len(self._loads)):
            self._loaded(load)

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
        tokens, extra_key = read.key.token_ids[begin:], read.key.extra_key
        prefix_keys = read.prefix_keys

        def query(job: Job) -> int:
            hits = 0
            found: tuple[list[str], list[str]] = ([], [])
            job.found = found
            for hashes in hashed_batches(tokens, last_hash, parts.page_size):
                keys = store_keys(hashes, extra_key)
                before = None if prefix_keys is None else [*prefix_keys, *found[1]]
                good = parts.store.leading_hits(keys, before, job)
                found[0].extend(hashes[:good])
                found[1].extend(keys[:good])
                hits += good
                if good < len(hashes):
                    break
            return hits

        parts.ledger.note("query", read.rid, begin)
        self._live.append(read)
        self._enter(read, State.QUERYING)
        read.job = self._query_lane.submit(query)
        return True

    def _found(self, read: Read, pages: int) -> None:
        """QUERYING -> PARKED, if the hit is worth it."""
        assert read.job is not None
        hashes, keys = read.job.found or ([], [])
        self._failure(read.job, "store_query_failures")
        tokens = pages * self._parts.page_size
        if tokens < self._parts.settings.prefetch_threshold:
            self._abandon(read, answered=True)
            return
        self._parts.tally["prefetch_hit_tokens"] += tokens
        read.hashes, read.keys = hashes[:pages], keys[:pages]
        self._enter(read, State.PARKED)

    def _fetch(self, read: Read) -> bool:
        """PARKED -> FETCHING; False where the read has to wait for room."""
        parts = self._parts
        if self._on_its_way(read.keys[0]):
            return True  # another request's fetch brings it; this one goes on from there
        if not self._least_fits(read):
            return self._defer(read)
        if not self._let_in(read):
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
        least = min(len(read.keys), self._least_pages)
        return self._parts.stage.room(Direction.READ) >= least

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
        """STAGED -> PARKED or DONE for all that are staged, with one copy for all of them."""
        if len(self._loads) >= LOADS:
            return
        pairs: list[Any] = []
        loads: list[Load] = []
        for read in [read for read in self._live if read.state is State.STAGED]:
            pair = self._publish_one(read, loads)
            if pair is not None:
                pairs.append(pair)
        if pairs:
            finished, self._consumer_index = self._parts.copier.to_device(pairs)
            self._loads.add(finished, loads)

    def _publish_one(self, read: Read, loads: list[Load]) -> Any:
        parts, page = self._parts, self._parts.page_size
        assert read.lease is not None and read.pin is not None
        end = read.begin + read.staged * page
        published = publish(parts.tree, read.key[:end], read.begin, read.hashes[: read.staged])
        if published is None:
            self._unfulfilled(len(read.keys) * page)
            self._abandon(read)
            return None
        lease, read.lease = read.lease, None
        read.pin.move(published.node)
        covered, first = published.covered, published.covered // page
        read.loaded += read.staged * page - covered
        parts.tally["prefetch_loaded_tokens"] += read.staged * page - covered
        host = slots_of(lease.pages[first : read.staged], page)
        self._advance(read, read.staged)
        self._enter(read, State.PARKED if read.keys else State.DONE)
        if published.slots is None:
            lease.release()
            return None
        parts.tree.inc_lock_ref(published.node)
        loads.append(Load(published.node, lease))
        return host, published.slots

    def _loaded(self, load: Load) -> None:
        self._parts.tree.dec_lock_ref(load.node)
        load.lease.release()

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

    # Small things.

    def _enter(self, read: Read, state: State) -> None:
        read.state, read.since_ms = state, self._parts.now_ms
        self._changes += 1

    def _pinned_with(self, node: Any) -> int:
        """Tokens that are pinned, or will be by what was let in, and those up to ``node``."""
        pinned = [read.pin.node for read in self._live if read.pin is not None]
        seen: set[Any] = set()
        for last in [*pinned, node]:
            while last is not None and last.parent is not None and last not in seen:
                seen.add(last)
                last = last.parent
        coming = sum(len(read.keys) for read in self._live if read.admitted and read.pin)
        return sum(len(one.key) for one in seen) + coming * self._parts.page_size

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

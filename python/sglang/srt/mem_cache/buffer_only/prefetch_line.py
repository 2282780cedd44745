"""All prefetches of one rank, in the order of the queue.

A request's prefix is looked for in the store when it arrives, and fetched into the stage by its
place in line, as far as the stage reaches. It is copied to the device when the request is admitted
(``load_back``). A hit that is larger than the stage goes through it in rounds, as soon as the
scheduler waits for that request: half of the stage is copied into the tree, where it can be evicted
like anything else, while the other half is fetched.

Only the scheduler thread changes states, from what the ranks agreed on and from what they all have
(queue and tree), so that they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import TransferVote
from sglang.srt.mem_cache.buffer_only.fetch import THREADS as SIDE_BY_SIDE
from sglang.srt.mem_cache.buffer_only.fetch import Fetches
from sglang.srt.mem_cache.buffer_only.load_back import LoadBacks
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, State
from sglang.srt.mem_cache.buffer_only.query import Queries
from sglang.srt.mem_cache.buffer_only.settings import pages_of
from sglang.srt.mem_cache.buffer_only.worth import Choice, Hit, Speeds, choose

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.pipelines import Context
    from sglang.srt.mem_cache.buffer_only.upstream import Key, Node

#: A prefix that the store has not is asked for again so long after the last time, while its request
#: waits; then not any more. Nobody waits for these.
AGAIN_MS = (500, 2000, 8000)
#: Requests for which the tree is looked at in a step, to fetch for them.
MOST_LOOKED_AT = 32
#: Instead of what was known when a prefetch was last looked at: its own pieces bring all of it.
ALL_COMES = "all comes"


class PrefetchLine:
    """All prefetches of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._by_rid: dict[str, Prefetch] = {}
        self.queries = Queries(context)
        self.fetches = Fetches(context)
        self.load_backs = LoadBacks(context)
        #: Agreed by the ranks.
        self._speeds = Speeds()
        self._slower_in_a_row = 0
        self._arrivals = 0

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way; what the store was given up for does not
        count."""
        calls = len(self.queries.under_way) + self.fetches.running
        return bool(self._by_rid or calls or len(self.load_backs))

    @property
    def prefetches(self) -> list[Prefetch]:
        """In the order of the queue."""
        return sorted(self._by_rid.values(), key=lambda one: one.place)

    # ---- what the scheduler says and asks ----

    def request(self, rid: str, key: Key) -> None:
        """Fetch what the store has of ``key`` beyond what the tree holds."""
        self.cancel(rid)
        if len(key) >= self._context.settings.prefetch_threshold:
            self._arrivals += 1
            self._by_rid[rid] = Prefetch(rid, key, self._arrivals, self._context.now_ms)

    def in_line(self, rids: Iterable[str]) -> None:
        """The requests that wait, first in line first. Who is not among them is gone."""
        if not self._by_rid:
            return
        places = {rid: place for place, rid in enumerate(rids)}
        before = -1
        for prefetch in self.prefetches:
            if prefetch.rid not in places:
                self._end(prefetch)
                self._context.tree.prefetch_loaded_tokens_by_reqid.pop(prefetch.rid, None)
                continue
            prefetch.place = places[prefetch.rid]
            if prefetch.place < before:
                self.fetches.changes += 1  # who brings pages for whom is another question now
            before = prefetch.place

    def ready(self, rid: str) -> bool:
        """Whether the request can be scheduled; asked in each step that could admit it."""
        prefetch = self._by_rid.get(rid)
        if prefetch is None:
            return True
        if self._ready(prefetch):
            prefetch.asked_ms = None
            return True
        if self._context.settings.policy == "best_effort":
            return True
        if prefetch.asked_ms is None:
            prefetch.asked_ms, prefetch.blocked = self._context.now_ms, None
        return False

    def loadable(self, rid: str, held: int, most: int) -> int:
        """Tokens of the request in the stage that continue the ``held`` tokens that the tree has,
        up to the first ``most`` tokens of the prompt."""
        prefetch, page = self._by_rid.get(rid), self._context.page_size
        if prefetch is None:
            return 0
        return max(0, min(prefetch.staged_from(held // page), (most - held) // page)) * page

    def load(self, rid: str, held: int, tokens: int) -> tuple[torch.Tensor, Node] | None:
        """The request is admitted: ``tokens`` staged tokens enter the tree behind the ``held`` ones
        that it has, and are copied under the batch that is being formed.

        Returns:
            The device slots, and the node in which they end; None where the device has no room.
        """
        prefetch, page = self._by_rid[rid], self._context.page_size
        loaded = self._load(prefetch, held // page, (held + tokens) // page)
        if loaded is not None:
            self._end(prefetch)
        return loaded

    def cancel(self, rid: str) -> None:
        """The request is gone, runs, or asks again."""
        prefetch = self._by_rid.get(rid)
        if prefetch is not None:
            self._end(prefetch)

    # ---- a step ----

    def vote(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Copies that have ended, and what is known of each call of the store, on this rank."""
        return (
            self.load_backs.ended(),
            tuple(query.outcome for query in self.queries.under_way),
            tuple(piece.outcome for piece in self.fetches.under_way),
        )

    def apply(self, agreed: TransferVote) -> None:
        """Act on what has ended on all ranks, and on time that has run out."""
        self.load_backs.finish(agreed.load_back_copies)
        self._speeds = Speeds(-agreed.minus_call_us, agreed.call_bytes, agreed.tokens_per_s)
        for prefetch in self.queries.apply(agreed.queries):
            self._answered(prefetch)
        for prefetch, end in self.fetches.apply(agreed.fetches):
            if end is not None:
                self._cut(prefetch, end)  # the store has lost the rest since it was asked
            if prefetch.state is State.QUERYING:
                continue  # it is asked for anew, and keeps what is in the stage
            if not prefetch.keys:
                self._missed(prefetch)
            else:
                self._look(prefetch, self._match(prefetch)[0])
        for prefetch in list(self._by_rid.values()):
            if self._out_of_time(prefetch):
                self._context.counters["prefetch_timeouts"] += 1
                self._settle(prefetch)

    def launch(self) -> None:
        """Start what calls and stage have room for, first in line first."""
        line = self.prefetches
        if self.fetches.stuck:
            for prefetch in line:
                if prefetch.state in (State.WAITING, State.FOUND):
                    self._settle(prefetch)
        for prefetch in line:
            if self._wants_query(prefetch) and self.queries.has_slot:
                self._query(prefetch)
        looked_at = 0
        for prefetch in line:
            if prefetch.state not in (State.FOUND, State.FETCHING) or self._idle(prefetch):
                continue
            looked_at += 1
            if not self._fetch(prefetch) or looked_at == MOST_LOOKED_AT:
                break
        self._load_ahead(line)
        self.load_backs.launch_apart()

    def reset(self) -> None:
        """The tree is about to be emptied: end everything, but keep what the store still fills."""
        self.cancel_all()
        self.load_backs.reset()

    def cancel_all(self) -> None:
        """The store was cleared: what it was found to have would enter the tree as stored."""
        for prefetch in list(self._by_rid.values()):
            self._end(prefetch)

    def close(self, timeout: float) -> bool:
        """End the threads; False if one takes more than ``timeout`` seconds."""
        return self.queries.close(timeout) and self.fetches.close(timeout)

    # ---- from state to state ----

    def _wants_query(self, prefetch: Prefetch) -> bool:
        if prefetch.state is State.WAITING:
            return True
        due = prefetch.again_ms is not None and self._context.now_ms >= prefetch.again_ms
        return due and prefetch.query is None and prefetch.state is State.MISSED

    def _query(self, prefetch: Prefetch) -> None:
        """WAITING -> QUERYING. What was missed once stays so while the store is asked again."""
        context = self._context
        held, node = self._match(prefetch)
        tokens = held * context.page_size
        if len(prefetch.key) - tokens < context.settings.prefetch_threshold:
            self._end(prefetch)  # the tree has it by now
            return
        self.queries.start(prefetch, held, node)
        if prefetch.state is State.WAITING:
            self._enter(prefetch, State.QUERYING)

    def _answered(self, prefetch: Prefetch) -> None:
        """QUERYING -> FOUND or MISSED."""
        tokens = len(prefetch.keys) * self._context.page_size
        if tokens < self._context.settings.prefetch_threshold:
            prefetch.hashes, prefetch.keys = [], []
            self._missed(prefetch)
            return
        self._context.counters["prefetch_hit_tokens"] += tokens
        self.fetches.drop(prefetch, [one for one in prefetch.pieces if one.stop > prefetch.end])
        self._enter(prefetch, State.FOUND)
        prefetch.blocked = prefetch.unready = None

    def _missed(self, prefetch: Prefetch) -> None:
        """The store has nothing that is worth it; perhaps another server is just writing it."""
        self.fetches.drop(prefetch, prefetch.pieces)
        turn = prefetch.queries - 1
        again = self._context.now_ms + AGAIN_MS[turn] if turn < len(AGAIN_MS) else None
        prefetch.again_ms = again
        self._enter(prefetch, State.MISSED)

    def _idle(self, prefetch: Prefetch) -> bool:
        """Whether there is nothing to do for it: all is on its way, or nothing has changed."""
        now = (self.fetches.changes, self.fetches.capacity)
        return prefetch.blocked in (ALL_COMES, now)

    def _fetch(self, prefetch: Prefetch) -> bool:
        """Bring what is missing, as far as it goes; False where nobody behind it gets more."""
        fetches = self.fetches
        held, _ = self._match(prefetch)
        if held < prefetch.begin:
            self._ask_anew(prefetch)
            return True
        over = [one for one in prefetch.pieces if one.staged and one.stop <= held]
        fetches.drop(prefetch, over)
        if prefetch.choice is None and fetches.has_slot and held < prefetch.end:
            prefetch.choice = self._choose(prefetch, held)
        if prefetch.choice is Choice.SLOWER:
            self._settle(prefetch)
            return True
        whole = self._start_fetches(prefetch, held)
        self._look(prefetch, held)
        if whole:
            own = prefetch.missing(held, 1, lambda key: False) is None
            now = (fetches.changes, fetches.capacity)
            prefetch.blocked = ALL_COMES if own else now
        elif not prefetch.deferred:
            prefetch.deferred = True
            tokens = len(prefetch.keys) * self._context.page_size
            self._context.counters["prefetch_deferred_tokens"] += tokens
        return whole

    def _start_fetches(self, prefetch: Prefetch, held: int) -> bool:
        """Fetch what is missing, as far as stage and slots go; whether they went far enough."""
        fetches = self.fetches
        comes = fetches.comes_before(prefetch)
        while (gap := prefetch.missing(held, fetches.piece_pages, comes)) is not None:
            start, stop = gap
            least = min(stop - start, fetches.least_pages)
            if fetches.capacity < least and prefetch.asked_ms is not None:
                self._take_from_the_last(prefetch, least)
            if fetches.capacity < least or not fetches.has_slot:
                return False
            fetches.start(prefetch, start, min(stop, start + fetches.capacity))
        return True

    def _choose(self, prefetch: Prefetch, held: int) -> Choice:
        """Whether the hit is there before it could be computed."""
        context, fetches, choice = self._context, self.fetches, Choice.UNMEASURED
        pages, ahead = prefetch.end - held, 0
        if prefetch.asked_ms is None:
            before = [one for one in self._by_rid.values() if one.place < prefetch.place]
            ahead = sum(len(one.key) - one.end * context.page_size for one in before)
        if not context.settings.always_fetch:
            hit = Hit(
                tokens=pages * context.page_size,
                calls=pages_of(pages, fetches.piece_pages),
                call_bytes=min(pages, fetches.piece_pages) * context.page_bytes,
                calls_ahead=fetches.running,
                tokens_ahead=ahead,
            )
            choice = choose(self._speeds, hit, SIDE_BY_SIDE, self._slower_in_a_row)
        self._slower_in_a_row = self._slower_in_a_row + 1 if choice is Choice.SLOWER else 0
        context.choices[choice] += 1
        return choice

    def _look(self, prefetch: Prefetch, held: int) -> None:
        """FOUND, FETCHING or STAGED, by what is there."""
        if prefetch.state in (State.FOUND, State.FETCHING, State.STAGED):
            prefetch.blocked = None
            whole = held + prefetch.staged_from(held) >= prefetch.end
            rest = State.STAGED if whole else State.FOUND
            self._enter(prefetch, State.FETCHING if prefetch.fetching else rest)

    def _load_ahead(self, line: list[Prefetch]) -> None:
        """Of a hit that is larger than the stage, copy what is in the stage into the tree, if the
        scheduler waits for it. One copy at a time."""
        most = self.fetches.most
        for prefetch in line:
            if prefetch.asked_ms is None or prefetch.state not in (State.FOUND, State.FETCHING):
                continue
            if len(self.load_backs) or len(prefetch.keys) <= most:
                return
            held, _ = self._match(prefetch)
            pages = prefetch.staged_from(held)
            if prefetch.end - held <= most or pages < max(1, most // 2):
                return
            if self._load(prefetch, held, held + pages) is None:
                self._settle(prefetch)  # it comes with what is staged, when there is room
            return

    def _load(self, prefetch: Prefetch, start: int, stop: int) -> tuple[torch.Tensor, Node] | None:
        """Staged pages enter the tree, and wait for the next copy."""
        context = self._context
        new = (stop - start) * context.page_size
        hashes = prefetch.hashes[start - prefetch.begin : stop - prefetch.begin]
        used = [one for one in prefetch.pieces if one.staged and one.start < stop]
        loaded = self.load_backs.add(
            prefetch.key[: stop * context.page_size],
            hashes,
            prefetch.staging_of(start, stop),
            [one.staging for one in used],
        )
        if loaded is not None:
            self.fetches.hand_over(prefetch, used)
            context.counters["prefetch_loaded_tokens"] += new
            hits = context.tree.prefetch_loaded_tokens_by_reqid
            hits[prefetch.rid] = hits.get(prefetch.rid, 0) + new
            prefetch.loaded += new
        return loaded

    def _ready(self, prefetch: Prefetch) -> bool:
        """Whether all that will come is in the tree or in the stage."""
        if prefetch.state in (State.MISSED, State.WAITING, State.QUERYING):
            return prefetch.state is State.MISSED
        now = (self.fetches.handed_over, self._context.tree.inserts)  # what makes the tree grow
        if prefetch.state is not State.STAGED and prefetch.unready == now:
            return False
        prefetch.unready = now
        held, _ = self._match(prefetch)
        if held + prefetch.staged_from(held) >= prefetch.end:
            return True
        return prefetch.state is State.STAGED and not self._ask_anew(prefetch)

    # ---- ways out ----

    def _ask_anew(self, prefetch: Prefetch) -> bool:
        """The tree has lost what it had when the store was asked, and what is staged has nothing to
        hang below: ask once more, and keep it. False if it was asked often enough."""
        if prefetch.queries > len(AGAIN_MS):
            self._settle(prefetch)
            return False
        self._enter(prefetch, State.WAITING)
        return True

    def _settle(self, prefetch: Prefetch) -> None:
        """No more will come: the request runs with what is in the stage."""
        held, _ = self._match(prefetch)
        staged = prefetch.staged_from(held)
        self.queries.cancel(prefetch)
        self._cut(prefetch, held + staged if staged else prefetch.begin)
        prefetch.queries, prefetch.again_ms = len(AGAIN_MS) + 1, None
        self._enter(prefetch, State.STAGED if staged else State.MISSED)

    def _end(self, prefetch: Prefetch) -> None:
        """Nobody wants it any more."""
        del self._by_rid[prefetch.rid]
        self._enter(prefetch, prefetch.state)
        self._context.times.ended(prefetch)
        self.queries.cancel(prefetch)
        self.fetches.drop(prefetch, prefetch.pieces)

    def _cut(self, prefetch: Prefetch, end: int) -> None:
        """The hit ends at page ``end``."""
        pages = max(0, end - prefetch.begin)
        self._unfulfilled(max(0, len(prefetch.keys) - pages))
        prefetch.hashes, prefetch.keys = prefetch.hashes[:pages], prefetch.keys[:pages]
        prefetch.unready = None
        self.fetches.drop(prefetch, [one for one in prefetch.pieces if one.stop > end])

    def _take_from_the_last(self, prefetch: Prefetch, pages: int) -> None:
        """The scheduler waits for ``prefetch``: those behind it give back what they have staged,
        the last one first, until there is room for ``pages``."""
        for other in reversed(self.prefetches):
            if other.place <= prefetch.place or self.fetches.capacity >= pages:
                return
            staged = [piece for piece in other.pieces if piece.staged]
            self.fetches.drop(other, staged)
            if staged:
                self._look(other, 0)

    def _out_of_time(self, prefetch: Prefetch) -> bool:
        if prefetch.asked_ms is None or prefetch.state in (State.STAGED, State.MISSED):
            return False
        waited, settings = self._context.now_ms - prefetch.asked_ms, self._context.settings
        return waited > settings.timeout_ms(len(prefetch.key) // settings.page_size)

    # ---- small things ----

    def _match(self, prefetch: Prefetch) -> tuple[int, Node]:
        """Pages of the prompt that the tree has, and the node in which they end."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = self._context.tree.match_prefix(MatchPrefixParams(key=prefetch.key))
        return len(match.device_indices) // self._context.page_size, match.last_device_node

    def _enter(self, prefetch: Prefetch, state: State) -> None:
        prefetch.enter(state, self._context.now_ms)

    def _unfulfilled(self, pages: int) -> None:
        tokens = pages * self._context.page_size
        self._context.counters["prefetch_unfulfilled_tokens"] += tokens

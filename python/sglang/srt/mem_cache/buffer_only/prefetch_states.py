"""From state to state: what becomes of one prefetch, and what it gives back.

Only the scheduler thread changes states, from what the ranks agreed on and from what they all have
(queue and tree), so that they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.chooser import Chooser
from sglang.srt.mem_cache.buffer_only.fetch import Fetches
from sglang.srt.mem_cache.buffer_only.page_store import Found, page_hashes
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, Query, State
from sglang.srt.mem_cache.buffer_only.query import Queries
from sglang.srt.mem_cache.buffer_only.waiting_line import TokensAhead, WaitingLine
from sglang.srt.mem_cache.buffer_only.worth import Choice

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.radix_cache import TreeNode

#: What the store has not of a prompt is asked for again so long after the last time, while its
#: request waits; then not any more. Nobody waits for these.
AGAIN_MS = (500, 2000, 8000)
#: How often all is asked for anew where the tree has lost what came before.
MOST_ANEW = 3


class PrefetchStates:
    """Base of ``prefetch_line.PrefetchLine``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.line = WaitingLine()
        #: Those that want to ask the store, and those that want to ask it again.
        self._to_ask: dict[Prefetch, None] = {}
        self._to_ask_again: dict[Prefetch, None] = {}
        self.queries = Queries(context)
        self.fetches = Fetches(context)
        self._chooser = Chooser(context)
        #: Grows whenever there may be something to fetch for one of them.
        self._news = 0
        #: Pages of the longest hit since the line was last empty.
        self._longest = 0

    # ---- query ----

    def _asks_again(self, prefetch: Prefetch) -> bool:
        due = prefetch.again_ms is not None and self._context.now_ms >= prefetch.again_ms
        known = prefetch.state not in (State.WAITING, State.QUERYING)
        return due and known and prefetch.query is None

    def _ask(self) -> None:
        """Ask the store for all that its slots have room for. Nobody waits for what is asked again:
        that is asked one at a time, so that another thread is left to those for whom somebody
        does."""
        if self._to_ask_again and not self.queries.under_way:
            again = next(iter(self._to_ask_again))
            self._query(again, TokensAhead(self.line, self._context.page_size))
        if self._to_ask and self.queries.has_slot:
            before = TokensAhead(self.line, self._context.page_size)
            for prefetch in sorted(self._to_ask, key=lambda one: one.place):
                if self.queries.has_slot:
                    self._query(prefetch, before)

    def _asks_no_more(self, prefetch: Prefetch) -> None:
        self._to_ask.pop(prefetch, None)
        self._to_ask_again.pop(prefetch, None)

    def _query(self, prefetch: Prefetch, line: TokensAhead) -> None:
        """WAITING -> QUERYING. Asked again, for a miss or for more than a hit, it stays in its
        state: nobody waits for that."""
        self._asks_no_more(prefetch)
        context, first = self._context, None
        tail = prefetch.state not in (State.WAITING, State.MISSED)
        last_hash: str | None
        if tail:
            begin, last_hash = prefetch.end, prefetch.hashes[-1]
            before = prefetch.keys_before(begin)
        else:
            begin, node = self._match(prefetch)
            if len(prefetch.key) - begin * context.page_size < context.settings.prefetch_threshold:
                self._end(prefetch)  # the tree has it by now
                return
            last_hash = page_hashes(node, context.page_size)[-1] if begin else None
            before = context.prefix_keys(node)
        ahead = line.of(prefetch)
        rule = self._chooser.rule(self.fetches, ahead)
        wanted = len(prefetch.key) // context.page_size - begin
        new = prefetch.state is State.WAITING and not prefetch.pieces
        if new:
            parts = self._chooser.best_parts(self.fetches, wanted)
            asked = self._chooser.rule(self.fetches, ahead, self.queries.rounds)
            choices = {asked(pages) for pages in parts}
            # A trial waits for nobody's answer but its own.
            if choices == {Choice.SLOWER} or (choices == {Choice.TRIAL} and self.queries.under_way):
                # It need not even wait for an answer, which takes a step: that may be a batch.
                prefetch.choice = self._chooser.chosen(Choice.UNASKED)
                prefetch.begin = begin
                self._enter(prefetch, State.MISSED)
                return
            if choices == {Choice.TRIAL}:
                prefetch.trial = True
                self._chooser.tried()
        if context.alone and all(piece.stop <= begin for piece in prefetch.pieces):
            first = self.fetches.reserve(prefetch, begin, last_hash, before, rule)
        self.queries.start(prefetch, begin, last_hash, before, tail, first)
        if prefetch.state is State.WAITING:
            self._enter(prefetch, State.QUERYING)

    def _answered(self, prefetch: Prefetch, query: Query, found: Found) -> None:
        """QUERYING or MISSED -> FOUND or MISSED; a hit that has grown is FOUND once more."""
        tokens = len(found.keys) * self._context.page_size
        worth = tokens >= self._context.settings.prefetch_threshold
        if query.tail and worth and query.begin == prefetch.end:
            prefetch.hashes = [*prefetch.hashes, *found.hashes]
            prefetch.keys = [*prefetch.keys, *found.keys]
        elif not query.tail:
            prefetch.begin, prefetch.prefix_keys = query.begin, query.prefix_keys
            prefetch.hashes, prefetch.keys = (found.hashes, found.keys) if worth else ([], [])
        else:
            worth = False
        self.fetches.drop(prefetch, [one for one in prefetch.pieces if one.stop > prefetch.end])
        # Decided anew, a fetch that has begun would count as still to come, and behind itself.
        begun = bool(prefetch.pieces) and prefetch.state is not State.STAGED
        if not prefetch.keys:
            self._missed(prefetch)
            return
        self._ask_later(prefetch)
        if not worth:
            return
        self._context.counters["prefetch_hit_tokens"] += tokens
        prefetch.unready = None
        if not begun:
            prefetch.choice = None
        if query.first is not None and query.first.choice is not None:
            prefetch.choice = self._chooser.chosen(query.first.choice)
        if prefetch.state is not State.FETCHING:
            self._enter(prefetch, State.FOUND)
        self._longest = max(self._longest, len(prefetch.keys))
        self._look_again(prefetch)

    def _missed(self, prefetch: Prefetch) -> None:
        """The store has nothing that is worth it."""
        self.fetches.drop(prefetch, prefetch.pieces)
        self.queries.cancel(prefetch)
        self._ask_later(prefetch)
        self._enter(prefetch, State.MISSED)

    def _ask_later(self, prefetch: Prefetch) -> None:
        """What the store has not, another server may be writing."""
        context, prefetch.again_ms = self._context, None
        rest = len(prefetch.key) - prefetch.end * context.page_size
        if rest >= context.settings.prefetch_threshold and prefetch.repeats < len(AGAIN_MS):
            prefetch.again_ms = context.now_ms + AGAIN_MS[prefetch.repeats]
            prefetch.repeats += 1
            self.line.wake(prefetch, prefetch.again_ms)

    # ---- fetch ----

    def _look_again(self, prefetch: Prefetch) -> None:
        """There may be something to fetch for it."""
        prefetch.all_comes = None
        self._news += 1

    def _came(self, outcomes: Sequence[int]) -> None:
        """What the store has answered to fetches."""
        for prefetch, end in self.fetches.apply(outcomes):
            if end is not None:
                self._cut(prefetch, end)  # the store has lost the rest since it was asked
            if prefetch.state in (State.WAITING, State.QUERYING):
                continue  # it is queried again, and keeps what is in the staging buffer
            if not prefetch.keys:
                self._missed(prefetch)
            else:
                prefetch.all_comes = None
                self._look(prefetch, self._match(prefetch)[0])

    def _look(self, prefetch: Prefetch, held: int) -> None:
        """FOUND, FETCHING or STAGED, by what is there."""
        if prefetch.state in (State.FOUND, State.FETCHING, State.STAGED):
            whole = held + prefetch.staged_from(held) >= prefetch.end
            rest = State.STAGED if whole else State.FOUND
            self._enter(prefetch, State.FETCHING if prefetch.fetching else rest)

    # ---- ways out ----

    def _ask_anew(self, prefetch: Prefetch) -> bool:
        """The tree has lost what it had when the store was asked, and what is staged has nothing to
        hang below: ask once more, and keep it. False if it was asked often enough."""
        if prefetch.anews == MOST_ANEW:
            self._settle(prefetch)
            return False
        prefetch.anews += 1
        self.queries.cancel(prefetch)
        self._enter(prefetch, State.WAITING)
        self._to_ask[prefetch] = None
        return True

    def _settle(self, prefetch: Prefetch) -> None:
        """No more will come: the request runs with what is in the staging buffer."""
        held, _ = self._match(prefetch)
        staged = prefetch.staged_from(held)
        self._makes_way(prefetch)
        self.queries.cancel(prefetch)
        self._asks_no_more(prefetch)
        self._cut(prefetch, held + staged if staged else prefetch.begin)
        prefetch.anews, prefetch.again_ms = MOST_ANEW, None
        self._enter(prefetch, State.STAGED if staged else State.MISSED)

    def _end(self, prefetch: Prefetch) -> None:
        """Nobody wants it any more."""
        self.line.remove(prefetch)
        self._makes_way(prefetch)
        self._asks_no_more(prefetch)
        if not len(self.line):
            self._longest = 0
        self._enter(prefetch, prefetch.state)
        self._context.times.ended(prefetch)
        self.queries.cancel(prefetch)
        self.fetches.drop(prefetch, prefetch.pieces)

    def _makes_way(self, prefetch: Prefetch) -> None:
        """Waiting for the staging buffer, it may have kept those behind it from being checked."""
        self._news += prefetch.state is State.FOUND

    def _cut(self, prefetch: Prefetch, end: int) -> None:
        """The hit ends at page ``end``."""
        pages = max(0, end - prefetch.begin)
        self._unfulfilled(max(0, len(prefetch.keys) - pages))
        prefetch.hashes, prefetch.keys = prefetch.hashes[:pages], prefetch.keys[:pages]
        prefetch.unready = None
        self.fetches.drop(prefetch, [one for one in prefetch.pieces if one.stop > end])

    def _out_of_time(self, prefetch: Prefetch) -> bool:
        if prefetch.asked_ms is None:
            return False
        waited, settings = self._context.now_ms - prefetch.asked_ms, self._context.settings
        return waited > settings.timeout_ms(len(prefetch.key) // settings.page_size)

    # ---- small things ----

    def _match(self, prefetch: Prefetch) -> tuple[int, TreeNode]:
        """Pages of the prompt that the tree has, and the node in which they end."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = self._context.tree.match_prefix(MatchPrefixParams(key=prefetch.key))
        return len(match.device_indices) // self._context.page_size, match.last_device_node

    def _enter(self, prefetch: Prefetch, state: State) -> None:
        prefetch.enter(state, self._context.now_ms)
        if state in (State.STAGED, State.MISSED):
            prefetch.asked_ms = None  # nobody waits for it

    def _unfulfilled(self, pages: int) -> None:
        tokens = pages * self._context.page_size
        self._context.counters["prefetch_unfulfilled_tokens"] += tokens

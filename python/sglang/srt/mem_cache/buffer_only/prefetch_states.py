"""What becomes of one prefetch: each function here brings an event upon it
(``prefetch.TRANSITIONS``), and gives back what is not wanted any more.

Only the scheduler thread does, by what the ranks agreed on and by what they all have (queue and
tree), so that the states are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import QUERY_SLOTS
from sglang.srt.mem_cache.buffer_only.calls import QUERY_THREADS, Calls
from sglang.srt.mem_cache.buffer_only.nodes import page_hashes
from sglang.srt.mem_cache.buffer_only.prefetch import Event, Prefetch, Query, State, WaitingLine
from sglang.srt.mem_cache.buffer_only.worth import Choice, Chooser

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
        self.calls = Calls(context)
        pieces = self.calls.piece_pages
        self._chooser = Chooser(context.settings, context.page_bytes, pieces, context.choices)
        #: Pages of the longest hit since the line was last empty.
        self._longest = 0

    # ---- query ----

    def _ask(self) -> None:
        """Ask the store for all that its slots have room for. Nobody waits for what is asked again:
        that is asked one at a time, so that another thread is left to those for whom somebody
        does."""
        page = self._context.page_size
        if self._to_ask_again and not self.calls.queries:
            again = next(iter(self._to_ask_again))
            self._query(again, next(at for one, at in self.line.ahead(page) if one is again))
        if self._to_ask and len(self.calls.queries) < QUERY_SLOTS:
            for prefetch, ahead in self.line.ahead(page):
                if prefetch in self._to_ask:
                    self._query(prefetch, ahead)
                if len(self.calls.queries) == QUERY_SLOTS:
                    break

    def _asks_no_more(self, prefetch: Prefetch) -> None:
        self._to_ask.pop(prefetch, None)
        self._to_ask_again.pop(prefetch, None)

    def _query(self, prefetch: Prefetch, ahead: int) -> None:
        """Ask the store for it; ``ahead``: tokens that those in line before it will compute."""
        self._asks_no_more(prefetch)
        context, calls, chooser = self._context, self.calls, self._chooser
        last_hash: str | None
        tail = prefetch.state not in (State.WAITING, State.MISSED)
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
        if prefetch.state is State.WAITING and not prefetch.pieces:
            wanted = len(prefetch.key) // context.page_size - begin
            rule = chooser.rule(calls.running, ahead, len(calls.queries) // QUERY_THREADS + 1)
            choices = {rule(pages) for pages in chooser.best_parts(calls.running, wanted)}
            # A trial waits for nobody's answer but its own.
            if choices == {Choice.SLOWER} or (choices == {Choice.TRIAL} and calls.queries):
                # It need not even wait for an answer, which takes a step: that may be a batch.
                prefetch.choice = chooser.chosen(Choice.UNASKED)
                prefetch.begin = begin
                prefetch.happens(Event.MISS, context.now_ms)
                return
            if choices == {Choice.TRIAL}:
                # The store may have nothing: those that come meanwhile, and then, are no trials.
                prefetch.trial, chooser.slower_in_a_row = True, 0
        calls.ask(prefetch, begin, last_hash, before, tail)
        prefetch.happens(Event.ASK, context.now_ms)

    def _answered(
        self, prefetch: Prefetch, query: Query, hashes: list[str], keys: list[str]
    ) -> None:
        """The store has these pages behind those that it was asked for; a hit may have grown."""
        tokens = len(keys) * self._context.page_size
        worth = tokens >= self._context.settings.prefetch_threshold
        if query.tail and worth and query.begin == prefetch.end:
            prefetch.hashes = [*prefetch.hashes, *hashes]
            prefetch.keys = [*prefetch.keys, *keys]
        elif not query.tail:
            prefetch.begin, prefetch.prefix_keys = query.begin, query.prefix_keys
            prefetch.hashes, prefetch.keys = (hashes, keys) if worth else ([], [])
        else:
            worth = False
        self.calls.drop(prefetch, [one for one in prefetch.pieces if one.stop > prefetch.end])
        # Decided anew, a fetch that has begun would count as still to come, and behind itself.
        begun = bool(prefetch.pieces) and prefetch.state is not State.STAGED
        if not prefetch.keys:
            self._missed(prefetch)
            return
        self._ask_later(prefetch)
        if not worth:
            return
        self._context.counters["prefetch_hit_tokens"] += tokens
        prefetch.unready = prefetch.all_comes = None
        if not begun:
            prefetch.choice = None
        prefetch.happens(Event.HIT, self._context.now_ms)
        self._longest = max(self._longest, len(prefetch.keys))
        self.calls.changes += 1

    def _missed(self, prefetch: Prefetch) -> None:
        """The store has nothing that is worth it."""
        self.calls.drop(prefetch, prefetch.pieces)
        self.calls.forget_query(prefetch)
        self._ask_later(prefetch)
        prefetch.happens(Event.MISS, self._context.now_ms)

    def _ask_later(self, prefetch: Prefetch) -> None:
        """What the store has not, another server may be writing."""
        context, prefetch.again_ms = self._context, None
        rest = len(prefetch.key) - prefetch.end * context.page_size
        if rest >= context.settings.prefetch_threshold and prefetch.repeats < len(AGAIN_MS):
            prefetch.again_ms = context.now_ms + AGAIN_MS[prefetch.repeats]
            prefetch.repeats += 1
            self.line.wake(prefetch, prefetch.again_ms)

    # ---- fetch ----

    def _came(self, outcomes: Sequence[int]) -> None:
        """What the store has answered to fetches."""
        for prefetch, end in self.calls.fetched(outcomes):
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
        """What is there of it now."""
        whole = held + prefetch.staged_from(held) >= prefetch.end
        event = Event.FULL if whole else Event.LACK
        if any(not piece.staged for piece in prefetch.pieces):
            event = Event.FETCH
        prefetch.happens(event, self._context.now_ms)

    # ---- ways out ----

    def _ask_anew(self, prefetch: Prefetch) -> bool:
        """The tree has lost what it had when the store was asked, and what is staged has nothing to
        hang below: ask once more, and keep it. False if it was asked often enough."""
        if prefetch.anews == MOST_ANEW:
            self._settle(prefetch)
            return False
        prefetch.anews += 1
        self.calls.forget_query(prefetch)
        prefetch.happens(Event.LOSE, self._context.now_ms)
        self._to_ask[prefetch] = None
        return True

    def _settle(self, prefetch: Prefetch) -> None:
        """No more will come: the request runs with what is in the staging buffer."""
        held, _ = self._match(prefetch)
        staged = prefetch.staged_from(held)
        self._leaves_the_line(prefetch)
        self._cut(prefetch, held + staged if staged else prefetch.begin)
        prefetch.anews, prefetch.again_ms = MOST_ANEW, None
        prefetch.happens(Event.SETTLE if staged else Event.MISS, self._context.now_ms)

    def _end(self, prefetch: Prefetch) -> None:
        """Nobody wants it any more."""
        self.line.remove(prefetch)
        if not len(self.line):
            self._longest = 0
        self._leaves_the_line(prefetch)
        self.calls.drop(prefetch, prefetch.pieces)
        self._context.times.ended(prefetch, self._context.now_ms)

    def _leaves_the_line(self, prefetch: Prefetch) -> None:
        """It asks for nothing more. Waiting for the staging buffer, it may have kept those behind
        it from being checked."""
        self.calls.changes += prefetch.state is State.FOUND
        self.calls.forget_query(prefetch)
        self._asks_no_more(prefetch)

    def _cut(self, prefetch: Prefetch, end: int) -> None:
        """The hit ends at page ``end``."""
        pages = max(0, end - prefetch.begin)
        lost = max(0, len(prefetch.keys) - pages) * self._context.page_size
        self._context.counters["prefetch_unfulfilled_tokens"] += lost
        prefetch.hashes, prefetch.keys = prefetch.hashes[:pages], prefetch.keys[:pages]
        prefetch.unready = None
        self.calls.drop(prefetch, [one for one in prefetch.pieces if one.stop > end])

    def _match(self, prefetch: Prefetch) -> tuple[int, TreeNode]:
        """Pages of the prompt that the tree has, and the node in which they end."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = self._context.tree.match_prefix(MatchPrefixParams(key=prefetch.key))
        return len(match.device_indices) // self._context.page_size, match.last_device_node

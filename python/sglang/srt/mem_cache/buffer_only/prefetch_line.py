"""All prefetches of one rank, in the order of the queue.

A request's prefix is looked for in the store when it arrives, and fetched into the staging buffer
by its place in line, as far as the staging buffer reaches. It is copied to the device when the
request is admitted (``load_back``). A hit that is larger than the staging buffer goes through it in
rounds, as soon as the scheduler waits for that request: half of the staging buffer is copied into
the tree, where it can be evicted like anything else, while the other half is fetched.

Only the scheduler thread changes a prefetch, by what the ranks agreed on and by what they all have
(queue and tree), so that the states are the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.calls import QUERY_THREADS, Calls
from sglang.srt.mem_cache.buffer_only.load_back import LoadBacks
from sglang.srt.mem_cache.buffer_only.metrics import ended
from sglang.srt.mem_cache.buffer_only.nodes import page_hashes
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, Query, State, WaitingLine
from sglang.srt.mem_cache.buffer_only.transfer_vote import QUERY_SLOTS, TransferVote
from sglang.srt.mem_cache.buffer_only.worth import Choice, Chooser, Mean, Speeds

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

#: Requests for which the tree is looked at in a step, to fetch for them.
MOST_LOOKED_AT = 16
#: How often all is asked for anew where the tree has lost what came before.
MOST_ANEW = 3


class PrefetchLine:
    """All prefetches of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.line = WaitingLine()
        #: Those that want to ask the store.
        self._to_ask: dict[Prefetch, None] = {}
        self.calls = Calls(context)
        self._chooser = Chooser(
            page_size=context.page_size,
            page_bytes=context.page_bytes,
            piece_pages=self.calls.piece_pages,
            always=context.settings.always_fetch,
            choices=context.choices,
        )
        self.load_backs = LoadBacks(context, self.calls)
        #: Whether nobody is admitted in this step.
        self._full = False
        self._step_ms = Mean()
        #: What was known when the line was last gone through to its end, or to where nobody behind
        #: gets more.
        self._gone_through: object = None
        #: Those that the scheduler asked for in the last step, and in this one, in its order.
        self._asked_before: dict[Prefetch, None] = {}
        self._asked: dict[Prefetch, None] = {}

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way; what the store was given up for does not
        count."""
        calls = len(self.calls.queries) + self.calls.running
        return bool(len(self.line) or calls or len(self.load_backs))

    # ---- what the scheduler says and asks ----

    def request(self, rid: str, key: RadixKey) -> None:
        """Fetch what the store has of ``key`` beyond what the tree holds."""
        self.cancel(rid)
        if len(key) >= self._context.settings.prefetch_threshold:
            prefetch = Prefetch(rid, key, self._context.now_ms)
            self.line.add(prefetch)
            self._to_ask[prefetch] = None

    def in_line(self, rids: Iterable[str], full: bool = False) -> None:
        """The requests that wait, first in line first; told in each step. Who is not among them is
        gone. ``full``: none of them is admitted in this step, whoever it is."""
        self._full = full
        self._asked_before, self._asked = self._asked, {}
        if not len(self.line):
            return
        gone, moved = self.line.arrange(list(rids))
        for prefetch in gone:
            self._end(prefetch)
            self._context.tree.prefetch_loaded_tokens_by_reqid.pop(prefetch.rid, None)
        if moved:
            self.calls.let_go += 1  # who brings pages for whom is another question now

    def ready(self, rid: str) -> bool:
        """Whether the request can be scheduled; asked in each step that could admit it. Its time
        limit counts only the time of these steps, and is checked here alone."""
        prefetch = self.line.get(rid)
        if prefetch is None:
            return True
        self._asked[prefetch] = None
        if self._ready(prefetch):
            prefetch.waited_ms = None
            return True
        calls, settings = self.calls, self._context.settings
        if settings.policy == "best_effort":
            return True
        if calls.stuck and prefetch.state in (State.WAITING, State.FOUND):
            self._settle(prefetch)
            return True
        if len(prefetch.keys) > calls.most:
            held, node = self._context.match(prefetch.key)
            is_long = prefetch.end - held > calls.most
            if is_long and not self.load_backs.has_room(prefetch, held, node):
                # The next round has no room. The scheduler finds no room for the request either and
                # admits none behind it, because those would take every page that is freed.
                prefetch.waited_ms = None
                return True
        if prefetch.waited_ms is None:
            prefetch.waited_ms, prefetch.all_comes = 0, None
            calls.changes += 1
        if prefetch.waited_ms <= settings.timeout_ms(len(prefetch.key)):
            return False
        self._context.counters["prefetch_timeouts"] += 1
        self._settle(prefetch)
        return True

    def loadable(self, rid: str, held: int, most: int) -> int:
        """Tokens of the request in the staging buffer that continue the ``held`` tokens that the
        tree has, up to the first ``most`` tokens of the prompt."""
        prefetch, page = self.line.get(rid), self._context.page_size
        if prefetch is None or self._full:  # SGLang loads also for one that then does not fit
            return 0
        return max(0, min(prefetch.staged_from(held // page), (most - held) // page)) * page

    def load(self, rid: str, held: int, tokens: int) -> tuple[torch.Tensor, TreeNode] | None:
        """The request is admitted: ``tokens`` staged tokens enter the tree behind the ``held`` ones
        that it has, and are copied under the batch that is being formed.

        Returns:
            The device slots, and the node in which they end; None where the device has no room.
        """
        prefetch, page = self.line.get(rid), self._context.page_size
        assert prefetch is not None, "who has staged pages is in line"
        loaded = self.load_backs.add(prefetch, held // page, (held + tokens) // page)
        if loaded is not None:
            self._end(prefetch)
        return loaded

    def cancel(self, rid: str) -> None:
        """The request is gone, runs, or asks again."""
        prefetch = self.line.get(rid)
        if prefetch is not None:
            self._end(prefetch)

    def cancel_all(self) -> None:
        """Nobody wants any of them: the tree is about to be emptied, or what the store was found to
        have would enter it as stored although it was cleared. What the store still fills is kept.
        """
        for prefetch in self.line:
            self._end(prefetch)

    # ---- a step ----

    def apply(self, agreed: TransferVote, passed_ms: int, was_idle: bool) -> None:
        """Act on what has ended on all ranks. ``passed_ms``: duration of the last step;
        ``was_idle``: it ran no batch."""
        self._step_ms.add(0 if was_idle else passed_ms)
        for prefetch in self._asked_before | self._asked:
            if prefetch.waited_ms is not None:
                prefetch.waited_ms += passed_ms
        self.load_backs.finish(agreed.load_back_copies)
        self._chooser.speeds = Speeds(
            call_us=-agreed.minus_call_us,
            call_bytes=agreed.call_bytes,
            query_us=-agreed.minus_query_us,
            tokens_per_s=agreed.tokens_per_s,
            # A full server admits no request meanwhile, so that waiting for an answer costs none.
            step_us=0 if self._full else int(self._step_ms.value * 1000),
        )
        for prefetch in self.calls.fetched(agreed.fetches):
            if prefetch.state in (State.WAITING, State.QUERYING):
                continue  # it is queried again, and keeps what is in the staging buffer
            if prefetch.keys:
                prefetch.all_comes = None
                self._look(prefetch, self._context.match(prefetch.key)[0])
            else:
                self._settle(prefetch)
        for prefetch, query, hashes, keys in self.calls.answered(agreed.queries):
            self._answered(prefetch, query, hashes, keys)

    def launch(self) -> None:
        """Start what calls and stage have room for, first in line first."""
        if len(self.line) and not self.calls.stuck:
            self._ask()
            self._fetch_in_line()
            self._load_ahead()
        self.load_backs.launch(apart=True)

    # ---- query ----

    def _ask(self) -> None:
        """Ask the store for all that its slots have room for."""
        if not self._to_ask or len(self.calls.queries) == QUERY_SLOTS:
            return
        for prefetch, ahead in self.line.ahead(self._context.page_size):
            if prefetch in self._to_ask:
                del self._to_ask[prefetch]
                self._query(prefetch, ahead)
                if not self._to_ask or len(self.calls.queries) == QUERY_SLOTS:
                    return

    def _query(self, prefetch: Prefetch, ahead: int) -> None:
        """Ask the store for it; ``ahead``: tokens that those in line before it will compute."""
        context, calls, chooser = self._context, self.calls, self._chooser
        begin, node = self._context.match(prefetch.key)
        if len(prefetch.key) - begin * context.page_size < context.settings.prefetch_threshold:
            self._miss(prefetch, begin)  # the tree has it by now
            return
        wanted = len(prefetch.key) // context.page_size - begin
        queries = len(calls.queries) // QUERY_THREADS + 1
        if not prefetch.pieces and not chooser.asks(wanted, calls.running, ahead, queries):
            # A trial waits for nobody's answer but its own.
            if calls.queries or not chooser.trial_is_due:
                # It need not even wait for an answer, which takes a step: that may be a batch.
                prefetch.choice = chooser.chosen(Choice.UNASKED)
                self._miss(prefetch, begin)
                return
            # The store may have nothing: those that come meanwhile, and then, are no trials.
            prefetch.trial, chooser.slower_in_a_row = True, 0
        last_hash = page_hashes(node, context.page_size)[-1] if begin else None
        calls.ask(prefetch, begin, last_hash, context.prefix_keys(node))
        prefetch.enter(State.QUERYING, context.now_ms)

    def _answered(
        self, prefetch: Prefetch, query: Query, hashes: list[str], keys: list[str]
    ) -> None:
        """The store has these pages of it."""
        tokens = len(keys) * self._context.page_size
        if tokens < self._context.settings.prefetch_threshold:  # which is a page at least
            self._miss(prefetch, query.begin)
            return
        prefetch.begin, prefetch.prefix_keys = query.begin, query.prefix_keys
        prefetch.hashes, prefetch.keys = hashes, keys
        self.calls.drop(prefetch, [one for one in prefetch.pieces if one.stop > prefetch.end])
        self._context.counters["prefetch_hit_tokens"] += max(0, tokens - prefetch.hit_tokens)
        prefetch.hit_tokens = max(tokens, prefetch.hit_tokens)
        prefetch.unready = prefetch.all_comes = None
        if not prefetch.pieces:  # else the calls that are under way for it would count against it
            prefetch.choice = None
        prefetch.enter(State.FOUND, self._context.now_ms)
        self.calls.changes += 1

    # ---- who is fetched for ----

    def _fetch_in_line(self) -> None:
        """Fetch what is missing, first in line first, unless nothing has changed since."""
        calls = self.calls
        known = (self._asked_before, calls.changes, calls.let_go, calls.capacity)
        if known == self._gone_through:
            return
        before, looked_at = self.line.ahead(self._context.page_size), 0
        for prefetch in self.line:
            if prefetch.state is not State.FOUND and prefetch.state is not State.FETCHING:
                continue
            if prefetch.all_comes == calls.let_go:
                continue
            if calls.capacity < calls.least_pages and self._passed_over(prefetch):
                continue
            looked_at += 1
            if not self._fetch(prefetch, before):
                break
            if looked_at == MOST_LOOKED_AT:
                return
        self._gone_through = known

    def _fetch(self, prefetch: Prefetch, before: Iterator[tuple[Prefetch, int]]) -> bool:
        """Bring what is missing, as far as stage and slots go; False where nobody behind it gets
        more. ``before`` goes through the line: the tokens that those before each will compute."""
        calls = self.calls
        held, _ = self._context.match(prefetch.key)
        if held < prefetch.begin:
            self._query_again(prefetch)
            return True
        calls.drop(prefetch, [one for one in prefetch.pieces if one.staged and one.stop <= held])
        if prefetch.choice is None and calls.can_fetch and held < prefetch.end:
            ahead = 0
            if not self._is_next(prefetch):
                ahead = next(tokens for one, tokens in before if one is prefetch)
            prefetch.choice = self._chooser.choose(
                prefetch.end - held, calls.running, ahead, prefetch.trial
            )
            prefetch.trial = False
        if prefetch.choice is Choice.SLOWER:
            self._settle(prefetch)
            return True
        whole = True
        while (gap := prefetch.missing(held, calls.piece_pages, calls.brought)) is not None:
            start, stop = gap
            least = min(stop - start, calls.least_pages)
            if calls.capacity < least and self._is_next(prefetch):
                self._take_from_the_last(prefetch, start, least)
            if calls.capacity < least or not calls.can_fetch:
                whole = False
                break
            calls.fetch(prefetch, start, min(stop, start + calls.capacity))
        self._look(prefetch, held)
        if whole:
            prefetch.all_comes = calls.let_go
        elif not prefetch.deferred:
            prefetch.deferred = True
            tokens = len(prefetch.keys) * self._context.page_size
            self._context.counters["prefetch_deferred_tokens"] += tokens
        return whole

    def _look(self, prefetch: Prefetch, held: int) -> None:
        """What is there of it now."""
        whole = held + prefetch.staged_from(held) >= prefetch.end
        state = State.STAGED if whole else State.FOUND
        if any(not piece.staged for piece in prefetch.pieces):
            state = State.FETCHING
        prefetch.enter(state, self._context.now_ms)

    def _take_from_the_last(self, prefetch: Prefetch, start: int, pages: int) -> None:
        """Free room for ``pages`` of ``prefetch``, for which the scheduler waits; the next one is
        page ``start``. Order: staged pages of requests behind it, last request first; its own
        pages behind ``start``, which are unusable until the evicted round is back; requests that
        the scheduler passes over."""
        for other in reversed([one for one in self.line if one.pieces]):
            if self.calls.capacity >= pages:
                return
            is_own = other is prefetch
            if other.place <= prefetch.place and not (is_own or self._passed_over(other)):
                continue
            staged = [p for p in other.pieces if p.staged and not (is_own and p.start < start)]
            self.calls.drop(other, staged)
            if staged and other.state not in (State.WAITING, State.QUERYING):
                self._look(other, 0)

    def _passed_over(self, prefetch: Prefetch) -> bool:
        """Whether the scheduler asked for somebody behind it in the last step, and not for it: it
        cannot run yet, such as one whose LoRA adapter has no slot."""
        asked = self._asked_before
        last = next(reversed(asked), None)
        return last is not None and prefetch not in asked and prefetch.place < last.place

    def _is_next(self, prefetch: Prefetch) -> bool:
        """True if the scheduler asked for it in this step or the last one."""
        return prefetch in self._asked_before or prefetch in self._asked

    # ---- into the tree ----

    def _load_ahead(self) -> None:
        """Of a hit that is larger than the staging buffer, copy what is in the staging buffer into
        the tree, if the scheduler waits for it and could admit it now. One copy at a time."""
        if len(self.load_backs):
            return
        most = self.calls.most
        for prefetch in [*self._asked_before, *self._asked]:
            here = self.line.get(prefetch.rid) is prefetch
            if here and prefetch.state in (State.FOUND, State.FETCHING):
                break
        else:
            return
        if len(prefetch.keys) <= most:
            return
        held, node = self._context.match(prefetch.key)
        pages = prefetch.staged_from(held)
        if prefetch.end - held <= most or pages < max(1, most // 2):
            return
        has_room = self.load_backs.has_room(prefetch, held, node)
        if has_room and self.load_backs.add(prefetch, held, held + pages) is None:
            self._settle(prefetch)  # it comes with what is staged, when there is room

    def _ready(self, prefetch: Prefetch) -> bool:
        """Whether all that will come is in the tree or in the staging buffer."""
        if prefetch.state in (State.WAITING, State.QUERYING):
            return False
        if prefetch.state is State.MISSED:
            held, _ = self._context.match(prefetch.key)
            return held >= prefetch.begin or not self._query_again(prefetch)
        inserts = self._context.tree.inserts  # nothing else makes the tree grow
        if prefetch.unready is not None and prefetch.state is not State.STAGED:
            before, held, node = prefetch.unready
            if before == inserts or self._reaches_no_further(prefetch, held, node):
                prefetch.unready = inserts, held, node
                return False
        held, node = self._context.match(prefetch.key)
        if held + prefetch.staged_from(held) >= prefetch.end:
            prefetch.unready = None
            return True
        prefetch.unready = inserts, held, node
        return prefetch.state is State.STAGED and not self._query_again(prefetch)

    def _reaches_no_further(self, prefetch: Prefetch, held: int, node: TreeNode) -> bool:
        """Whether the tree still ends for it where it did when it was last not ready: many wait,
        and matching all their prompts after each insert may take longer than a step."""
        page, now = self._context.page_size, time.monotonic()
        child_key = self._context.tree.get_child_key_fn
        if child_key(prefetch.key[held * page : (held + 1) * page]) in node.children:
            return False
        if node.parent is not None and node.parent.children.get(child_key(node.key)) is not node:
            return False  # it was evicted
        while node.parent is not None:
            node.last_access_time = now  # as a match would, so that it is not evicted
            node = node.parent
        return True

    # ---- ways out ----

    def _miss(self, prefetch: Prefetch, begin: int) -> None:
        """Record a miss: nothing will be fetched while the tree holds the first ``begin`` pages."""
        self.calls.drop(prefetch, prefetch.pieces)
        prefetch.begin, prefetch.hashes, prefetch.keys = begin, [], []
        prefetch.enter(State.MISSED, self._context.now_ms)

    def _query_again(self, prefetch: Prefetch) -> bool:
        """The tree lost the prefix that the staged pages continue: query again and keep the pages.
        Return False after ``MOST_ANEW`` queries."""
        if prefetch.anews == MOST_ANEW:
            self._settle(prefetch)
            return False
        prefetch.anews += 1
        self.calls.forget_query(prefetch)
        prefetch.enter(State.WAITING, self._context.now_ms)
        self._to_ask[prefetch] = None
        return True

    def _settle(self, prefetch: Prefetch) -> None:
        """No more will come: the request runs with what is in the staging buffer."""
        held, _ = self._context.match(prefetch.key)
        staged = prefetch.staged_from(held)
        self._leaves_the_line(prefetch)
        self.calls.cut(prefetch, held + staged if staged else prefetch.begin)
        prefetch.anews = MOST_ANEW
        prefetch.enter(State.STAGED if staged else State.MISSED, self._context.now_ms)

    def _end(self, prefetch: Prefetch) -> None:
        """Nobody wants it any more."""
        self.line.remove(prefetch)
        self._leaves_the_line(prefetch)
        self.calls.drop(prefetch, prefetch.pieces)
        ended(prefetch, self._context.now_ms, self._context.observe)

    def _leaves_the_line(self, prefetch: Prefetch) -> None:
        """It asks for nothing more. Waiting for the staging buffer, it may have kept those behind
        it from being checked."""
        self.calls.changes += prefetch.state is State.FOUND
        self.calls.forget_query(prefetch)
        self._to_ask.pop(prefetch, None)

"""All prefetches of one rank, in the order of the queue.

A request's prefix is looked for in the store when it arrives, and fetched into the staging buffer
by its place in line, as far as the staging buffer reaches. It is copied to the device when the
request is admitted (``load_back``). A hit that is larger than the staging buffer goes through it in
rounds, as soon as the scheduler waits for that request: half of the staging buffer is copied into
the tree, where it can be evicted like anything else, while the other half is fetched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import FETCH_SLOTS, TransferVote
from sglang.srt.mem_cache.buffer_only.calls import MAX_FETCHES
from sglang.srt.mem_cache.buffer_only.load_back import LoadBacks
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, State
from sglang.srt.mem_cache.buffer_only.prefetch_states import PrefetchStates
from sglang.srt.mem_cache.buffer_only.worth import Choice, Speeds

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

#: Requests for which the tree is looked at in a step, to fetch for them.
MOST_LOOKED_AT = 16
#: Of a prefetch all of whose pages its own pieces bring, whatever becomes of others.
OWN = -1


class PrefetchLine(PrefetchStates):
    """All prefetches of one rank."""

    @override
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.load_backs = LoadBacks(context)
        #: Whether nobody is admitted in this step.
        self._full = False
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
        """Whether the request can be scheduled; asked in each step that could admit it."""
        prefetch = self.line.get(rid)
        if prefetch is None:
            return True
        self._asked[prefetch] = None
        if self._ready(prefetch):
            prefetch.asked_ms = None
            return True
        if self._context.settings.policy == "best_effort":
            return True
        in_place = prefetch.keeps_place and prefetch.asked_ms is None
        if in_place and not self._has_room(prefetch, *self._match(prefetch)):
            # It stands where a request without a store would, for want of room: the scheduler
            # admits nobody behind one that does not fit.
            return True
        if prefetch.asked_ms is None:
            prefetch.asked_ms, prefetch.all_comes = self._context.now_ms, None
            limit_ms = self._context.settings.timeout_ms(len(prefetch.key))
            self.line.wake(prefetch, prefetch.asked_ms + int(limit_ms) + 1)
            self.calls.changes += 1
        return False

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
        loaded = self._load(prefetch, held // page, (held + tokens) // page)
        if loaded is not None:
            self._end(prefetch)
        return loaded

    def cancel(self, rid: str) -> None:
        """The request is gone, runs, or asks again."""
        prefetch = self.line.get(rid)
        if prefetch is not None:
            self._end(prefetch)

    # ---- a step ----

    def apply(self, agreed: TransferVote) -> None:
        """Act on what has ended on all ranks, and on time that has run out."""
        self.load_backs.finish(agreed.load_back_copies)
        self._chooser.speeds = Speeds(
            call_us=-agreed.minus_call_us,
            call_bytes=agreed.call_bytes,
            query_us=-agreed.minus_query_us,
            tokens_per_s=agreed.tokens_per_s,
        )
        self._came(agreed.fetches)
        for answered, query, hashes, keys in self.calls.answered(agreed.queries):
            if answered is not None:
                self._answered(answered, query, hashes, keys)
        now_ms, limit_ms = self._context.now_ms, self._context.settings.timeout_ms
        for prefetch in self.line.due(now_ms):
            asked_ms, again_ms = prefetch.asked_ms, prefetch.again_ms
            known = prefetch.state not in (State.WAITING, State.QUERYING)
            if asked_ms is not None and now_ms - asked_ms > limit_ms(len(prefetch.key)):
                self._time_is_over(prefetch)
            elif again_ms is not None and now_ms >= again_ms and known and prefetch.query is None:
                self._to_ask_again[prefetch] = None

    def launch(self) -> None:
        """Start what calls and stage have room for, first in line first."""
        if len(self.line):
            calls, overdue = self.calls, len(self.calls.fetches) - self.calls.running
            if calls.most < calls.least_pages or overdue >= FETCH_SLOTS - MAX_FETCHES:
                # Nothing can be fetched until an overdue call returns.
                for prefetch in self.line:
                    if prefetch.state in (State.WAITING, State.FOUND):
                        self._settle(prefetch)
            self._ask()
            self._fetch_in_line()
            if self._longest > self.calls.most:
                self._load_ahead()
        self.load_backs.launch(apart=True)

    def cancel_all(self) -> None:
        """Nobody wants any of them: the tree is about to be emptied, or what the store was found to
        have would enter it as stored although it was cleared. What the store still fills is kept.
        """
        for prefetch in self.line:
            self._end(prefetch)

    # ---- who is fetched for ----

    def _fetch_in_line(self) -> None:
        """Fetch what is missing, first in line first, unless nothing has changed since."""
        calls, asked = self.calls, len(self._asked_before)
        known = (asked, calls.changes, calls.let_go, calls.capacity)
        if known == self._gone_through:
            return
        before, looked_at = self.line.ahead(self._context.page_size), 0
        for prefetch in self.line:
            if prefetch.state is not State.FOUND and prefetch.state is not State.FETCHING:
                continue
            if prefetch.all_comes in (OWN, calls.let_go):
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
        held, _ = self._match(prefetch)
        if held < prefetch.begin:
            self._ask_anew(prefetch)
            return True
        calls.drop(prefetch, [one for one in prefetch.pieces if one.staged and one.stop <= held])
        if prefetch.choice is None and calls.can_fetch and held < prefetch.end:
            ahead = 0
            if prefetch.asked_ms is None:
                ahead = next(tokens for one, tokens in before if one is prefetch)
            choice = self._chooser.rule(calls.running, ahead)(prefetch.end - held)
            trial, prefetch.trial = prefetch.trial and choice is Choice.SLOWER, False
            prefetch.choice = self._chooser.chosen(Choice.TRIAL if trial else choice)
        if prefetch.choice is Choice.SLOWER:
            self._settle(prefetch)
            return True
        whole = True
        while (gap := prefetch.missing(held, calls.piece_pages, calls.brought)) is not None:
            start, stop = gap
            least = min(stop - start, calls.least_pages)
            if calls.capacity < least and self._is_next(prefetch):
                self._take_from_the_last(prefetch, least)
            if calls.capacity < least or not calls.can_fetch:
                whole = False
                break
            calls.fetch(prefetch, start, min(stop, start + calls.capacity))
        self._look(prefetch, held)
        if whole:
            own = prefetch.missing(held, 1, {}) is None
            prefetch.all_comes = OWN if own else calls.let_go
        elif not prefetch.deferred:
            prefetch.deferred = True
            tokens = len(prefetch.keys) * self._context.page_size
            self._context.counters["prefetch_deferred_tokens"] += tokens
        return whole

    def _take_from_the_last(self, prefetch: Prefetch, pages: int) -> None:
        """The scheduler waits for ``prefetch``: those behind it give back what they have staged,
        the last one first, until there is room for ``pages``; then those that it passes over."""
        for other in reversed([one for one in self.line if one.pieces]):
            if self.calls.capacity >= pages:
                return
            if other.place <= prefetch.place and not self._passed_over(other):
                continue
            staged = [piece for piece in other.pieces if piece.staged]
            self.calls.drop(other, staged)
            if staged:
                self._look(other, 0)

    def _passed_over(self, prefetch: Prefetch) -> bool:
        """Whether the scheduler asked for somebody behind it in the last step, and not for it: it
        cannot run yet, such as one whose LoRA adapter has no slot."""
        asked = self._asked_before
        last = next(reversed(asked), None)
        return last is not None and prefetch not in asked and prefetch.place < last.place

    def _is_next(self, prefetch: Prefetch) -> bool:
        """Whether the scheduler waits for it. It does not for one that it asked for and passes over
        now: those behind that one would wait until its time is over."""
        return prefetch.asked_ms is not None and not self._passed_over(prefetch)

    # ---- into the tree ----

    def _load_ahead(self) -> None:
        """Of a hit that is larger than the staging buffer, copy what is in the staging buffer into
        the tree, if the scheduler waits for it and could admit it now. One copy at a time."""
        most = self.calls.most
        for prefetch in self.line:
            if prefetch.state not in (State.FOUND, State.FETCHING) or not self._is_next(prefetch):
                continue
            if len(self.load_backs) or len(prefetch.keys) <= most:
                return
            held, node = self._match(prefetch)
            pages = prefetch.staged_from(held)
            if prefetch.end - held <= most or pages < max(1, most // 2):
                return
            if not self._has_room(prefetch, held, node):
                return
            if self._load(prefetch, held, held + pages) is None:
                self._settle(prefetch)  # it comes with what is staged, when there is room
            return

    def _time_is_over(self, prefetch: Prefetch) -> None:
        """It computes what has not come. But a hit that is larger than the staging buffer may only
        have had no room on the device: then its request keeps its place in line, and has its time
        once more when there is room."""
        held, node = self._match(prefetch)
        long = prefetch.end - held > self.calls.most
        if long and not prefetch.keeps_place and not self._has_room(prefetch, held, node):
            prefetch.keeps_place, prefetch.asked_ms = True, None
            return
        self._context.counters["prefetch_timeouts"] += 1
        self._settle(prefetch)

    def _has_room(self, prefetch: Prefetch, held: int, node: TreeNode) -> bool:
        """Whether its request could be admitted, with the ``held`` pages that end in ``node``. The
        copy locks them: those that run would be retracted for what a waiting request holds."""
        tree = self._context.tree
        tree.inc_lock_ref(node)
        try:
            return len(prefetch.key) - held * self._context.page_size <= tree.room()
        finally:
            tree.dec_lock_ref(node)

    def _load(
        self, prefetch: Prefetch, start: int, stop: int
    ) -> tuple[torch.Tensor, TreeNode] | None:
        """Staged pages enter the tree, and wait for the next copy."""
        used = [one for one in prefetch.pieces if one.staged and one.start < stop]
        loaded = self.load_backs.add(prefetch, start, stop, [one.staging for one in used])
        if loaded is not None:
            self.calls.hand_over(prefetch, used)
        return loaded

    def _ready(self, prefetch: Prefetch) -> bool:
        """Whether all that will come is in the tree or in the staging buffer."""
        if prefetch.state in (State.MISSED, State.WAITING, State.QUERYING):
            return prefetch.state is State.MISSED
        inserts = self._context.tree.inserts  # nothing else makes the tree grow
        if prefetch.unready is not None and prefetch.state is not State.STAGED:
            before, held, node = prefetch.unready
            if before == inserts or self._reaches_no_further(prefetch, held, node):
                prefetch.unready = inserts, held, node
                return False
        held, node = self._match(prefetch)
        if held + prefetch.staged_from(held) >= prefetch.end:
            prefetch.unready = None
            return True
        prefetch.unready = inserts, held, node
        return prefetch.state is State.STAGED and not self._ask_anew(prefetch)

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

"""All prefetches of one rank, in the order of the queue.

A request's prefix is queried when it arrives and fetched in queue order while staging pages last.
It is copied to the device when the request is admitted (``load_back``). A hit larger than the
staging buffer is loaded in rounds once the scheduler waits for its request: half of the buffer is
copied into the tree, where it is evictable, while the other half is fetched.

Contract:

- Thread: scheduler thread only.
- Ranks: each method runs in the same step on all ranks. States change only by agreed values
  (``TransferVote``), the queue and the tree, so that they are equal on all ranks; a difference ends
  the server through the checksum of started transfers.
- Locks: none is held. A tree lock exists only inside ``has_room`` and during copies
  (``load_back``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.calls import QUERY_THREADS, Calls
from sglang.srt.mem_cache.buffer_only.load_back import LoadBacks
from sglang.srt.mem_cache.buffer_only.metrics import observe_states
from sglang.srt.mem_cache.buffer_only.nodes import page_hashes
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, PrefetchState, Query, WaitingLine
from sglang.srt.mem_cache.buffer_only.transfer_vote import QUERY_SLOTS, TransferVote
from sglang.srt.mem_cache.buffer_only.worth import Chooser, FetchChoice, Mean, Speeds

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

#: Maximum requests matched per step for fetching, because a match of a long prompt takes time.
MAX_MATCHED = 16
#: Maximum repeated queries of a request whose prefix the tree has lost.
MAX_REQUERIES = 3


class PrefetchLine:
    """All prefetches of one rank; see the module's contract."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.line = WaitingLine()
        #: Prefetches to query.
        self._to_query: dict[Prefetch, None] = {}
        self.calls = Calls(context)
        self._chooser = Chooser(
            page_size=context.page_size,
            page_bytes=context.page_bytes,
            piece_pages=self.calls.piece_pages,
            always=context.settings.always_fetch,
            choices=context.choices,
        )
        self.load_backs = LoadBacks(context, self.calls)
        #: True if no request is admitted in this step.
        self._full = False
        self._step_ms = Mean()
        #: State fingerprint of the last complete pass of ``_start_fetches``; an equal fingerprint
        #: means that nothing changed and the pass is skipped.
        self._last_pass: object = None
        #: Prefetches that the scheduler checked (``ready``) in the last step and in this one, in
        #: its order.
        self._checked_before: dict[Prefetch, None] = {}
        self._checked: dict[Prefetch, None] = {}

    @property
    def busy(self) -> bool:
        """True if a request waits or a transfer is in flight. Overdue calls do not count."""
        calls = len(self.calls.queries) + self.calls.running
        return bool(len(self.line) or calls or len(self.load_backs))

    # ---- called by the scheduler ----

    def request(self, rid: str, key: RadixKey) -> None:
        """Queue a prefetch of the part of ``key`` that the store has and the tree has not."""
        self.cancel(rid)
        if len(key) >= self._context.settings.prefetch_threshold:
            prefetch = Prefetch(rid, key, self._context.now_ms)
            self.line.add(prefetch)
            self._to_query[prefetch] = None

    def set_queue(self, rids: Iterable[str], full: bool = False) -> None:
        """Set the waiting requests, in order; called in each step. Prefetches of other requests
        end. ``full``: no request is admitted in this step."""
        self._full = full
        self._checked_before, self._checked = self._checked, {}
        if not len(self.line):
            return
        gone, moved = self.line.arrange(list(rids))
        for prefetch in gone:
            self._end(prefetch)
            self._context.tree.prefetch_loaded_tokens_by_reqid.pop(prefetch.rid, None)
        if moved:
            self.calls.withdrawals += 1  # because pages may now be fetched by a later request

    def ready(self, rid: str) -> bool:
        """Return True if the request can be scheduled. Called in each step that could admit it. Its
        timeout counts only these steps and is checked only here."""
        prefetch = self.line.get(rid)
        if prefetch is None:
            return True
        self._checked[prefetch] = None
        if self._ready(prefetch):
            prefetch.waited_ms = None
            return True
        calls, settings = self.calls, self._context.settings
        if settings.policy == "best_effort":
            return True
        if calls.stuck and prefetch.state in (PrefetchState.WAITING, PrefetchState.FOUND):
            self._settle(prefetch)
            return True
        if len(prefetch.keys) > calls.max_capacity:
            tree_pages, node = self._context.match(prefetch.key)
            is_long = prefetch.end - tree_pages > calls.max_capacity
            if is_long and not self.load_backs.has_room(prefetch, tree_pages, node):
                # True, because the next round has no room: the scheduler then finds none for the
                # request either, and admits no later one, which would take each freed page.
                prefetch.waited_ms = None
                return True
        if prefetch.waited_ms is None:
            prefetch.waited_ms, prefetch.covered_at = 0, None
            calls.changes += 1
        if prefetch.waited_ms <= settings.timeout_ms(len(prefetch.key)):
            return False
        self._context.counters["prefetch_timeouts"] += 1
        self._settle(prefetch)
        return True

    def loadable(self, rid: str, tree_tokens: int, max_tokens: int) -> int:
        """Return the number of staged tokens that follow the tree's ``tree_tokens``, within the
        first ``max_tokens`` tokens of the prompt."""
        prefetch, page = self.line.get(rid), self._context.page_size
        # Nothing on a full server, because SGLang also loads for a request that then does not fit.
        if prefetch is None or self._full:
            return 0
        staged_pages = prefetch.staged_from(tree_tokens // page)
        return max(0, min(staged_pages, (max_tokens - tree_tokens) // page)) * page

    def load(self, rid: str, tree_tokens: int, tokens: int) -> tuple[torch.Tensor, TreeNode] | None:
        """Insert ``tokens`` staged tokens of an admitted request after its ``tree_tokens`` in the
        tree. They are copied under the batch that is being formed.

        Returns:
            The device slots and the last node; None if the device has no room.
        """
        prefetch, page = self.line.get(rid), self._context.page_size
        assert prefetch is not None, "a request with staged pages has a prefetch"
        loaded = self.load_backs.add(prefetch, tree_tokens // page, (tree_tokens + tokens) // page)
        if loaded is not None:
            self._end(prefetch)
        return loaded

    def cancel(self, rid: str) -> None:
        """End the prefetch of a request that is gone, runs, or is queued again."""
        prefetch = self.line.get(rid)
        if prefetch is not None:
            self._end(prefetch)

    def cancel_all(self) -> None:
        """End all prefetches, because the tree is about to be emptied or the keys or the content of
        the store change. Staging pages in use by store calls stay allocated."""
        for prefetch in self.line:
            self._end(prefetch)

    # ---- a step ----

    def apply(self, agreed: TransferVote, passed_ms: int, was_idle: bool) -> None:
        """Process the calls and copies that have ended on all ranks. ``passed_ms``: duration of the
        last step; ``was_idle``: it ran no batch."""
        self._step_ms.add(0 if was_idle else passed_ms)
        for prefetch in self._checked_before | self._checked:
            if prefetch.waited_ms is not None:
                prefetch.waited_ms += passed_ms
        self.load_backs.finish(agreed.load_back_copies)
        self._chooser.speeds = Speeds(
            call_us=-agreed.minus_call_us,
            call_bytes=agreed.call_bytes,
            query_us=-agreed.minus_query_us,
            tokens_per_s=agreed.tokens_per_s,
            # Zero on a full server, because it admits no request while one waits for an answer.
            step_us=0 if self._full else int(self._step_ms.value * 1000),
        )
        for prefetch in self.calls.take_fetched(agreed.fetches):
            if prefetch.state in (PrefetchState.WAITING, PrefetchState.QUERYING):
                continue  # it is queried again and keeps its staged pages
            if prefetch.keys:
                prefetch.covered_at = None
                self._update_state(prefetch, self._context.match(prefetch.key)[0])
            else:
                self._settle(prefetch)
        for prefetch, query, hashes, keys in self.calls.take_answered(agreed.queries):
            self._record_hit(prefetch, query, hashes, keys)

    def launch(self) -> None:
        """Start queries, fetches and copies in queue order, while slots and staging pages last."""
        if len(self.line) and not self.calls.stuck:
            self._start_queries()
            self._start_fetches()
            self._load_ahead()
        self.load_backs.launch(apart=True)

    # ---- query ----

    def _start_queries(self) -> None:
        """Start queries in queue order while slots last."""
        if not self._to_query or len(self.calls.queries) == QUERY_SLOTS:
            return
        for prefetch, tokens_ahead in self.line.ahead(self._context.page_size):
            if prefetch in self._to_query:
                del self._to_query[prefetch]
                self._query(prefetch, tokens_ahead)
                if not self._to_query or len(self.calls.queries) == QUERY_SLOTS:
                    return

    def _query(self, prefetch: Prefetch, tokens_ahead: int) -> None:
        """Query the store, unless the hit would be slower. ``tokens_ahead``: tokens that earlier
        requests will compute."""
        context, calls, chooser = self._context, self.calls, self._chooser
        begin, node = self._context.match(prefetch.key)
        if len(prefetch.key) - begin * context.page_size < context.settings.prefetch_threshold:
            self._miss(prefetch, begin)  # the tree has it by now
            return
        pages = len(prefetch.key) // context.page_size - begin
        queries = len(calls.queries) // QUERY_THREADS + 1
        if not prefetch.pieces and not chooser.asks(pages, calls.running, tokens_ahead, queries):
            # A trial needs idle query threads, or its request would also wait for other queries.
            if calls.queries or not chooser.trial_is_due:
                # No query, because waiting for its answer takes a step, which may be a long batch.
                prefetch.choice = chooser.chosen(FetchChoice.UNASKED)
                self._miss(prefetch, begin)
                return
            # Reset now, because the answer may be a miss: later requests are not trials too.
            prefetch.trial, chooser.slower_in_a_row = True, 0
        last_hash = page_hashes(node, context.page_size)[-1] if begin else None
        calls.query(prefetch, begin, last_hash, context.prefix_keys(node))
        prefetch.enter(PrefetchState.QUERYING, context.now_ms)

    def _record_hit(
        self, prefetch: Prefetch, query: Query, hashes: list[str], keys: list[str]
    ) -> None:
        """Record the pages that the store has for ``prefetch``."""
        tokens = len(keys) * self._context.page_size
        if tokens < self._context.settings.prefetch_threshold:
            self._miss(prefetch, query.begin)
            return
        prefetch.begin, prefetch.prefix_keys = query.begin, query.prefix_keys
        prefetch.hashes, prefetch.keys = hashes, keys
        self.calls.drop(prefetch, [piece for piece in prefetch.pieces if piece.stop > prefetch.end])
        self._context.counters["prefetch_hit_tokens"] += max(0, tokens - prefetch.hit_tokens)
        prefetch.hit_tokens = max(tokens, prefetch.hit_tokens)
        prefetch.unready = prefetch.covered_at = None
        if not prefetch.pieces:  # else its own calls in flight would count against the hit
            prefetch.choice = None
        prefetch.enter(PrefetchState.FOUND, self._context.now_ms)
        self.calls.changes += 1

    # ---- fetch ----

    def _start_fetches(self) -> None:
        """Fetch missing pages in queue order, unless nothing has changed since the last pass."""
        calls = self.calls
        fingerprint = (self._checked_before, calls.changes, calls.withdrawals, calls.capacity)
        if fingerprint == self._last_pass:
            return
        ahead, matched = self.line.ahead(self._context.page_size), 0
        for prefetch in self.line:
            if (
                prefetch.state is not PrefetchState.FOUND
                and prefetch.state is not PrefetchState.FETCHING
            ):
                continue
            if prefetch.covered_at == calls.withdrawals:
                continue
            if calls.capacity < calls.min_call_pages and self._is_passed_over(prefetch):
                continue
            matched += 1
            if not self._fetch(prefetch, ahead):
                break
            if matched == MAX_MATCHED:
                return
        self._last_pass = fingerprint

    def _fetch(self, prefetch: Prefetch, ahead: Iterator[tuple[Prefetch, int]]) -> bool:
        """Fetch missing pages of ``prefetch`` while slots and staging pages last. Return False if
        they ran out. ``ahead``: the pass's iterator of ``WaitingLine.ahead``."""
        calls = self.calls
        tree_pages, _ = self._context.match(prefetch.key)
        if tree_pages < prefetch.begin:
            self._query_again(prefetch)
            return True
        calls.drop(prefetch, [p for p in prefetch.pieces if p.staged and p.stop <= tree_pages])
        if prefetch.choice is None and calls.can_fetch and tree_pages < prefetch.end:
            tokens_ahead = 0
            if not self._is_next(prefetch):
                tokens_ahead = next(tokens for other, tokens in ahead if other is prefetch)
            prefetch.choice = self._chooser.choose(
                prefetch.end - tree_pages, calls.running, tokens_ahead, prefetch.trial
            )
            prefetch.trial = False
        if prefetch.choice is FetchChoice.SLOWER:
            self._settle(prefetch)
            return True
        is_covered = True
        while (
            gap := prefetch.missing(tree_pages, calls.piece_pages, calls.fetched_by)
        ) is not None:
            start, stop = gap
            min_pages = min(stop - start, calls.min_call_pages)
            if calls.capacity < min_pages and self._is_next(prefetch):
                self._free_capacity(prefetch, start, min_pages)
            if calls.capacity < min_pages or not calls.can_fetch:
                is_covered = False
                break
            calls.fetch(prefetch, start, min(stop, start + calls.capacity))
        self._update_state(prefetch, tree_pages)
        if is_covered:
            prefetch.covered_at = calls.withdrawals
        elif not prefetch.deferred:
            prefetch.deferred = True
            tokens = len(prefetch.keys) * self._context.page_size
            self._context.counters["prefetch_deferred_tokens"] += tokens
        return is_covered

    def _update_state(self, prefetch: Prefetch, tree_pages: int) -> None:
        """Enter STAGED, FETCHING or FOUND by the pieces of ``prefetch``."""
        is_complete = tree_pages + prefetch.staged_from(tree_pages) >= prefetch.end
        state = PrefetchState.STAGED if is_complete else PrefetchState.FOUND
        if any(not piece.staged for piece in prefetch.pieces):
            state = PrefetchState.FETCHING
        prefetch.enter(state, self._context.now_ms)

    def _free_capacity(self, prefetch: Prefetch, start: int, pages: int) -> None:
        """Free ``pages`` staging pages for ``prefetch``, which the scheduler waits for and which is
        missing page ``start``. Take, in this order: staged pages of later requests, the last one
        first; its own pages after ``start``, which are unusable until the evicted round is back;
        pages of requests that the scheduler passes over."""
        for other in reversed([waiting for waiting in self.line if waiting.pieces]):
            if self.calls.capacity >= pages:
                return
            is_own = other is prefetch
            if other.place <= prefetch.place and not (is_own or self._is_passed_over(other)):
                continue
            staged = [p for p in other.pieces if p.staged and not (is_own and p.start < start)]
            self.calls.drop(other, staged)
            if staged and other.state not in (PrefetchState.WAITING, PrefetchState.QUERYING):
                self._update_state(other, 0)

    def _is_passed_over(self, prefetch: Prefetch) -> bool:
        """Return True if the scheduler checked a later request in the last step and not this one,
        which then cannot run yet (for example, its LoRA adapter has no slot)."""
        checked = self._checked_before
        last = next(reversed(checked), None)
        return last is not None and prefetch not in checked and prefetch.place < last.place

    def _is_next(self, prefetch: Prefetch) -> bool:
        """Return True if the scheduler checked it in this step or the last one."""
        return prefetch in self._checked_before or prefetch in self._checked

    # ---- into the tree ----

    def _load_ahead(self) -> None:
        """Copy the staged part of a hit larger than the staging buffer into the tree, if the
        scheduler waits for its request and could admit it now. One copy at a time."""
        if len(self.load_backs):
            return
        capacity = self.calls.max_capacity
        for prefetch in [*self._checked_before, *self._checked]:
            waits = self.line.get(prefetch.rid) is prefetch
            if waits and prefetch.state in (PrefetchState.FOUND, PrefetchState.FETCHING):
                break
        else:
            return
        if len(prefetch.keys) <= capacity:
            return
        tree_pages, node = self._context.match(prefetch.key)
        pages = prefetch.staged_from(tree_pages)
        if prefetch.end - tree_pages <= capacity or pages < max(1, capacity // 2):
            return
        has_room = self.load_backs.has_room(prefetch, tree_pages, node)
        if has_room and self.load_backs.add(prefetch, tree_pages, tree_pages + pages) is None:
            self._settle(prefetch)  # it is admitted with its staged pages once there is room

    def _ready(self, prefetch: Prefetch) -> bool:
        """Return True if every page that will arrive is in the tree or in the staging buffer."""
        if prefetch.state in (PrefetchState.WAITING, PrefetchState.QUERYING):
            return False
        if prefetch.state is PrefetchState.MISSED:
            tree_pages, _ = self._context.match(prefetch.key)
            return tree_pages >= prefetch.begin or not self._query_again(prefetch)
        inserts = self._context.tree.inserts  # nothing else makes the tree grow
        if prefetch.unready is not None and prefetch.state is not PrefetchState.STAGED:
            before, tree_pages, node = prefetch.unready
            if before == inserts or self._match_is_unchanged(prefetch, tree_pages, node):
                prefetch.unready = inserts, tree_pages, node
                return False
        tree_pages, node = self._context.match(prefetch.key)
        if tree_pages + prefetch.staged_from(tree_pages) >= prefetch.end:
            prefetch.unready = None
            return True
        prefetch.unready = inserts, tree_pages, node
        return prefetch.state is PrefetchState.STAGED and not self._query_again(prefetch)

    def _match_is_unchanged(self, prefetch: Prefetch, tree_pages: int, node: TreeNode) -> bool:
        """Return True if a match of ``prefetch`` would again end in ``node``, after ``tree_pages``.
        Used instead of a match, because matching every waiting prompt after each insert may take
        longer than a step."""
        page, now = self._context.page_size, time.monotonic()
        child_key = self._context.tree.get_child_key_fn
        if child_key(prefetch.key[tree_pages * page : (tree_pages + 1) * page]) in node.children:
            return False
        if node.parent is not None and node.parent.children.get(child_key(node.key)) is not node:
            return False  # ``node`` was evicted
        while node.parent is not None:
            node.last_access_time = now  # as a match does, so that the path is not evicted first
            node = node.parent
        return True

    # ---- end of a prefetch ----

    def _miss(self, prefetch: Prefetch, begin: int) -> None:
        """Enter MISSED: nothing is fetched while the tree holds the first ``begin`` pages."""
        self.calls.drop(prefetch, prefetch.pieces)
        prefetch.begin, prefetch.hashes, prefetch.keys = begin, [], []
        prefetch.enter(PrefetchState.MISSED, self._context.now_ms)

    def _query_again(self, prefetch: Prefetch) -> bool:
        """Query again and keep the staged pages, because the tree lost the prefix before them.
        Settle and return False after ``MAX_REQUERIES`` queries."""
        if prefetch.requeries == MAX_REQUERIES:
            self._settle(prefetch)
            return False
        prefetch.requeries += 1
        self.calls.forget_query(prefetch)
        prefetch.enter(PrefetchState.WAITING, self._context.now_ms)
        self._to_query[prefetch] = None
        return True

    def _settle(self, prefetch: Prefetch) -> None:
        """Stop fetching: the request runs with the pages that are staged."""
        tree_pages, _ = self._context.match(prefetch.key)
        staged = prefetch.staged_from(tree_pages)
        self._stop_waiting(prefetch)
        self.calls.truncate(prefetch, tree_pages + staged if staged else prefetch.begin)
        prefetch.requeries = MAX_REQUERIES
        prefetch.enter(
            PrefetchState.STAGED if staged else PrefetchState.MISSED, self._context.now_ms
        )

    def _end(self, prefetch: Prefetch) -> None:
        """Remove ``prefetch`` and release its pages."""
        self.line.remove(prefetch)
        self._stop_waiting(prefetch)
        self.calls.drop(prefetch, prefetch.pieces)
        observe_states(prefetch, self._context.now_ms, self._context.observe)

    def _stop_waiting(self, prefetch: Prefetch) -> None:
        """Cancel the query of ``prefetch``, sent or not."""
        # A prefetch that waited for staging pages may have ended the last pass before later ones.
        self.calls.changes += prefetch.state is PrefetchState.FOUND
        self.calls.forget_query(prefetch)
        self._to_query.pop(prefetch, None)

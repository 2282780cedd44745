"""What admitted requests hold and may still need of the pool, as sums with one owner.

A request is entered when it gets its pages and leaves when SGLang's release reaches the tree. In
between ``Claims`` is told of it: its prompt is shared, it begins to run, its transfer is given up.
So admission asks for a number where it would have to walk all requests and their paths in the tree.
``invariants.claims_problems`` walks them, and compares.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.decode.admission import (
    Claim,
    GrowthSum,
    Track,
    entering,
    expected_length,
    final_length,
    growth,
)
from sglang.srt.disaggregation.delta.pages import page_ceil

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode


class Stage(Enum):
    """What a request that holds pages does."""

    #: It is in transfer or waits for a slot in the batch, and cannot be retracted.
    ENTERING = auto()
    RUNNING = auto()
    #: It was given up; prefill may still write to its pages. It needs no more than them.
    DEFERRED = auto()


@dataclass(eq=False)
class Holding:
    """One request's part of the sums. Tokens of whole pages, except ``allocated``."""

    req: Req
    #: The deepest tree node that it shares.
    node: TreeNode
    shared: int
    allocated: int
    stage: Stage
    #: What it reserves until it runs; and then its track in the sum of those that run.
    reserved: int = 0
    track: Track | None = None
    #: What it takes to end: beyond what it holds where it does not run yet, in all where it runs.
    need: int = 0
    #: With speculation: from which length on, and up to which one, the sums are right for it.
    since: int = 0
    until: int = 0

    def private(self, page: int) -> int:
        """What it holds outside the tree while it does not run."""
        return page_ceil(self.allocated, page) - self.shared


class Needs:
    """Needs in order, the largest found at once."""

    def __init__(self) -> None:
        self._ordered: list[tuple[int, int]] = []

    def add(self, holding: Holding) -> None:
        """Count a holding's need."""
        insort(self._ordered, (holding.need, id(holding.req)))

    def remove(self, holding: Holding) -> None:
        """Count it no longer."""
        del self._ordered[bisect_left(self._ordered, (holding.need, id(holding.req)))]

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def largest(self) -> int:
        """The largest need; 0 where there is none."""
        return self._ordered[-1][0] if self._ordered else 0

    def above(self, limit: int) -> list[int]:
        """The ids of the requests that need more than ``limit``, the neediest last."""
        at = bisect_left(self._ordered, (limit + 1, -1))
        return [number for _, number in self._ordered[at:]]


class Claims:
    """The claims on one decode pool. ``cap``: what a running request reserves at most, tokens.

    ``step``: with speculation, the tokens that a step wants free for each request; else 0.
    """

    def __init__(self, cap: int, page: int, step: int = 0) -> None:
        self.cap, self.page, self.step = max(cap, step), page, step
        #: The cap of a request that does not run yet; at least a page, like the flag itself.
        self.entry_cap = max(cap // 2, page, step)
        #: By the id of the request, which the holding keeps alive.
        self._holdings: dict[int, Holding] = {}
        self._running: dict[int, Holding] = {}
        self._growth = GrowthSum(self.cap, page)
        self._entering = 0
        self._entering_needs, self._running_needs = Needs(), Needs()
        #: When requests will have generated more than was expected of them.
        self._outgrow: list[tuple[int, int]] = []
        #: How many requests that do not run share a tree node, by its id; and their tokens.
        self._pins: dict[int, int] = {}
        self._pinned = 0
        #: A running request that could not end when that was asked last.
        self._witness: Holding | None = None

    # ---- what happens to a request ----

    def entered(self, req: Req, node: TreeNode, shared: int, allocated: int) -> None:
        """``req`` holds ``allocated`` tokens; the tree shares ``shared`` of them, to ``node``."""
        holding = Holding(req, node, shared, allocated, Stage.ENTERING)
        claim = entering(Claim(allocated, final_length(req, self.step)), self.step)
        holding.reserved = growth(claim, self.entry_cap, self.page)
        whole = page_ceil(allocated, self.page)
        holding.need = page_ceil(expected_length(req, allocated, self.step), self.page) - whole
        self._holdings[id(req)] = holding
        self._entering += holding.reserved
        self._entering_needs.add(holding)
        self._pin(holding)

    def shared(self, req: Req) -> None:
        """The tree shares more of ``req`` than before, if it holds anything."""
        holding = self._holdings.get(id(req))
        if holding is None or holding.stage is Stage.RUNNING:
            return
        self._unpin(holding)
        holding.node, holding.shared = req.last_node, req.cache_protected_len
        self._pin(holding)

    def started(self, req: Req) -> None:
        """``req`` runs from the next decode step on."""
        holding = self._holdings[id(req)]
        self._no_longer_entering(holding)
        self._unpin(holding)
        self.catch_up()
        holding.stage = Stage.RUNNING
        self._running[id(req)] = holding
        self._count(holding)

    def deferred(self, req: Req) -> None:
        """The transfer of ``req`` was given up, and the free of its pages is deferred."""
        holding = self._holdings[id(req)]
        self._no_longer_entering(holding)
        holding.stage = Stage.DEFERRED

    def left(self, req: Req) -> None:
        """``req`` holds nothing any more. Nothing happens if it did not before."""
        holding = self._holdings.pop(id(req), None)
        if holding is None:
            return
        if holding.stage is not Stage.RUNNING:
            self._unpin(holding)
        if holding.stage is Stage.ENTERING:
            self._no_longer_entering(holding)
        elif holding.track is not None:
            self.catch_up()
            self._growth.remove(holding.track)
            self._running_needs.remove(holding)
            del self._running[id(req)]
            if self._witness is holding:
                self._witness = None

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The tree put ``upper`` above ``lower``; together they are what ``lower`` was."""
        count = self._pins.get(lower.id)
        if count is not None:
            self._pins[upper.id] = count

    def __len__(self) -> int:
        """How many requests hold pages."""
        return len(self._holdings)

    # ---- what admission asks ----

    @property
    def reserved(self) -> int:
        """What all of them together may still need before anybody is retracted."""
        self.catch_up()
        return self._entering + self._growth.total

    @property
    def pinned(self) -> int:
        """Tokens of requests that cannot be retracted, in the tree and outside."""
        return self._pinned

    def unpinned(self, node: TreeNode | None) -> int:
        """Tokens from ``node`` up that would be pinned with it."""
        return _below(node, self._pins)

    def everyone_can_finish(
        self, node: TreeNode | None, private: int, need: int, total: int
    ) -> bool:
        """Whether every request could still end, the running ones but itself retracted, after one
        more has entered: with ``private`` tokens of its own below ``node``, and in ``need`` of so
        many more.

        Requests that do not run yet cannot be retracted, so what they hold is out of reach of all
        others; and once one of them runs, it must find the memory for the rest of its answer.
        """
        self.catch_up()
        if not self._running and not self._entering_needs:
            return True  # it will have the pool for itself
        free = total - self._pinned - private - self.unpinned(node)
        if max(need, self._entering_needs.largest) > free:
            return False
        if self._running_needs.largest <= free:
            return True
        # Some count on what they share with pinned requests. Whoever could not end is asked first.
        path = _ids(node)
        witness = self._witness
        if witness is not None and not self._ends(witness, path, free):
            return False
        for number in reversed(self._running_needs.above(free)):
            if not self._ends(self._running[number], path, free):
                self._witness = self._running[number]
                return False
        return True

    def _ends(self, running: Holding, path: set[int], free: int) -> bool:
        """Whether ``free`` tokens, and what it shares with pinned requests, are enough."""
        req = running.req
        own = req.cache_protected_len - _below(req.last_node, self._pins, path)
        return bool(running.need - own <= free)

    # ---- the sums ----

    def _pin(self, holding: Holding) -> None:
        self._pinned += holding.private(self.page)
        node = holding.node
        while node.parent is not None:
            count = self._pins.get(node.id, 0)
            if count == 0:
                self._pinned += len(node.key)
            self._pins[node.id] = count + 1
            node = node.parent

    def _unpin(self, holding: Holding) -> None:
        self._pinned -= holding.private(self.page)
        node = holding.node
        while node.parent is not None:
            self._pins[node.id] -= 1
            if self._pins[node.id] == 0:
                del self._pins[node.id]
                self._pinned -= len(node.key)
            node = node.parent

    def _no_longer_entering(self, holding: Holding) -> None:
        self._entering -= holding.reserved
        self._entering_needs.remove(holding)

    def _expect(self, holding: Holding) -> None:
        """File how much a running request is expected to need, and until when that is right."""
        req = holding.req
        expected = expected_length(req, req.kv_allocated_len)
        holding.need = page_ceil(expected + self.step, self.page)
        self._running_needs.add(holding)
        if not self.step and expected < final_length(req):
            until = self._growth.steps + expected - req.kv_allocated_len
            heapq.heappush(self._outgrow, (until, id(req)))

    def catch_up(self) -> None:
        """Make the steps that the batch has made: each request of it has one token more for each,
        so that any of them tells how many there were. Called once a step: a long answer beside
        which nobody comes or goes would be thousands of steps at once.

        With speculation each request has grown by as many tokens as were accepted for it, and all
        of them are checked (48 at most, unless SGLang is told otherwise)."""
        if self.step:
            for each in self._running.values():
                if not each.since <= each.req.kv_allocated_len < each.until:
                    self._recount(each)
            return
        if not self._running:
            self._outgrow.clear()
            return
        first = next(iter(self._running.values()))
        assert first.track is not None
        made = first.req.kv_allocated_len - first.track.start - self._growth.steps
        for _ in range(made):
            self._growth.step()
        while self._outgrow and self._outgrow[0][0] <= self._growth.steps:
            holding = self._running.get(heapq.heappop(self._outgrow)[1])
            if holding is not None:
                self._running_needs.remove(holding)
                self._expect(holding)

    def _count(self, holding: Holding) -> None:
        """Count a running request with the tokens that it has now."""
        req = holding.req
        length, final = req.kv_allocated_len, final_length(req, self.step)
        holding.track = self._growth.add(length, final)
        self._expect(holding)
        if self.step:
            holding.since, holding.until = length, self._counts_until(req, length, final)

    def _recount(self, holding: Holding) -> None:
        """The same of one that was counted."""
        assert holding.track is not None, "it runs"
        self._growth.remove(holding.track)
        self._running_needs.remove(holding)
        self._count(holding)

    def _counts_until(self, req: Req, length: int, final: int) -> int:
        """The next length that changes a sum: at which ``length`` tokens, or those with what it
        reserves, open another page, or at which it is longer than was expected."""
        ahead = length + self.cap
        until: int = page_ceil(length, self.page) + 1
        if self.cap % self.page == 0 and ahead <= final:
            until = final - self.cap + 1  # before, both open pages together
        elif ahead < final:
            until = min(until, length + page_ceil(ahead, self.page) + 1 - ahead)
        expected = expected_length(req, length)
        if length < expected < final_length(req):
            until = min(until, expected)
        return until


def _below(node: TreeNode | None, *covers: Container[int]) -> int:
    """Tokens from ``node`` up to the first node with an id in one of ``covers``, or the root."""
    tokens: int = 0
    while (
        node is not None
        and node.parent is not None
        and not any(node.id in cover for cover in covers)
    ):
        tokens += len(node.key)
        node = node.parent
    return tokens


def _ids(node: TreeNode | None) -> set[int]:
    """The nodes from ``node`` up to below the root."""
    found = set()
    while node is not None and node.parent is not None:
        found.add(node.id)
        node = node.parent
    return found

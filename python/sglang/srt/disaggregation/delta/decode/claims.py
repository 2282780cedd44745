"""Memory of the decode pool that admitted requests hold and may still need.

A request is entered when it gets its pages (``Admission.admit``) and removed when SGLang's release
reaches the tree. In between the tree reports that its prompt is shared, the prebuilt batch or
``LocalTurnsScheduler`` that it begins to run, and the transfer queue that its transfer is given up.
Running requests are counted as arrays, because they grow with every step. All numbers are tokens of
whole pages; the arithmetic of one request is ``policy.memory``'s.

Contract: the scheduler's thread only. All ranks make the same calls in the same order. A new limit
on memory, of a tenant say, takes two files: a check in ``Claims.refusal``, which vote and admission
both call after they have entered the requests ahead, and its reason in ``metrics.REFUSALS``.
``Claims.holders`` has the tokens of each request, shared pages for each; its tenant is
``req.extra_key``, which with LoRA ends with the adapter (``namespaces.py``). A refused request
blocks all behind it: first come, first served.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: int64 arrays

import numpy as np

from sglang.srt.disaggregation.delta.decode.request import Refusal, Stage, record_of
from sglang.srt.disaggregation.policy.memory import (
    Claim,
    entering,
    entry_cost,
    expected_length,
    final_length,
    growth,
    page_ceil,
    start_length,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode


def upwards(node: TreeNode | None) -> Iterator[TreeNode]:
    """Yield ``node`` and its ancestors, without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def below(node: TreeNode | None, pins: Container[int], path: Container[int] = ()) -> int:
    """Return the tokens from ``node`` up to the first node with an id in ``pins`` or ``path``, or
    to the root."""
    tokens = 0
    for ancestor in upwards(node):
        if ancestor.id in pins or ancestor.id in path:
            break
        tokens += len(ancestor.key)
    return tokens


def private_tokens(reqs: Iterable[Req], page: int) -> int:
    """Return the tokens that ``reqs`` hold outside the tree."""
    return sum(page_ceil(req.kv_allocated_len, page) - req.cache_protected_len for req in reqs)


@dataclass(eq=False)
class Holding:
    """Memory of a request that does not run: in transfer, in local prefill, waiting for a slot of
    the batch, or given up. It cannot be retracted."""

    req: Req
    #: Deepest tree node that it shares, and the tokens of the path to that node.
    node: TreeNode
    shared: int
    #: All tokens that it holds, in the tree and outside.
    whole: int
    #: Tokens kept free for it.
    reserved: int
    #: Tokens that it still needs to finish; None once its transfer was given up, because prefill
    #: may still write to its pages but it needs no more of them.
    need: int | None


@dataclass(eq=False)
class Running:
    """The running requests in one step. Arrays are int64 of shape (requests,), in tokens:
    ``prompt``, ``max_new`` (largest answer) and ``allocated``. ``cap``, ``page``, ``step_tokens``
    are those of ``Claims``."""

    reqs: list[Req]
    prompt: Any
    max_new: Any
    allocated: Any
    cap: int
    page: int
    step_tokens: int

    @classmethod
    def of(cls, reqs: list[Req], cap: int, page: int, step_tokens: int) -> Running:
        """Read each of ``reqs``."""
        prompt = np.fromiter((len(req.origin_input_ids) for req in reqs), np.int64)
        max_new = np.fromiter((req.sampling_params.max_new_tokens for req in reqs), np.int64)
        allocated = np.fromiter((req.kv_allocated_len for req in reqs), np.int64)
        return cls(reqs, prompt, max_new, allocated, cap, page, step_tokens)

    def in_later_step(self) -> Running:
        """Return the same requests in a later step. Without speculation all have grown by the same
        number of tokens, so only the first is read: reading 512 costs as much as the rest of a
        step."""
        if self.step_tokens:
            return Running.of(self.reqs, self.cap, self.page, self.step_tokens)
        allocated = self.allocated + (self.reqs[0].kv_allocated_len - self.allocated[0])
        return replace(self, allocated=allocated)

    @cached_property
    def reserved(self) -> int:
        """Sum of ``growth`` over the requests, for their next ``cap`` tokens."""
        final = np.maximum(self.prompt + self.max_new + self.step_tokens, self.allocated)
        end = np.minimum(final, self.allocated + self.cap)
        return int((page_ceil(end, self.page) - page_ceil(self.allocated, self.page)).sum())

    @cached_property
    def expected(self) -> Any:
        """``expected_length`` of each request, in whole pages."""
        from sglang.srt.disaggregation.decode import CLIP_MAX_NEW_TOKEN as CLIP

        clip = CLIP * (1 + np.maximum(self.allocated - self.prompt, 0) // CLIP)
        expected = self.prompt + np.minimum(self.max_new, clip) + self.step_tokens
        return page_ceil(expected, self.page)


class Claims:
    """The claims on one decode pool of ``total`` tokens. ``cap``: largest reserve of a running
    request; ``step_tokens``: with speculation, the free tokens that a step needs for each request.
    """

    def __init__(self, cap: int, page: int, step_tokens: int, total: int) -> None:
        self.cap, self.page, self.total = max(cap, step_tokens), page, total
        self.step_tokens = step_tokens
        #: Largest reserve of a request that does not run yet; at least a page, as for the flag.
        self.entry_cap = max(cap // 2, page, step_tokens)
        #: By the id of the request, which the value keeps alive.
        self._held: dict[int, Holding] = {}
        self._running: dict[int, Req] = {}
        #: Number of requests that do not run and share a tree node, by its id.
        self._pins: dict[int, int] = {}
        #: Tokens of these requests, in the tree and outside.
        self.pinned = 0
        #: Counted in this step; None once a request began to run, or a running one was removed.
        self._counted: Running | None = None

    # ---- life of a request ----

    def entered(self, req: Req, node: TreeNode, shared: int, allocated: int) -> None:
        """Enter ``req``, which holds ``allocated`` tokens, ``shared`` of them in the tree, on the
        path to ``node``."""
        claim = entering(Claim(allocated, final_length(req, self.step_tokens)), self.step_tokens)
        whole = page_ceil(allocated, self.page)
        need = page_ceil(expected_length(req, allocated, self.step_tokens), self.page) - whole
        reserved = growth(claim, self.entry_cap, self.page)
        holding = Holding(req, node, shared, whole, reserved, need)
        self._held[id(req)] = holding
        self._pin(holding, 1)

    def shared(self, req: Req) -> None:
        """Update ``req`` after the tree took more of it, unless it runs or holds nothing."""
        holding = self._held.get(id(req))
        if holding is not None:
            self._pin(holding, -1)
            holding.node, holding.shared = req.last_node, req.cache_protected_len
            self._pin(holding, 1)

    def started(self, req: Req) -> None:
        """Count ``req`` as running from the next decode step on."""
        record_of(req).enter(Stage.RUNNING)
        self._pin(self._held.pop(id(req)), -1)
        self._running[id(req)] = req
        self._counted = None

    def deferred(self, req: Req) -> None:
        """Count ``req`` as given up: its pages stay taken, and it needs no others."""
        record_of(req).enter(Stage.DEFERRED)
        holding = self._held[id(req)]
        holding.reserved, holding.need = 0, None

    def left(self, req: Req) -> None:
        """Remove ``req``, if it is here."""
        holding = self._held.pop(id(req), None)
        if holding is not None:
            self._pin(holding, -1)
        elif self._running.pop(id(req), None) is not None:
            self._counted = None

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Follow a split of the tree: ``lower`` was split, and ``upper`` is its new parent."""
        count = self._pins.get(lower.id)
        if count is not None:
            self._pins[upper.id] = count

    def holders(self) -> Iterator[tuple[Req, int]]:
        """Yield each request that holds pages, and the tokens that it holds, shared or not."""
        for holding in self._held.values():
            yield holding.req, holding.whole
        for req in self._running.values():
            yield req, page_ceil(req.kv_allocated_len, self.page)

    def _pin(self, holding: Holding, by: int) -> None:
        """Count the tokens of ``holding`` as pinned (``by`` is 1), or no longer (-1)."""
        self.pinned += by * (holding.whole - holding.shared)
        for node in upwards(holding.node):
            count = self._pins[node.id] = self._pins.get(node.id, 0) + by
            if count == max(by, 0):  # the first request that shares the node, or the last
                self.pinned += by * len(node.key)
            if not count:
                del self._pins[node.id]

    # ---- questions of admission ----

    def recount(self) -> None:
        """Begin a step: the running requests may have grown since they were counted."""
        if self._counted is not None:
            self._counted = self._counted.in_later_step() if self._running else None

    @property
    def running(self) -> Running:
        """The running requests, counted once a step."""
        if self._counted is None:
            reqs = list(self._running.values())
            self._counted = Running.of(reqs, self.cap, self.page, self.step_tokens)
        return self._counted

    @property
    def reserved(self) -> int:
        """Tokens that all requests together may still need before any is retracted."""
        return self.running.reserved + sum(each.reserved for each in self._held.values())

    def cost(self, req: Req, prefix: int) -> int:
        """Return the tokens that admitting ``req`` takes beyond a locked ``prefix``."""
        # Cap at the pool size: SGLang ends a text there, so a speculative step has no tokens behind
        # it, and a request that waits for them would block the queue for ever.
        final = min(final_length(req, self.step_tokens), self.total)
        claim = Claim(start_length(req), final)
        if req.is_retracted:
            return entry_cost(prefix, claim, self.cap, self.page)
        return entry_cost(prefix, entering(claim, self.step_tokens), self.entry_cap, self.page)

    def refusal(self, req: Req, node: TreeNode, prefix: int, free: int) -> Refusal | None:
        """Return why ``req`` cannot be admitted, of which the tree holds ``prefix`` tokens on the
        path to ``node``; None if it can.

        ``free``: tokens that are free or evictable, without the prefix and without pages of
        requests that are admitted before it. A request that resumes must have the reserve of a
        running one, because it would otherwise be retracted again at once.
        """
        length, cost = start_length(req), self.cost(req, prefix)
        if cost > free - self.reserved:
            return Refusal("no_tokens", cost)
        whole = page_ceil(length, self.page)
        need = page_ceil(expected_length(req, length, self.step_tokens), self.page) - whole
        if not self.everyone_can_finish(node, whole - prefix, need, self.total):
            return Refusal("cannot_finish", cost)
        return None

    def everyone_can_finish(
        self, node: TreeNode | None, private: int, need: int, total: int
    ) -> bool:
        """True if each request could still finish with all other running ones retracted, after one
        more is admitted with ``private`` tokens below ``node`` that needs ``need`` tokens more.

        A request that does not run yet cannot be retracted, so its tokens are out of reach of all
        others; once it runs, it must find memory for the rest of its answer.
        """
        needs = [each.need for each in self._held.values() if each.need is not None]
        if not self._running and not needs:
            return True  # the whole pool is its own
        free = total - self.pinned - private - below(node, self._pins)
        if max([need, *needs]) > free:
            return False
        reqs, expected = self.running.reqs, self.running.expected
        # Some of these share pages with pinned requests. Check the largest first.
        large = np.flatnonzero(expected > free)
        path = {ancestor.id for ancestor in upwards(node)}
        for index in large[np.argsort(-expected[large], kind="stable")]:
            req = reqs[index]
            shared = req.cache_protected_len - below(req.last_node, self._pins, path)
            if expected[index] - shared > free:
                return False
        return True

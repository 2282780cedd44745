"""What admitted requests hold and may still need of the decode pool.

The arithmetic first: how long requests become, and what that takes; all results are tokens of
whole pages. Stock reserves ``--num-reserved-decode-tokens`` (512 by default) for every request in
sight. With a pool full of shared prefixes that reserve, and not the KV, decides how many requests
run. Here a *running* request reserves what it can still generate, at most that number. One that
does not run yet reserves half of it: the requests of a steady stream are half-way through their
answers on average. If too many were let in, the youngest is retracted: its KV goes to the CPU and
back, and no work is lost.

A request is entered in ``Claims`` when it gets its pages and leaves when SGLang's release reaches
the tree. In between ``Claims`` is told of it: its prompt is shared, it begins to run, its transfer
is given up. Those that run are counted as arrays, which grow with every step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: int64 arrays; a PrefixLease

import numpy as np

from sglang.srt.disaggregation.delta.decode.record import Refusal, Stage, record_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode


def upwards(node: TreeNode | None) -> Iterator[TreeNode]:
    """``node`` and all above it, without the root; of no node, none."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def below(node: TreeNode | None, pins: Container[int], path: Container[int] = ()) -> int:
    """Tokens from ``node`` up to the first node with an id in ``pins`` or ``path``, or the root."""
    tokens = 0
    for each in upwards(node):
        if each.id in pins or each.id in path:
            break
        tokens += len(each.key)
    return tokens


# ---- what one request takes ----


def page_floor(tokens: int, page: int) -> int:
    """The largest whole number of pages within ``tokens``, in tokens."""
    return tokens // page * page


def page_ceil(tokens: Any, page: int) -> Any:
    """``tokens``, an integer or an array of them, rounded up to whole pages."""
    return -(-tokens // page) * page


def private_tokens(reqs: Iterable[Req], page: int) -> int:
    """What ``reqs`` hold beside the tree, tokens of whole pages."""
    return sum(page_ceil(req.kv_allocated_len, page) - req.cache_protected_len for req in reqs)


def start_length(req: Req) -> int:
    """How many tokens need KV before a request runs: all but the last one generated."""
    return len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)


def final_length(req: Req, step: int = 0) -> int:
    """The longest that a request's KV can become, in tokens.

    ``step``: with speculation, what its last step wants free (``speculation.step_tokens``).
    """
    return len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens) + step


def expected_length(req: Req, allocated: int, step: int = 0) -> int:
    """How long its KV is taken to become by SGLang's estimate, in tokens; ``step`` as above.

    Clients ask for far more new tokens than come, so SGLang expects 4,096 at most
    (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``). An answer that is longer already is expected to go
    on to the next multiple.
    """
    from sglang.srt.disaggregation.decode import CLIP_MAX_NEW_TOKEN

    prompt = len(req.origin_input_ids)
    clip = CLIP_MAX_NEW_TOKEN * (1 + max(allocated - prompt, 0) // CLIP_MAX_NEW_TOKEN)
    return int(prompt + min(req.sampling_params.max_new_tokens, clip)) + step


@dataclass(frozen=True)
class Claim:
    """One request's claim on the pool: ``allocated`` tokens now, ``final`` when it has ended."""

    allocated: int
    final: int


def growth(claim: Claim, cap: int, page: int) -> int:
    """New pages, in tokens, that the next ``cap`` generated tokens of a request can need."""
    upto = min(max(claim.final, claim.allocated), claim.allocated + cap)
    return page_ceil(upto, page) - page_ceil(claim.allocated, page)


def entering(claim: Claim, step: int = 0) -> Claim:
    """The claim of a request that does not run yet: half of what it may still generate, but all of
    ``step``, what its first step wants free (``speculation.step_tokens``)."""
    half = (claim.final - claim.allocated + 1) // 2
    return Claim(claim.allocated, min(claim.allocated + max(half, step), claim.final))


def entry_cost(prefix: int, claim: Claim, cap: int, page: int) -> int:
    """What admitting one request takes: its delta pages and its own reserve.

    ``prefix`` tokens are held by the tree already (and no longer evictable: the caller holds a
    lease); ``claim.allocated`` tokens must be there to start.
    """
    return page_ceil(claim.allocated, page) - prefix + growth(claim, cap, page)


# ---- all of them ----


@dataclass(eq=False)
class Holding:
    """What a request holds that does not run. Tokens of whole pages."""

    req: Req
    #: The deepest tree node that it shares, and the tokens down to there.
    node: TreeNode
    shared: int
    #: All that it holds, in the tree and outside.
    whole: int
    #: What it may take before anybody is retracted, and beyond what it holds to end; None of one
    #: that was given up: prefill may still write to its pages, and it needs no more than them.
    reserved: int
    need: int | None


@dataclass(eq=False)
class Running:
    """The running requests as they are in one step. Arrays are int64 of shape (requests,): their
    prompts, the largest answers, and what they hold, in tokens. ``cap``, ``page``, ``step``: of
    ``Claims``."""

    reqs: list[Req]
    prompt: Any
    new: Any
    now: Any
    cap: int
    page: int
    step: int

    @classmethod
    def of(cls, reqs: list[Req], cap: int, page: int, step: int) -> Running:
        """``reqs``, each of which is read."""
        prompt = np.fromiter((len(req.origin_input_ids) for req in reqs), np.int64)
        new = np.fromiter((req.sampling_params.max_new_tokens for req in reqs), np.int64)
        now = np.fromiter((req.kv_allocated_len for req in reqs), np.int64)
        return cls(reqs, prompt, new, now, cap, page, step)

    def later(self) -> Running:
        """The same requests in a later step. Without speculation all have got equally many tokens
        since, so only the first is read: reading 512 costs as much as the rest of a step."""
        if self.step:
            return Running.of(self.reqs, self.cap, self.page, self.step)
        now = self.now + (self.reqs[0].kv_allocated_len - self.now[0])
        return Running(self.reqs, self.prompt, self.new, now, self.cap, self.page, self.step)

    @cached_property
    def reserved(self) -> int:
        """What all of them may take within their next ``cap`` tokens: ``growth`` of each."""
        final = np.maximum(self.prompt + self.new + self.step, self.now)
        upto = np.minimum(final, self.now + self.cap)
        return int((page_ceil(upto, self.page) - page_ceil(self.now, self.page)).sum())

    @cached_property
    def needs(self) -> Any:
        """What each takes to end, whole pages: ``expected_length`` of each."""
        from sglang.srt.disaggregation.decode import CLIP_MAX_NEW_TOKEN as CLIP

        clip = CLIP * (1 + np.maximum(self.now - self.prompt, 0) // CLIP)
        expected = self.prompt + np.minimum(self.new, clip) + self.step
        return page_ceil(expected, self.page)


class Claims:
    """The claims on one decode pool of ``total`` tokens. ``cap``: what a running request reserves
    at most, tokens; ``step``: with speculation, those that a step wants free for each request.
    """

    def __init__(self, cap: int, page: int, step: int, total: int) -> None:
        self.cap, self.page, self.step, self.total = max(cap, step), page, step, total
        #: The cap of a request that does not run yet; at least a page, like the flag itself.
        self.entry_cap = max(cap // 2, page, step)
        #: By the id of the request, which the value keeps alive. Who does not run (in transfer, in
        #: local prefill, waiting for a slot in the batch, given up) cannot be retracted.
        self._held: dict[int, Holding] = {}
        self._running: dict[int, Req] = {}
        #: How many requests that do not run share a tree node, by its id; and their tokens, in the
        #: tree and outside.
        self._pins: dict[int, int] = {}
        self.pinned = 0
        #: Of this step; None once a request began to run, or one that ran has left.
        self._counted: Running | None = None

    # ---- what happens to a request ----

    def entered(self, req: Req, node: TreeNode, shared: int, allocated: int) -> None:
        """``req`` holds ``allocated`` tokens; the tree shares ``shared`` of them, to ``node``."""
        claim = entering(Claim(allocated, final_length(req, self.step)), self.step)
        whole = page_ceil(allocated, self.page)
        need = page_ceil(expected_length(req, allocated, self.step), self.page) - whole
        reserved = growth(claim, self.entry_cap, self.page)
        holding = Holding(req, node, shared, whole, reserved, need)
        self._held[id(req)] = holding
        self._pin(holding, 1)

    def shared(self, req: Req) -> None:
        """The tree shares more of ``req`` than before, if it holds anything and does not run."""
        holding = self._held.get(id(req))
        if holding is not None:
            self._pin(holding, -1)
            holding.node, holding.shared = req.last_node, req.cache_protected_len
            self._pin(holding, 1)

    def started(self, req: Req) -> None:
        """``req`` runs from the next decode step on."""
        record_of(req).enter(Stage.RUNNING)
        self._pin(self._held.pop(id(req)), -1)
        self._running[id(req)] = req
        self._counted = None

    def deferred(self, req: Req) -> None:
        """The transfer of ``req`` was given up, and the free of its pages is deferred."""
        record_of(req).enter(Stage.DEFERRED)
        holding = self._held[id(req)]
        holding.reserved, holding.need = 0, None

    def left(self, req: Req) -> None:
        """``req`` holds nothing any more. Nothing happens if it did not before."""
        holding = self._held.pop(id(req), None)
        if holding is not None:
            self._pin(holding, -1)
        elif self._running.pop(id(req), None) is not None:
            self._counted = None

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The tree put ``upper`` above ``lower``; together they are what ``lower`` was."""
        count = self._pins.get(lower.id)
        if count is not None:
            self._pins[upper.id] = count

    def __len__(self) -> int:
        """How many requests hold pages."""
        return len(self._held) + len(self._running)

    def _pin(self, holding: Holding, by: int) -> None:
        """Count what ``holding`` pins, with 1, or no longer, with -1."""
        self.pinned += by * (holding.whole - holding.shared)
        for node in upwards(holding.node):
            count = self._pins[node.id] = self._pins.get(node.id, 0) + by
            if count == max(by, 0):  # the first one, or the last
                self.pinned += by * len(node.key)
            if not count:
                del self._pins[node.id]

    # ---- what admission asks ----

    def recount(self) -> None:
        """A step begins: the running requests may have grown since they were counted."""
        if self._counted is not None:
            self._counted = self._counted.later() if self._running else None

    @property
    def running(self) -> Running:
        """The running requests, counted once a step."""
        if self._counted is None:
            reqs = list(self._running.values())
            self._counted = Running.of(reqs, self.cap, self.page, self.step)
        return self._counted

    @property
    def reserved(self) -> int:
        """What all of them together may still need before anybody is retracted."""
        return self.running.reserved + sum(each.reserved for each in self._held.values())

    def cost(self, req: Req, prefix: int) -> int:
        """What admitting ``req`` takes beyond a locked ``prefix``, in tokens."""
        # SGLang lets a text grow to the pool's end; a step's room behind that is nowhere, and who
        # waits for it would wait for ever, with everybody behind.
        claim = Claim(start_length(req), min(final_length(req, self.step), self.total))
        if req.is_retracted:
            return entry_cost(prefix, claim, self.cap, self.page)
        return entry_cost(prefix, entering(claim, self.step), self.entry_cap, self.page)

    def refusal(self, req: Req, prefix: Any, free: int) -> Refusal | None:
        """Why a request cannot enter, of whose text the tree holds ``prefix`` (a ``PrefixLease``);
        None if it can.

        ``free``: tokens that are free or can be evicted, without the prefix itself and what others
        take first. A request that resumes must have room like a running one, or it would be
        retracted again at once.
        """
        length, cost = start_length(req), self.cost(req, prefix.length)
        if cost > free - self.reserved:
            return Refusal("no_tokens", cost)
        whole = page_ceil(length, self.page)
        need = page_ceil(expected_length(req, length, self.step), self.page) - whole
        if not self.everyone_can_finish(prefix.node, whole - prefix.length, need, self.total):
            return Refusal("cannot_finish", cost)
        return None

    def everyone_can_finish(
        self, node: TreeNode | None, private: int, need: int, total: int
    ) -> bool:
        """Whether every request could still end, the running ones but itself retracted, after one
        more has entered: with ``private`` tokens of its own below ``node``, and in ``need`` of so
        many more.

        Requests that do not run yet cannot be retracted, so what they hold is out of reach of all
        others; and once one of them runs, it must find the memory for the rest of its answer.
        """
        needs = [each.need for each in self._held.values() if each.need is not None]
        if not self._running and not needs:
            return True  # it will have the pool for itself
        free = total - self.pinned - private - below(node, self._pins)
        if max([need, *needs]) > free:
            return False
        reqs, longest = self.running.reqs, self.running.needs
        # Some count on what they share with pinned requests; the neediest are asked first.
        short = np.flatnonzero(longest > free)
        path = {each.id for each in upwards(node)}
        for at in short[np.argsort(-longest[short], kind="stable")]:
            # Of what it needs it shares with pinned requests, or with what is on ``path``:
            shared = reqs[at].cache_protected_len - below(reqs[at].last_node, self._pins, path)
            if longest[at] - shared > free:
                return False
        return True

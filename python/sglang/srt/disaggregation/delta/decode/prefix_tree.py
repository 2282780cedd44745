"""Slots that the step in flight may still use, though nobody owns them any more.

With overlap scheduling a request is found to have ended when the next step, which it is part of, is
running already. That step writes one more slot for it, which was just freed, or put into the tree
and perhaps evicted. What it writes depends on slots that may be free, too: those whose tokens the
tree had already. Other steps come after it on the device; a prefill server's write does not.

The prefix lease: what the tree holds of a prompt, locked until the request lets go of it.

The radix tree as a decode server uses it. Rebound for the scheduler's own tree only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.claims import Claims
from sglang.srt.disaggregation.delta.decode.eligibility import (
    generation_of,
    mark_committed,
    may_insert,
    may_match,
)
from sglang.srt.disaggregation.delta.pages import page_floor

_NONE: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
_SLOTS = "decode_slots_at_end"


def remember_slots(req: Any, rows: torch.Tensor) -> None:
    """``req`` is about to give its own slots back. ``rows``: the request-to-slot table."""
    own = rows[req.req_pool_idx, req.cache_protected_len : req.kv_committed_len]
    setattr(req, _SLOTS, own.to(torch.int64, copy=True))


def slots_at_end(req: Any) -> torch.Tensor:
    """The slots that were a request's own when it last gave them back (1-D int64)."""
    slots: torch.Tensor = getattr(req, _SLOTS)
    return slots


class StepWrites:
    """Holds announcements back until the result of a step that may use their pages is in.

    SGLang's loop admits, launches the next step, and then processes the result of the last one: an
    announcement waits within one turn of the loop, and only where pages really meet.
    """

    def __init__(self, scheduler: Any, page: int) -> None:
        self._scheduler = scheduler
        self._page = page
        self._batch: Any = None
        self._pages = _NONE
        self._waiting: list[Callable[[], None]] = []

    def after(self, pages: npt.NDArray[np.int32], announce: Callable[[], None]) -> None:
        """``announce`` now, or when no step uses ``pages`` any more."""
        used = self._used()
        if len(used) and np.isin(pages, used).any():
            self._waiting.append(announce)
        else:
            announce()

    def result_processed(self) -> None:
        """The oldest step in flight has ended: its slots are nobody's but their owners'."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for announce in waiting:
                announce()

    def _used(self) -> npt.NDArray[np.int64]:
        """Page ids that the step in flight uses for requests that have ended since, and that were
        their own."""
        results = getattr(self._scheduler, "result_queue", None)  # overlap scheduling only
        if not results:
            return _NONE
        batch = results[-1][0]
        if batch is not self._batch:
            self._batch = batch
            ended = [at for at, req in enumerate(batch.reqs) if req.finished() or req.is_retracted]
            self._pages = _NONE
            if ended:
                own = [slots_at_end(batch.reqs[at]) for at in ended]
                slots = torch.cat([batch.out_cache_loc[ended], *own])
                self._pages = (slots // self._page).cpu().numpy()
        return self._pages


class PrefixLease:
    """One match and one lock on a tree node; released once, or handed over to a request once.

    ``indices`` are the pool slots of the prefix (1-D int64, on the pool's device), a whole number
    of pages, since a paged tree matches whole pages only. The lock covers the path to ``node``.
    A lease on the root is empty and harmless.
    """

    def __init__(self, tree: Any, node: Any, indices: torch.Tensor) -> None:
        self._tree = tree
        self._held = True
        self.node = node
        self.indices = indices
        tree.inc_lock_ref(node)

    @classmethod
    def empty(cls, tree: Any) -> PrefixLease:
        """A lease on nothing, for requests that must not share."""
        return cls(tree, tree.root_node, torch.empty(0, dtype=torch.int64, device=tree.device))

    @classmethod
    def take(cls, tree: Any, token_ids: list[int], extra_key: str | None) -> PrefixLease:
        """Match and lock the longest cached prefix of ``token_ids``.

        The key is built as ``Req.init_next_round_input`` builds it, so that LoRA, cache salt and
        any other ``extra_key`` separate requests here as they do on an aggregated server.
        """
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(token_ids, extra_key)))
        return cls(tree, match.last_device_node, match.device_indices)

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.indices)

    def release(self) -> None:
        """Give the lock back. Calling it again, or after ``hand_over``, does nothing."""
        if self._held:
            self._held = False
            self._tree.dec_lock_ref(self.node)

    def hand_over(self, req: Any) -> None:
        """Make ``req`` the owner of the lock; SGLang's own release path returns it."""
        assert self._held, "a released lease cannot be handed over"
        self._held = False
        req.last_node = req.last_host_node = self.node
        req.prefix_indices = self.indices
        req.cache_protected_len = self.length


@dataclass(frozen=True)
class KnownPrefix:
    """Where the match of a prompt ended, with no lock on it. It would end there again as long as
    this ``holds``, which costs a page and not the prompt."""

    root: Any
    #: The tree's; a flush may leave nodes in their places.
    generation: int
    node: Any
    #: Tokens of the prefix.
    length: int
    #: The key of the child that a longer match would go on to; None where the prompt ends.
    following: Any

    @classmethod
    def of(cls, tree: Any, lease: PrefixLease, token_ids: list[int], extra_key: str | None) -> Any:
        """Where the match ended that gave ``lease``."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        page = token_ids[lease.length : lease.length + tree.page_size]
        following = None
        if len(page) == tree.page_size:
            following = tree.get_child_key_fn(RadixKey(page, extra_key))
        return cls(tree.root_node, tree.generation, lease.node, lease.length, following)

    def holds(self, tree: Any) -> bool:
        """Whether the node is still in the tree (a split leaves a node the end of its path), and
        nothing that the prompt goes on with was inserted below it."""
        node = self.node
        if tree.root_node is not self.root or tree.generation != self.generation:
            return False
        if node is not self.root:
            key = tree.get_child_key_fn(node.key)
            if node.parent.children.get(key) is not node:
                return False
        return self.following is None or self.following not in node.children

    def lock(self, tree: Any) -> PrefixLease:
        """The lease that a match would give; no token is compared."""
        values, node = [], self.node
        while node is not self.root:
            values.append(node.value)
            node = node.parent
        if not values:
            return PrefixLease.empty(tree)
        return PrefixLease(tree, self.node, torch.cat(values[::-1]))


def unlocked_tokens(node: Any) -> int:
    """Tokens from ``node`` up that a lock on it would take out of what can be evicted."""
    tokens: int = 0
    while node.parent is not None and node.lock_ref == 0:
        tokens += len(node.key)
        node = node.parent
    return tokens


if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache
else:
    RadixCache = object

#: An eviction takes at least one of so many parts of the pool, if that can be evicted.
EVICTED_AT_LEAST = 128


class Retired(NamedTuple):
    """The ``extra_key`` of nodes from before a flush: no request can name it, so none hits them.

    ``generation``: theirs; ``name``: the ``extra_key`` that they had.
    """

    generation: int
    name: str | None


class DecodeRadixTree(RadixCache):
    """Stock behaviour until ``serve_decode`` is called; then only committed KV enters the tree."""

    #: Set by the decode scheduler when the flag is on.
    serves_decode: bool = False
    #: Inserts so far.
    inserts: int = 0
    #: Flushes so far. A request shares only if it arrived after the last one: KV that was matched,
    #: announced, computed or copied before may be of weights that are served no more.
    generation: int = 0
    #: What requests hold; set by the admission budget of a decode server.
    claims: Claims | None = None

    def serve_decode(self) -> None:
        """Switch to the rules of a decode server."""
        self.serves_decode = True

    def may_share(self, req: Any) -> bool:
        """Whether ``req`` may match here, and once its transfer is committed, insert."""
        return may_match(req) and generation_of(req) == self.generation

    @override
    def reset(self) -> None:
        super().reset()
        if self.serves_decode:
            self.generation += 1

    def retire(self) -> None:
        """A flush while requests own pages: nothing that is in the tree now is ever hit again.

        What nobody holds is free at once. What is locked keeps its place and its slots, under a
        name that cannot be asked for, until its last holder lets go; then it is evicted like
        anything else.
        """
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.token_to_kv_pool_allocator.free_group_begin()
        try:
            self.evict(EvictParams(num_tokens=self.evictable_size()))
        finally:
            self.token_to_kv_pool_allocator.free_group_end()
        for node in list(self._nodes()):
            if not isinstance(node.key.extra_key, Retired):
                self._rename(node)
        self.generation += 1
        self._record_all_cleared_event()

    def _nodes(self) -> Iterator[Any]:
        """All nodes but the root, parents first."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _rename(self, node: Any) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key, siblings = node.key, node.parent.children
        del siblings[self.get_child_key_fn(key)]
        node.key = RadixKey(key.token_ids, Retired(self.generation, key.extra_key), key.is_bigram)
        siblings[self.get_child_key_fn(node.key)] = node

    @override
    def _record_remove_event(self, node: Any) -> None:
        # Listeners know pages by their tokens, and were told that all of these are gone. A page of
        # the same tokens may have been stored since.
        if not isinstance(node.key.extra_key, Retired):
            super()._record_remove_event(node)

    def _may_insert(self, req: Any) -> bool:
        return may_insert(req) and generation_of(req) == self.generation

    @override
    def insert(self, params: Any) -> Any:
        self.inserts += 1
        return super().insert(params)

    @override
    def evict(self, params: Any) -> Any:
        # Each eviction looks at every leaf, whatever it takes. On a full pool every decode step
        # would evict for itself, so a small eviction takes a little more than it was asked for.
        if self.serves_decode:
            least = self.token_to_kv_pool_allocator.size // EVICTED_AT_LEAST
            params = replace(params, num_tokens=max(params.num_tokens, least))
        return super().evict(params)

    @override
    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        upper = super()._split_node(key, child, split_len)
        if self.claims is not None:
            self.claims.split(upper, child)
        return upper

    @override
    def match_prefix(self, params: Any) -> Any:
        req = params.req
        if not self.serves_decode or req is None or req.req_pool_idx is None:
            return super().match_prefix(params)
        # The request got its slots at admission. Matching again could find a longer prefix that
        # others inserted meanwhile, and would overwrite which slots are shared and which node is
        # locked. So the answer is what it holds.
        from sglang.srt.mem_cache.base_prefix_cache import MatchResult

        held = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.cache_protected_len]
        return MatchResult(
            device_indices=held.to(torch.int64),
            last_device_node=req.last_node,
            last_host_node=req.last_node,
            cache_protected_len=req.cache_protected_len,
        )

    def adopt(self, req: Any) -> None:
        """The transfer of ``req`` was committed: share its prompt from now on.

        Waiting until the request runs, or ends, would let followers move the same KV again.
        """
        mark_committed(req)
        self.cache_unfinished_req(req)

    @override
    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        if not self.serves_decode:
            super().cache_unfinished_req(req, chunked)
            return
        if not self._may_insert(req):
            return
        committed = req.kv_committed_len
        if page_floor(committed, self.page_size) <= req.cache_protected_len:
            return  # all of it is in the tree already
        # ``fill_ids`` ends with the first generated token, whose KV does not exist yet; inserting
        # it would put an unwritten slot into the tree.
        fill_ids = req.fill_ids
        req.fill_ids = fill_ids[:committed]
        try:
            super().cache_unfinished_req(req, chunked)
        finally:
            req.fill_ids = fill_ids
        if self.claims is not None:
            self.claims.shared(req)

    @override
    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        if self.claims is not None:
            self.claims.left(req)
        if self.serves_decode:
            is_insert = is_insert and self._may_insert(req)
            if req.last_node is None:
                # Never matched, or retracted since: nothing is locked.
                req.last_node = self.root_node
            remember_slots(req, self.req_to_token_pool.req_to_token)
        super().cache_finished_req(req, is_insert)

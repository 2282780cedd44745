"""The radix tree as a decode server uses it. Rebound for the scheduler's own tree only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from sglang.srt.disaggregation.decode_radix.claims import Claims
from sglang.srt.disaggregation.decode_radix.eligibility import (
    generation_of,
    mark_committed,
    may_insert,
    may_match,
)
from sglang.srt.disaggregation.decode_radix.step_writes import remember_slots
from sglang.srt.disaggregation.delta.pages import page_floor

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

"""The radix tree on a decode server: leases on prefixes, committed KV, the prebuilt batch.

A lease is the cached prefix of a prompt, locked until it is released or its request owns it. A
request uses the prefix of its lease and never matches again. KV enters the tree only after its
transfer was committed on all ranks.

Contract: the scheduler's thread only. The trees of a server's ranks may differ by evictions;
decisions that depend on their content are voted on (``admission``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: keys of two forms; SGLang's parameters

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.claims import Claims, upwards
from sglang.srt.disaggregation.delta.decode.request import Stage, may_match, record_of
from sglang.srt.disaggregation.delta.pages import copy_state

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_schedule_batch_mixin import (
        ScheduleBatchDisaggregationDecodeMixin,
    )
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode
    from sglang.srt.server_args import ServerArgs
else:
    RadixCache = ScheduleBatchDisaggregationDecodeMixin = object


def key_pairs(req: Req, length: int) -> list[tuple[int, int]]:
    """Return the tree's key of the first ``length`` tokens of ``req`` with a draft model: each
    token with the next one, so one pair less. The caller must not change the list.

    Made once, at the first match, and kept until the tree has them: SGLang makes the pairs of the
    whole text at each match and each insert, and no step is scheduled during that time.
    """
    from sglang.srt.mem_cache.utils import convert_to_bigram_key

    record = record_of(req)
    if not record.pairs:
        parts = [node.key.token_ids for node in upwards(req.last_node)]
        record.pairs = list(chain.from_iterable(reversed(parts)))
    pairs = record.pairs
    if len(pairs) < length - 1:
        text = req.origin_input_ids + req.output_ids
        pairs += convert_to_bigram_key(text[len(pairs) : length])
    return pairs if len(pairs) == length - 1 else pairs[: length - 1]


class PrefixLease:
    """One lock on a matched prefix; released once, or passed to a request once.

    ``indices`` are the pool slots of the prefix (1-D int64, on the pool's device), whole pages,
    because a paged tree matches whole pages only. The lock covers the path to ``node``. A lease on
    the root holds no tokens.
    """

    def __init__(self, tree: DecodeRadixTree, node: TreeNode, indices: torch.Tensor) -> None:
        self._tree, self.node, self.indices = tree, node, indices
        self.is_held = True
        tree.inc_lock_ref(node)

    @classmethod
    def take(cls, tree: DecodeRadixTree, key_ids: list[Any], extra_key: str | None) -> PrefixLease:
        """Match and lock the longest cached prefix of ``key_ids`` (tokens, or pairs of them; empty
        for a request that must not share).

        The key is built as ``Req.init_next_round_input`` builds it, so that LoRA, cache salt and
        any other ``extra_key`` separate requests here as on an aggregated server.
        """
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(key_ids, extra_key)))
        return cls(tree, match.last_device_node, match.device_indices)

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.indices)

    def release(self) -> None:
        """Release the lock. A second call, or one after ``bind``, does nothing."""
        if self.is_held:
            self.is_held = False
            self._tree.dec_lock_ref(self.node)

    def bind(self, rows: ReqToTokenPool, req: Req, slots: torch.Tensor) -> None:
        """Write the row of ``req`` and pass it the lock. The caller checked that a row is free.

        The row, in tokens; ``slots`` (1-D int64) are the request's own::

            [0, lease.length)           shared with the tree, locked through ``req.last_node``
            [lease.length, + slots)     private until the transfer is committed
        """
        length = self.length + len(slots)
        row = rows.alloc([req])
        assert row is not None, "a free row was checked before"
        rows.write((req.req_pool_idx, slice(0, self.length)), self.indices)
        rows.write((req.req_pool_idx, slice(self.length, length)), slots)
        req.kv_allocated_len = req.kv_committed_len = length
        req.fill_ids = req.origin_input_ids + req.output_ids
        assert self.is_held, "a released lease cannot be passed to a request"
        self.is_held = False  # SGLang's own release path releases the lock
        req.last_node = req.last_host_node = self.node
        req.prefix_indices, req.cache_protected_len = self.indices, self.length
        req.set_extend_input_len(len(req.fill_ids) - self.length)


class BlockedHead:
    """The end of a refused request's match: the next step checks a page of the tree there, instead
    of matching the whole prompt again."""

    def __init__(
        self, tree: DecodeRadixTree, req: Req, shares: bool, lease: PrefixLease, key_ids: list[Any]
    ) -> None:
        """``lease``: the match of ``key_ids``; ``shares``: True if ``req`` may share at all."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        #: The request itself: clients may use its id again for another prompt.
        self.req, self.shares = req, shares
        self.node, self.indices = lease.node, lease.indices
        # A flush may leave nodes in their places.
        self._tree, self._root, self._generation = tree, tree.root_node, tree.generation
        key = RadixKey(key_ids[lease.length : lease.length + tree.page_size], req.extra_key)
        #: Key of the child that a longer match would reach; None where the prompt ends.
        self._next_key = tree.get_child_key_fn(key) if len(key) == tree.page_size else None

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.indices)

    def is_current(self) -> bool:
        """True if the match would end there again: the node is still in the tree (after a split it
        is still the end of its path), and no child continues the prompt."""
        tree, node = self._tree, self.node
        if tree.root_node is not self._root or tree.generation != self._generation:
            return False
        if node is not self._root:
            key = tree.get_child_key_fn(node.key)
            if node.parent.children.get(key) is not node:
                return False
        return self._next_key is None or self._next_key not in node.children

    def lease(self) -> PrefixLease:
        """Lock the prefix again."""
        return PrefixLease(self._tree, self.node, self.indices)


def unlocked_tokens(node: TreeNode) -> int:
    """Return the tokens from ``node`` up that a lock on it would make unevictable."""
    unlocked = takewhile(lambda ancestor: ancestor.lock_ref == 0, upwards(node))
    return sum(len(ancestor.key) for ancestor in unlocked)


def tree_nodes(tree: RadixCache) -> Iterator[TreeNode]:
    """Yield all nodes but the root, parents first."""
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


#: An eviction frees at least this fraction of the pool (1/128), because each one visits every leaf.
MIN_EVICTED_FRACTION = 128


class Retired(NamedTuple):
    """The ``extra_key`` of nodes from before a flush: no request can have it, so none hits them.

    ``generation``: the one before the flush; ``name``: their ``extra_key`` before.
    """

    generation: int
    name: str | None


class DecodeRadixTree(RadixCache):
    """Stock behaviour until ``serve_decode`` is called; then only committed KV enters the tree."""

    #: Set by the decode scheduler when the flag is on.
    serves_decode: bool = False
    #: Number of inserts.
    inserts: int = 0
    #: Number of flushes. A request shares only if it arrived after the last one, because KV that
    #: was matched, announced, computed or copied before may come from weights that are gone.
    generation: int = -1  # the constructor's reset is not a flush
    #: Memory of admitted requests; set by ``admission.Admission``.
    claims: Claims | None = None
    #: The draft model's KV pool, with the same slots; None without speculation.
    draft_pool: KVCache | None = None

    def serve_decode(self, draft_pool: KVCache | None = None) -> None:
        """Switch to the behaviour of a decode server."""
        self.serves_decode = True
        self.draft_pool = draft_pool

    def may_share(self, req: Req) -> bool:
        """True if ``req`` may match here and insert once its transfer is committed."""
        return may_match(req) and record_of(req).generation == self.generation

    @override
    def reset(self) -> None:
        super().reset()
        self.generation += 1

    def retire(self) -> None:
        """Flush while requests own pages: no node that is in the tree now is ever hit again.

        Unlocked nodes are freed at once. Locked nodes keep their place and their slots under a key
        that no request has, until the last holder releases them; then they are evicted as usual.
        """
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.token_to_kv_pool_allocator.free_group_begin()
        try:
            self.evict(EvictParams(num_tokens=self.evictable_size()))
        finally:
            self.token_to_kv_pool_allocator.free_group_end()
        for node in list(tree_nodes(self)):
            if not isinstance(node.key.extra_key, Retired):
                self._rename(node)
        self.generation += 1
        self._record_all_cleared_event()

    def _rename(self, node: TreeNode) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key, siblings = node.key, node.parent.children
        del siblings[self.get_child_key_fn(key)]
        node.key = RadixKey(key.token_ids, Retired(self.generation, key.extra_key), key.is_bigram)
        siblings[self.get_child_key_fn(node.key)] = node

    @override
    def _record_remove_event(self, node: TreeNode) -> None:
        # Listeners identify pages by tokens and know that these are gone; a page with the same
        # tokens may have been stored since.
        if not isinstance(node.key.extra_key, Retired):
            super()._record_remove_event(node)

    def _may_insert(self, req: Req) -> bool:
        """True only after a committed transfer."""
        return self.may_share(req) and record_of(req).stage in (Stage.COMMITTED, Stage.RUNNING)

    @override
    def insert(self, params: Any) -> Any:
        self.inserts += 1
        return super().insert(params)

    @override
    def evict(self, params: Any) -> Any:
        # Each eviction visits every leaf, and on a full pool every decode step would evict. So a
        # small eviction frees more than it was asked for.
        if self.serves_decode:
            minimum = self.token_to_kv_pool_allocator.size // MIN_EVICTED_FRACTION
            params = replace(params, num_tokens=max(params.num_tokens, minimum))
        return super().evict(params)

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Return ``tokens`` slots (1-D int64), whole pages, after evicting the shortfall; None if
        the eviction frees too few."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        allocator = self.token_to_kv_pool_allocator
        if not tokens:
            return torch.empty(0, dtype=torch.int64, device=allocator.device)
        shortfall = tokens - allocator.available_size()
        if shortfall > 0:
            self.evict(EvictParams(num_tokens=shortfall))
        return allocator.alloc(tokens)

    @override
    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> Any:
        upper = super()._split_node(key, child, split_len)
        if self.claims is not None:
            self.claims.split(upper, child)
        return upper

    @override
    def match_prefix(self, params: Any) -> Any:
        req = params.req
        if not self.serves_decode or req is None or req.req_pool_idx is None:
            return super().match_prefix(params)
        # Return the prefix that the request got at admission: another match could find a longer one
        # that was inserted since, and would overwrite which slots are shared and which node is
        # locked.
        from sglang.srt.mem_cache.base_prefix_cache import MatchResult

        held = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.cache_protected_len]
        return MatchResult(
            device_indices=held.to(torch.int64),
            last_device_node=req.last_node,
            last_host_node=req.last_node,
            cache_protected_len=req.cache_protected_len,
        )

    def adopt(self, req: Req) -> None:
        """Share the prompt of ``req``, whose transfer was committed on all ranks.

        If this waited until the request runs or ends, followers would move the same KV again.
        """
        record_of(req).enter(Stage.COMMITTED)
        self.cache_unfinished_req(req)

    @override
    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        if not self.serves_decode:
            super().cache_unfinished_req(req, chunked)
            return
        if not self._may_insert(req):
            return
        committed = req.kv_committed_len
        if committed - self.is_eagle < req.cache_protected_len + self.page_size:
            record_of(req).pairs = []
            return  # all its whole pages are in the tree already
        # ``fill_ids`` ends with the first generated token, whose KV does not exist yet; inserting
        # it would put an unwritten slot into the tree. SGLang accepts pairs in the same place.
        fill_ids = req.fill_ids
        ids: list[Any] = key_pairs(req, committed) if self.is_eagle else fill_ids[:committed]
        req.fill_ids = ids
        try:
            super().cache_unfinished_req(req, chunked)
        finally:
            req.fill_ids = fill_ids
        record_of(req).pairs = []  # in the tree now
        if self.claims is not None:
            self.claims.shared(req)

    @override
    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        if self.claims is not None:
            self.claims.left(req)
        if not self.serves_decode:
            super().cache_finished_req(req, is_insert)
            return
        record, rows = record_of(req), self.req_to_token_pool.req_to_token
        is_insert = is_insert and self._may_insert(req)
        if req.last_node is None:
            req.last_node = self.root_node  # never matched, or retracted: nothing is locked
        # The step in flight may still use them; see ``transfer.StepWrites``.
        private = rows[req.req_pool_idx, req.cache_protected_len : req.kv_allocated_len]
        record.slots_at_end = private.to(torch.int64, copy=True)
        if hasattr(req, "kv_cache_cpu"):
            # SGLang copied the target's KV, but neither the draft model's nor any state.
            record.enter(Stage.RETRACTED)
            slots = rows[req.req_pool_idx, : req.kv_committed_len]
            pool = self.token_to_kv_pool_allocator.get_kvcache()
            if self.draft_pool is not None:
                record.draft_copy = self.draft_pool.get_cpu_copy(slots)
            record.state_copy = copy_state(pool, self.req_to_token_pool, req, slots)
        else:
            record.enter(Stage.ENDED)
        if self.is_eagle:
            self._release_pairs(req, is_insert)
        else:
            super().cache_finished_req(req, is_insert)

    def _release_pairs(self, req: Req, is_insert: bool) -> None:
        """Do what SGLang's ``cache_finished_req`` does, with the pairs that exist already.

        The row, in tokens, when the tree takes the whole pages of the text::

            [0, shared)             the request's locked prefix: the tree's
            [shared, found)         equal pages that the tree got meanwhile: free ours
            [found, pairs)          inserted: the tree's from now on
            [pairs, committed)      the last partial page: free
        """
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey, page_align_keys

        committed, shared = req.pop_committed_kv_cache(), req.cache_protected_len
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :committed].long()
        free = self.token_to_kv_pool_allocator.free
        if is_insert and not self.disable_finished_insert:
            pairs = page_align_keys(key_pairs(req, committed), self.page_size)
            key = RadixKey(pairs, req.extra_key, is_bigram=True)
            priority = getattr(req, "priority", None) or 0
            params = InsertParams(key=key, value=slots[: len(pairs)], priority=priority)
            found = self.insert(params).prefix_len
            free(slots[shared:found])
            shared = len(pairs)
        free(slots[shared:])
        self.dec_lock_ref(req.last_node)
        record_of(req).pairs = []


class RadixPrebuiltBatch(ScheduleBatchDisaggregationDecodeMixin):
    """The batch that a decode server runs instead of a prefill: continues after the prefixes."""

    @override
    def prepare_for_prebuilt(self) -> None:
        if not getattr(self.tree_cache, "serves_decode", False):
            super().prepare_for_prebuilt()
            return
        for req in self.reqs:
            # SGLang rebuilt it with the first generated token, which has no KV yet.
            req.fill_ids = req.fill_ids[: req.kv_committed_len]
            req.set_extend_input_len(len(req.fill_ids) - len(req.prefix_indices))
            # A chain of drafts starts behind a token of this batch.
            assert req.extend_input_len or not self.tree_cache.is_eagle, "pairs never end a text"
            # Clients see the cached tokens that prefill reported; stock would add our prefix.
            req.already_computed = len(req.prefix_indices)
        super().prepare_for_prebuilt()
        for req in self.reqs:
            self.tree_cache.claims.started(req)
        # Stock copies each row from its start, which would list shared slots as outputs.
        rows = self.req_to_token_pool.req_to_token
        private = [
            rows[req.req_pool_idx, len(req.prefix_indices) : req.kv_committed_len]
            for req in self.reqs
        ]
        self.out_cache_loc = torch.cat(private).to(torch.int64)

    @override
    def process_prebuilt(self, server_args: ServerArgs, future_map: FutureMap) -> None:
        if getattr(self.tree_cache, "serves_decode", False):
            for req in self.reqs:
                # Its grammar accepted the last token before the retraction. SGLang checks for
                # that, but only xgrammar without a reasoning parser reports it.
                if req.retracted_stain and req.grammar is not None:
                    req.grammar.current_token = req.output_ids[-1]
        super().process_prebuilt(server_args, future_map)

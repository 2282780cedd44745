"""The radix tree as a decode server uses it: leases on prefixes, committed KV, the prebuilt batch.

A lease is what the tree holds of a prompt, locked until the request lets go of it. A request uses
what its lease gave and never matches again; only KV whose transfer was committed on all ranks
enters the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: keys of two forms; what overrides hand on

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.claims import Claims, upwards
from sglang.srt.disaggregation.delta.decode.record import Stage, may_match, record_of
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
    """What the tree finds the KV of the first ``length`` tokens of ``req`` by: each token with the
    one behind it, so one pair less. The list is not to be changed.

    They are made once: those of a prompt at its first match, and kept until the tree has them.
    SGLang's own methods make them anew at each match and each insert, for each token of the text,
    and nothing else is scheduled meanwhile.
    """
    from sglang.srt.mem_cache.utils import convert_to_bigram_key

    record = record_of(req)
    if not record.pairs:
        parts = [node.key.token_ids for node in upwards(req.last_node)]
        record.pairs = list(chain.from_iterable(reversed(parts)))
    known = record.pairs
    if len(known) < length - 1:
        text = req.origin_input_ids + req.output_ids
        known += convert_to_bigram_key(text[len(known) : length])
    return known if len(known) == length - 1 else known[: length - 1]


class PrefixLease:
    """One match and one lock on a tree node; released once, or handed over to a request once.

    ``indices`` are the pool slots of the prefix (1-D int64, on the pool's device), a whole number
    of pages, since a paged tree matches whole pages only. The lock covers the path to ``node``.
    A lease on the root holds nothing. After its release it still says where the match ended: while
    that ``holds``, which costs a page and not the prompt, ``lock`` takes the same lease again.
    """

    def __init__(self, tree: DecodeRadixTree, node: TreeNode, indices: torch.Tensor) -> None:
        self._tree, self._held = tree, False
        self.node, self.indices = node, indices
        # A flush may leave nodes in their places.
        self._root, self._generation = tree.root_node, tree.generation
        #: The key of the child that a longer match would go on to; None where the prompt ends.
        self._following: Any = None
        self.lock()

    @classmethod
    def take(cls, tree: DecodeRadixTree, key_ids: list[Any], extra_key: str | None) -> PrefixLease:
        """Match and lock the longest cached prefix of ``key_ids``: tokens, or pairs of them; none
        for a request that must not share.

        The key is built as ``Req.init_next_round_input`` builds it, so that LoRA, cache salt and
        any other ``extra_key`` separate requests here as they do on an aggregated server.
        """
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(key_ids, extra_key)))
        return cls(tree, match.last_device_node, match.device_indices)

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.indices)

    def lock(self) -> None:
        """Lock the prefix, at first or once more."""
        self._held = True
        self._tree.inc_lock_ref(self.node)

    def release(self) -> None:
        """Give the lock back. Calling it again, or after ``bind``, does nothing."""
        if self._held:
            self._held = False
            self._tree.dec_lock_ref(self.node)

    def remember(self, key_ids: list[Any], extra_key: str | None) -> None:
        """The match of ``key_ids`` gave this lease: note where it ended, for ``holds``."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        page = self._tree.page_size
        key = RadixKey(key_ids[self.length : self.length + page], extra_key)
        self._following = self._tree.get_child_key_fn(key) if len(key) == page else None

    def holds(self) -> bool:
        """Whether the match would end there again: the node is still in the tree (a split leaves a
        node the end of its path), and nothing that the prompt goes on with was inserted below."""
        tree, node = self._tree, self.node
        if tree.root_node is not self._root or tree.generation != self._generation:
            return False
        if node is not self._root:
            key = tree.get_child_key_fn(node.key)
            if node.parent.children.get(key) is not node:
                return False
        return self._following is None or self._following not in node.children

    def bind(self, rows: ReqToTokenPool, req: Req, slots: torch.Tensor) -> None:
        """Write the request's row and make it the owner of its slots and of the lock.

        ``slots`` (1-D int64) follow the lease's. The caller knows that a row is free.
        """
        length = self.length + len(slots)
        row = rows.alloc([req])
        assert row is not None, "a free row was checked before"
        rows.write((req.req_pool_idx, slice(0, self.length)), self.indices)
        rows.write((req.req_pool_idx, slice(self.length, length)), slots)
        req.kv_allocated_len = req.kv_committed_len = length
        req.fill_ids = req.origin_input_ids + req.output_ids
        assert self._held, "a released lease cannot be handed over"
        self._held = False  # SGLang's own release path returns the lock
        req.last_node = req.last_host_node = self.node
        req.prefix_indices, req.cache_protected_len = self.indices, self.length
        req.set_extend_input_len(len(req.fill_ids) - self.length)


def unlocked_tokens(node: TreeNode) -> int:
    """Tokens from ``node`` up that a lock on it would take out of what can be evicted."""
    unlocked = takewhile(lambda each: each.lock_ref == 0, upwards(node))
    return sum(len(each.key) for each in unlocked)


def tree_nodes(tree: RadixCache) -> Iterator[TreeNode]:
    """All nodes but the root, parents first."""
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


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
    generation: int = -1  # the constructor's reset is none
    #: What requests hold; set by ``step.Admission``.
    claims: Claims | None = None
    #: The draft model's KV pool, with the same slots; None without speculation.
    draft_pool: KVCache | None = None

    def serve_decode(self, draft_pool: KVCache | None = None) -> None:
        """Switch to the rules of a decode server."""
        self.serves_decode = True
        self.draft_pool = draft_pool

    def may_share(self, req: Req) -> bool:
        """Whether ``req`` may match here, and once its transfer is committed, insert."""
        return may_match(req) and record_of(req).generation == self.generation

    @override
    def reset(self) -> None:
        super().reset()
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
        # Listeners know pages by their tokens, and were told that all of these are gone. A page of
        # the same tokens may have been stored since.
        if not isinstance(node.key.extra_key, Retired):
            super()._record_remove_event(node)

    def _may_insert(self, req: Req) -> bool:
        """Opt-in, only after a committed transfer."""
        return self.may_share(req) and record_of(req).stage in (Stage.COMMITTED, Stage.RUNNING)

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

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """So many slots (1-D int64), whole pages; evicts what is missing. None where that was not
        enough."""
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

    def adopt(self, req: Req) -> None:
        """The transfer of ``req`` was committed: share its prompt from now on.

        Waiting until the request runs, or ends, would let followers move the same KV again.
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
            return  # all whole pages of it are in the tree already
        # ``fill_ids`` ends with the first generated token, whose KV does not exist yet; inserting
        # it would put an unwritten slot into the tree. SGLang takes pairs as they are.
        fill_ids = req.fill_ids
        ids: list[Any] = key_pairs(req, committed) if self.is_eagle else fill_ids[:committed]
        req.fill_ids = ids
        try:
            super().cache_unfinished_req(req, chunked)
        finally:
            req.fill_ids = fill_ids
        record_of(req).pairs = []  # the tree has them now
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
            # Never matched, or retracted since: nothing is locked.
            req.last_node = self.root_node
        # The step in flight may still use them; see ``transfer_queue.StepWrites``.
        own = rows[req.req_pool_idx, req.cache_protected_len : req.kv_allocated_len]
        record.slots_at_end = own.to(torch.int64, copy=True)
        if hasattr(req, "kv_cache_cpu"):
            # SGLang has copied the target's KV, and neither the draft model's nor any state.
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
        """SGLang's ``cache_finished_req``, without pairs that are made anew from the whole text."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey, page_align_keys

        committed, shared = req.pop_committed_kv_cache(), req.cache_protected_len
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :committed].long()
        free = self.token_to_kv_pool_allocator.free
        if is_insert and not self.disable_finished_insert:
            pairs = page_align_keys(key_pairs(req, committed), self.page_size)
            key = RadixKey(pairs, req.extra_key, is_bigram=True)
            priority = getattr(req, "priority", None) or 0
            given = InsertParams(key=key, value=slots[: len(pairs)], priority=priority)
            free(slots[shared : self.insert(given).prefix_len])  # others brought the same meanwhile
            shared = len(pairs)
        free(slots[shared:])
        self.dec_lock_ref(req.last_node)
        record_of(req).pairs = []


class RadixPrebuiltBatch(ScheduleBatchDisaggregationDecodeMixin):
    """What a decode server runs instead of a prefill: goes on after each shared prefix."""

    @override
    def prepare_for_prebuilt(self) -> None:
        if not getattr(self.tree_cache, "serves_decode", False):
            super().prepare_for_prebuilt()
            return
        for req in self.reqs:
            # The round input was just rebuilt with the first generated token, which has no KV yet.
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
        owned = [
            rows[req.req_pool_idx, len(req.prefix_indices) : req.kv_committed_len]
            for req in self.reqs
        ]
        self.out_cache_loc = torch.cat(owned).to(torch.int64)

    @override
    def process_prebuilt(self, server_args: ServerArgs, future_map: FutureMap) -> None:
        if getattr(self.tree_cache, "serves_decode", False):
            for req in self.reqs:
                # Its grammar took the last token before the retraction. SGLang asks for that, but
                # of its grammars only xgrammar's own say it, without a reasoning parser.
                if req.retracted_stain and req.grammar is not None:
                    req.grammar.current_token = req.output_ids[-1]
        super().process_prebuilt(server_args, future_map)

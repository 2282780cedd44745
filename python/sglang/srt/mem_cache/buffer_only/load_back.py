"""Load back: inserts staged pages into the device tree and copies them there.

This happens at the admission of their request, which then holds the pages like any other prefix.
Its batch waits for each layer of the copy just before using it (SGLang's layer events).

Contract:

- Thread: scheduler thread only.
- Ranks: ``add`` and ``launch`` run in the same step on all ranks; ``finish`` gets the agreed number
  of ended copies.
- Locks: the new node is locked from ``add`` until its copy has ended on all ranks; the staging
  pages are released at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.staging import Copies, SlotPair, StagingPages, slots_of

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.calls import Calls
    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch
    from sglang.srt.mem_cache.radix_cache import TreeNode


@dataclass(eq=False)
class LoadBack:
    """A copy of staged pages to the device, which holds a lock on ``node`` until it ends."""

    node: TreeNode
    staging: list[StagingPages]
    #: When it was queued; agreed milliseconds.
    since_ms: int


class LoadBacks:
    """All copies to the device of one rank, in order; see the module's contract."""

    def __init__(self, context: Context, calls: Calls) -> None:
        self._context, self._calls = context, calls
        #: For the next launch.
        self.queued: list[tuple[LoadBack, SlotPair]] = []
        self.copies: Copies[LoadBack] = Copies()
        #: Index of the last launch's layer events.
        self._layers = -1

    def __len__(self) -> int:
        return len(self.queued) + len(self.copies.launches)

    def has_room(self, prefetch: Prefetch, tree_pages: int, node: TreeNode) -> bool:
        """Return True if the request could be admitted while its ``tree_pages``, which end in
        ``node``, are locked. Checked because a copy locks them: without room, running requests
        would be retracted for pages of a waiting one."""
        tree = self._context.tree
        tree.inc_lock_ref(node)
        try:
            return len(prefetch.key) - tree_pages * self._context.page_size <= tree.room()
        finally:
            tree.dec_lock_ref(node)

    def add(
        self, prefetch: Prefetch, start: int, stop: int
    ) -> tuple[torch.Tensor, TreeNode] | None:
        """Insert the staged pages ``start .. stop`` of a prompt after the pages before them in the
        tree; the next launch copies them.

        Returns:
            The device slots of the pages and their node. None, with nothing changed, if the device
            has no memory for them even after eviction, or the tree's prefix has another length.
        """
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        context, tree, page = self._context, self._context.tree, self._context.page_size
        key, pages = prefetch.key[: stop * page], prefetch.staging_of(start, stop)
        values, above = tree._match_prefix_helper(tree.root_node, key)
        tree_tokens, new = sum(map(len, values)), len(pages) * page
        if tree_tokens + new != len(key):
            return None
        allocator = tree.token_to_kv_pool_allocator
        short = new - allocator.available_size()
        if short > 0:
            tree.inc_lock_ref(above)  # because eviction could remove the parent
            tree.evict(EvictParams(num_tokens=short))
            tree.dec_lock_ref(above)
        slots = allocator.alloc(new)
        if slots is None:
            return None
        # A new leaf, already stored.
        node = type(tree.root_node)(priority=above.priority if above.parent is not None else 0)
        node.parent, node.key, node.value = above, key[tree_tokens:], slots.clone()
        node.hash_value = prefetch.hashes[start - prefetch.begin : stop - prefetch.begin]
        node.stored = node.launched = new
        node.touch_after_ms = context.now_ms + context.settings.touch_ms
        above.children[tree.get_child_key_fn(node.key)] = node
        tree.evictable_size_ += new
        tree._update_leaf_status(above)
        tree._update_leaf_status(node)
        tree._record_store_event(node)
        tree.inserts += 1
        tree.inc_lock_ref(node)
        used = [piece for piece in prefetch.pieces if piece.staged and piece.start < stop]
        self._calls.detach(prefetch, used)
        load_back = LoadBack(node, [piece.staging for piece in used], context.now_ms)
        self.queued.append((load_back, (slots_of(pages, page), slots)))
        context.counters["prefetch_loaded_tokens"] += new
        hits = tree.prefetch_loaded_tokens_by_reqid
        hits[prefetch.rid] = hits.get(prefetch.rid, 0) + new
        return slots, node

    def launch(self, apart: bool = False) -> int:
        """Copy the queued pages, for the batch that is being formed. Return the index of the layer
        events to wait for, -1 if no copy is in flight. ``apart``: there is no such batch; at most
        one copy at a time is launched so.

        While a copy is in flight, every batch waits for the last one, because any batch may use its
        pages and the batch that it was launched for may not have waited: that batch may lack the
        loaded request, and a batch without a prefix reads no KV (FlashInfer, MLA).
        """
        if self.queued and not (apart and len(self.copies.launches)):
            pairs = [pair for _, pair in self.queued]
            finished, self._layers = self._context.copier.to_device(pairs)
            self.copies.add(finished, [load_back for load_back, _ in self.queued])
            self.queued.clear()
        return self._layers if len(self.copies.launches) else -1

    def finish(self, launches: int) -> None:
        """End the first ``launches`` copies, waiting for those that still run on this rank."""
        for load_back in self.copies.pop(launches):
            seconds = (self._context.now_ms - load_back.since_ms) / 1000
            self._context.observe("load_back_seconds", seconds)
            self._release(load_back)

    def reset(self) -> None:
        """End all copies, because the tree is about to be emptied."""
        self.finish(len(self.copies.launches))
        for load_back, _ in self.queued:
            self._release(load_back)
        self.queued.clear()

    def _release(self, load_back: LoadBack) -> None:
        self._context.tree.dec_lock_ref(load_back.node)
        for staging in load_back.staging:
            staging.release()

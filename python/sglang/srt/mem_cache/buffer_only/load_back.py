"""Load back: fetched pages become part of the device tree, and are copied there from the staging
buffer.

That happens when their request is admitted: the tree has the pages from then on, the request holds
them like any other prefix, and the batch that it is in waits for each layer of its own copy, just
before it uses it (SGLang's layer events). Nothing is locked but what is being copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.stage import Copies, Pair, StagingPages, slots_of

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.calls import Calls
    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch
    from sglang.srt.mem_cache.radix_cache import TreeNode


@dataclass(eq=False)
class LoadBack:
    """Staged pages on their way to the device. Until they are there, ``node`` is locked."""

    node: TreeNode
    staging: list[StagingPages]
    #: When it was queued; agreed milliseconds.
    since_ms: int


class LoadBacks:
    """All copies to the device of one rank, in order."""

    def __init__(self, context: Context, calls: Calls) -> None:
        self._context, self._calls = context, calls
        #: For the next launch.
        self.queued: list[tuple[LoadBack, Pair]] = []
        self.copies: Copies[LoadBack] = Copies()
        #: The layer events of the last launch.
        self._layers = -1

    def __len__(self) -> int:
        return len(self.queued) + len(self.copies.launches)

    def has_room(self, prefetch: Prefetch, held: int, node: TreeNode) -> bool:
        """Whether its request could be admitted, with the ``held`` pages that end in ``node``. The
        copy locks them: those that run would be retracted for what a waiting request holds."""
        tree = self._context.tree
        tree.inc_lock_ref(node)
        try:
            return len(prefetch.key) - held * self._context.page_size <= tree.room()
        finally:
            tree.dec_lock_ref(node)

    def add(
        self, prefetch: Prefetch, start: int, stop: int
    ) -> tuple[torch.Tensor, TreeNode] | None:
        """The staged pages ``start .. stop`` of a prompt enter the tree, which has all before them;
        the next launch copies them.

        Returns:
            The device slots of the pages and their node; None, and nothing has changed, where the
            device has no memory for them even after eviction, or the tree has something else.
        """
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        context, tree, page = self._context, self._context.tree, self._context.page_size
        key, pages = prefetch.key[: stop * page], prefetch.staging_of(start, stop)
        values, above = tree._match_prefix_helper(tree.root_node, key)
        held, new = sum(map(len, values)), len(pages) * page
        if held + new != len(key):
            return None
        allocator = tree.token_to_kv_pool_allocator
        short = new - allocator.available_size()
        if short > 0:
            tree.inc_lock_ref(above)  # or eviction could take what the pages hang below
            tree.evict(EvictParams(num_tokens=short))
            tree.dec_lock_ref(above)
        slots = allocator.alloc(new)
        if slots is None:
            return None
        # A new leaf that is in the store already.
        node = type(tree.root_node)(priority=above.priority if above.parent is not None else 0)
        node.parent, node.key, node.value = above, key[held:], slots.clone()
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
        used = [one for one in prefetch.pieces if one.staged and one.start < stop]
        self._calls.hand_over(prefetch, used)
        load_back = LoadBack(node, [one.staging for one in used], context.now_ms)
        self.queued.append((load_back, (slots_of(pages, page), slots)))
        context.counters["prefetch_loaded_tokens"] += new
        hits = tree.prefetch_loaded_tokens_by_reqid
        hits[prefetch.rid] = hits.get(prefetch.rid, 0) + new
        return slots, node

    def launch(self, apart: bool = False) -> int:
        """Copy what is queued, for the batch that is being formed; its layer events, -1 where no
        copy is under way. ``apart``: no batch came for it; one such copy at a time.

        While one is, every batch waits for the last: it may use what comes with it. The batch that
        it was made for need not have waited: it may have been formed without the request that was
        loaded, and one without any prefix reads no KV (FlashInfer, MLA). Where it has, this is no
        wait.
        """
        if self.queued and not (apart and len(self.copies.launches)):
            pairs = [pair for _, pair in self.queued]
            finished, self._layers = self._context.copier.to_device(pairs)
            self.copies.add(finished, [load_back for load_back, _ in self.queued])
            self.queued.clear()
        return self._layers if len(self.copies.launches) else -1

    def finish(self, launches: int) -> None:
        """The first ``launches`` launches have ended on all ranks, or are waited for now."""
        for load_back in self.copies.pop(launches):
            seconds = (self._context.now_ms - load_back.since_ms) / 1000
            self._context.observe("load_back_seconds", seconds)
            self._release(load_back)

    def reset(self) -> None:
        """The tree is about to be emptied."""
        self.finish(len(self.copies.launches))
        for load_back, _ in self.queued:
            self._release(load_back)
        self.queued.clear()

    def _release(self, load_back: LoadBack) -> None:
        self._context.tree.dec_lock_ref(load_back.node)
        for staging in load_back.staging:
            staging.release()

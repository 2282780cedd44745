"""Load back: fetched pages become part of the device tree, and are copied there from the staging
buffer.

That happens when their request is admitted: the tree has the pages from then on, the request holds
them like any other prefix, and the batch that it is in waits for each layer of its own copy, just
before it uses it (SGLang's layer events). Nothing is locked but what is being copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.stage import Copies, Pair, StagingPages, slots_of
from sglang.srt.mem_cache.buffer_only.touch import recent

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


@dataclass(eq=False)
class LoadBack:
    """Staged pages on their way to the device. Until they are there, ``node`` is locked."""

    node: TreeNode
    staging: list[StagingPages]
    #: When it was queued; agreed milliseconds.
    since_ms: int


class LoadBacks:
    """All copies to the device of one rank, in order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: For the next launch.
        self._queued: list[tuple[LoadBack, Pair]] = []
        self._copies: Copies[LoadBack] = Copies()
        #: The layer events of the last launch.
        self._layers = -1

    def __len__(self) -> int:
        return len(self._queued) + len(self._copies)

    @property
    def under_way(self) -> list[LoadBack]:
        """Those that have not been seen to end."""
        return [*self._copies.owners, *(load_back for load_back, _ in self._queued)]

    def add(
        self,
        key: RadixKey,
        hashes: Sequence[str],
        pages: Sequence[int],
        staging: list[StagingPages],
    ) -> tuple[torch.Tensor, TreeNode] | None:
        """The last part of ``key`` enters the tree; the next launch copies it from the staging
        buffer.

        Args:
            key: ``RadixKey`` from the start of a prompt, whole pages; the tree has all before the
                part, and nothing of it.
            hashes: page hashes of the part.
            pages: its staging pages, in order.
            staging: given back when the copy has ended.

        Returns:
            The device slots of the part and its node; None, and ``staging`` is still the caller's,
            where the device has no memory for it even after eviction, or the tree has something
            else.
        """
        tree, page = self._context.tree, self._context.page_size
        values, above = tree._match_prefix_helper(tree.root_node, key)
        held, new = sum(map(len, values)), len(pages) * page
        if held + new != len(key):
            return None
        slots = _allocate(tree, above, new)
        if slots is None:
            return None
        node = _append(tree, above, key[held:], slots, list(hashes))
        recent(node, self._context.now_ms, self._context.settings.touch_ms)
        tree.inc_lock_ref(node)
        self._queued.append(
            (LoadBack(node, staging, self._context.now_ms), (slots_of(pages, page), slots))
        )
        return slots, node

    def launch(self) -> int:
        """Copy what is queued, for the batch that is being formed; its layer events, -1 where no
        copy is under way.

        While one is, every batch waits for the last: it may use what comes with it. The batch that
        it was made for need not have waited: it may have been formed without the request that was
        loaded, and one without any prefix reads no KV (FlashInfer, MLA). Where it has, this is no
        wait.
        """
        if self._queued:
            self._launch()
        return self._layers if len(self._copies) else -1

    def launch_apart(self) -> None:
        """Copy what is queued, if no batch came for it; one such copy at a time."""
        if self._queued and not len(self._copies):
            self._launch()

    def _launch(self) -> None:
        finished, self._layers = self._context.copier.to_device([pair for _, pair in self._queued])
        self._copies.add(finished, [load_back for load_back, _ in self._queued])
        self._queued.clear()

    def ended(self) -> int:
        """Launches that have ended on this rank."""
        return self._copies.ended()

    def finish(self, launches: int) -> None:
        """The first ``launches`` launches have ended on all ranks, or are waited for now."""
        for load_back in self._copies.pop(launches):
            self._context.times.loaded(self._context.now_ms - load_back.since_ms)
            self._release(load_back)

    def reset(self) -> None:
        """The tree is about to be emptied."""
        self.finish(len(self._copies))
        for load_back, _ in self._queued:
            self._release(load_back)
        self._queued.clear()

    def _release(self, load_back: LoadBack) -> None:
        self._context.tree.dec_lock_ref(load_back.node)
        for staging in load_back.staging:
            staging.release()


def _allocate(tree: HiRadixCache, node: TreeNode, tokens: int) -> torch.Tensor | None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = tree.token_to_kv_pool_allocator
    tree.inc_lock_ref(node)  # or eviction could take what the part hangs below
    try:
        short = tokens - allocator.available_size()
        if short > 0:
            tree.evict(EvictParams(num_tokens=short))
        return allocator.alloc(tokens)
    finally:
        tree.dec_lock_ref(node)


def _append(
    tree: HiRadixCache, parent: TreeNode, key: RadixKey, slots: torch.Tensor, hashes: list[str]
) -> TreeNode:
    """A new leaf that is in the store already."""
    node = type(tree.root_node)(priority=parent.priority if parent.parent is not None else 0)
    node.parent, node.key, node.value, node.hash_value = parent, key, slots.clone(), hashes
    node.stored = node.launched = len(key)
    parent.children[tree.get_child_key_fn(key)] = node
    tree.evictable_size_ += len(key)
    tree._update_leaf_status(parent)
    tree._update_leaf_status(node)
    tree._record_store_event(node)
    return node

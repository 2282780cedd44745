"""Load back: fetched pages become part of the device tree, and are copied there from the stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.stage import MAX_LOAD_BACKS, Copies, StagingPages, slots_of

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.pipelines import Context
    from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch
    from sglang.srt.mem_cache.buffer_only.upstream import Key, Node, Tree


class Pin:
    """Keeps a node, and all above it, in the tree. Released once, whoever calls it how often."""

    def __init__(self, tree: Tree, node: Node) -> None:
        self._tree = tree
        self.node = node
        self._take(node)
        self._held = True

    @property
    def held(self) -> bool:
        """Whether the node is still pinned."""
        return self._held

    def move(self, node: Node) -> None:
        """Pin ``node`` instead, without a moment in which neither is."""
        self._take(node)
        self._drop(self.node)
        self.node = node

    def release(self) -> None:
        """Let the node be evicted; the first call counts."""
        if self._held:
            self._held = False
            self._drop(self.node)

    def _take(self, node: Node) -> None:
        node.protect_host()
        self._tree.inc_lock_ref(node)

    def _drop(self, node: Node) -> None:
        self._tree.dec_lock_ref(node)
        node.release_host()


def pinned_tokens(prefetches: Iterable[Prefetch], node: Node | None, page_size: int) -> int:
    """Tokens that ``prefetches`` keep from eviction, or will when all that was let in has come,
    together with those up to ``node``; what several share counts once."""
    pinned = [prefetch for prefetch in prefetches if prefetch.pin is not None]
    seen: set[Node] = set()
    for last in [*(prefetch.pin.node for prefetch in pinned if prefetch.pin), node]:
        while last is not None and last.parent is not None and last not in seen:
            seen.add(last)
            last = last.parent
    coming = sum(len(prefetch.keys) for prefetch in pinned if prefetch.admitted)
    return sum(len(one.key) for one in seen) + coming * page_size


@dataclass(frozen=True)
class Published:
    """Where a fetched part of a prompt is in the tree now.

    Attributes:
        node: the last node of the part.
        covered: leading tokens of the part that the tree held already.
        slots: device slots that the rest has to be copied to; None where nothing is left.
    """

    node: Node
    covered: int
    slots: torch.Tensor | None


def publish(tree: Tree, key: Key, begin: int, hashes: Sequence[str]) -> Published | None:
    """Insert the tokens of ``key`` from ``begin`` on, which came from the store.

    Matched anew: another request may have computed some of it meanwhile, and a node may have been
    split. What the tree holds already is left as it is.

    Args:
        tree: SGLang's ``HiRadixCache``.
        key: ``RadixKey`` from the start of the prompt to the end of the part, whole pages.
        begin: where the part begins, in tokens; the caller has that much pinned.
        hashes: page hashes of the part.

    Returns:
        None where the device has no memory for it, even after eviction.
    """
    values, node = tree._match_prefix_helper(tree.root_node, key)
    held = sum(map(len, values))
    covered, missing = held - begin, len(key) - held
    if covered < 0:
        raise RuntimeError(f"a pinned prefix of {begin} tokens is gone: the tree has {held}")
    if not missing:
        return Published(node, covered, None)
    slots = _allocate(tree, node, missing)
    if slots is None:
        return None
    child = _append(tree, node, key[held:], slots, list(hashes[covered // tree.page_size :]))
    return Published(child, covered, slots)


def _allocate(tree: Tree, node: Node, tokens: int) -> torch.Tensor | None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = tree.token_to_kv_pool_allocator
    tree.inc_lock_ref(node)  # or eviction could take the anchor of the part
    try:
        short = tokens - allocator.available_size()
        if short > 0:
            tree.evict(EvictParams(num_tokens=short))
        return allocator.alloc(tokens)
    finally:
        tree.dec_lock_ref(node)


def _append(tree: Tree, parent: Node, key: Key, slots: torch.Tensor, hashes: list[str]) -> Node:
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


@dataclass(eq=False)
class LoadBack:
    """Staged pages on their way to the device. Until they are there, ``node`` is locked."""

    node: Node
    staging: StagingPages


class LoadBacks:
    """All copies to the device of one rank, in order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._copies: Copies[LoadBack] = Copies()
        self._consumer_index = -1

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def under_way(self) -> list[LoadBack]:
        """Those that have not been seen to end."""
        return self._copies.owners

    @property
    def consumer_index(self) -> int:
        """The last copy to the device that a batch may have to wait for; -1 if all have ended."""
        return self._consumer_index if len(self._copies) else -1

    def ended(self) -> int:
        """Launches that have ended on this rank."""
        return self._copies.ended()

    def finish(self, launches: int) -> None:
        """The first ``launches`` launches have ended, on all ranks or because they are waited for
        now."""
        for load_back in self._copies.pop(launches):
            self._context.tree.dec_lock_ref(load_back.node)
            load_back.staging.release()

    def publish(self, prefetches: Sequence[Prefetch]) -> list[tuple[Prefetch, Published | None]]:
        """Publish what is staged, with one copy for all of it; nothing while too many run.

        The staging pages of a prefetch go to its copy, and its pin to what was published. With None
        where the device has no room, and then the prefetch is as it was.
        """
        if len(self._copies) >= MAX_LOAD_BACKS:
            return []
        results, pairs, started = [], [], []
        for prefetch in prefetches:
            published = self._publish(prefetch)
            results.append((prefetch, published))
            if published is None:
                continue
            assert prefetch.staging is not None and prefetch.pin is not None
            staging, prefetch.staging = prefetch.staging, None
            prefetch.pin.move(published.node)
            if published.slots is None:
                staging.release()
                continue
            page = self._context.page_size
            host = slots_of(staging.pages[published.covered // page : prefetch.staged], page)
            pairs.append((host, published.slots))
            self._context.tree.inc_lock_ref(published.node)
            started.append(LoadBack(published.node, staging))
        if pairs:
            finished, self._consumer_index = self._context.copier.to_device(pairs)
            self._copies.add(finished, started)
        return results

    def _publish(self, prefetch: Prefetch) -> Published | None:
        end = prefetch.begin + prefetch.staged * self._context.page_size
        hashes = prefetch.hashes[: prefetch.staged]
        return publish(self._context.tree, prefetch.key[:end], prefetch.begin, hashes)

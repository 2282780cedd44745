"""Fetched pages enter the device tree, as a node whose KV is still on its way from the stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """Where a fetched part of a prompt is in the tree now.

    Attributes:
        node: the last node of the part.
        covered: leading tokens of the part that the tree held already.
        slots: device slots that the rest has to be copied to; None where nothing is left.
    """

    node: Any
    covered: int
    slots: Any


def publish(tree: Any, key: Any, begin: int, hashes: Sequence[str]) -> Published | None:
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


def _allocate(tree: Any, node: Any, tokens: int) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = tree.token_to_kv_pool_allocator
    tree.inc_lock_ref(node)  # or eviction could take what the part will hang below
    try:
        short = tokens - allocator.available_size()
        if short > 0:
            tree.evict(EvictParams(num_tokens=short))
        return allocator.alloc(tokens)
    finally:
        tree.dec_lock_ref(node)


def _append(tree: Any, parent: Any, key: Any, slots: Any, hashes: list[str]) -> Any:
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

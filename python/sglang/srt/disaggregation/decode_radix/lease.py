"""The prefix lease: what the tree holds of a prompt, locked until the request lets go of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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

"""The prefix lease: what the tree holds of a prompt, locked until the request lets go of it."""

from __future__ import annotations

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

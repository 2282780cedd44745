"""What both pipelines work with, and the tally of what they did."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.buffer_only.agreement import Ledger
from sglang.srt.mem_cache.buffer_only.copies import Copier
from sglang.srt.mem_cache.buffer_only.lanes import Lane
from sglang.srt.mem_cache.buffer_only.page_store import PageStore
from sglang.srt.mem_cache.buffer_only.settings import Settings
from sglang.srt.mem_cache.buffer_only.stage import Lease, Stage

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """Everything but the pipelines themselves. ``tree`` is SGLang's ``HiRadixCache``."""

    tree: Any
    stage: Stage
    store: PageStore
    copier: Copier
    settings: Settings
    #: Another rank writes for this one (models whose ranks all hold the same KV).
    writes_elsewhere: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    #: What was done so far: see ``metrics.COUNTERS``.
    tally: Counter[str] = field(default_factory=Counter)
    #: Agreed time in milliseconds, as of the last step.
    now_ms: int = 0
    #: Makes the threads; tests make lanes that stand still.
    make_lane: Callable[[str], Lane] = Lane

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.settings.page_size

    def strand(self, lease: Lease) -> None:
        """A call that was given up has not returned, on some rank: ``lease`` lasts until it has."""
        if lease.stranded:
            return
        lease.stranded = True
        stage = self.stage
        logger.warning(
            "HiCache: a call of the store that was given up may still use %d staging pages. They "
            "stay out of use until it returns, as do %d of %d (--hicache-buffer-pages) in all",
            len(lease.pages),
            stage.stranded,
            stage.pages,
        )

    def prefix_keys(self, node: Any) -> list[str] | None:
        """Keys of all pages up to the end of ``node``, where the backend wants them."""
        from sglang.srt.mem_cache.buffer_only.namespaces import store_keys

        if not self.settings.pass_prefix_keys:
            return None
        pieces = []
        while node.parent is not None:
            pieces.append(store_keys(page_hashes(node, self.page_size), node.key.extra_key))
            node = node.parent
        return [key for piece in reversed(pieces) for key in piece]


def page_hashes(node: Any, page_size: int) -> list[str]:
    """SGLang's page hashes of ``node``; computed now if it was inserted without."""
    from sglang.srt.mem_cache.radix_cache import compute_node_hash_values

    bare = []
    while node.hash_value is None:
        bare.append(node)
        node = node.parent
    for node in reversed(bare):
        node.hash_value = compute_node_hash_values(node, page_size)
    hashes: list[str] = node.hash_value
    return hashes


class Pin:
    """Keeps a node, and all above it, in the tree. Released once, whoever calls it how often."""

    def __init__(self, tree: Any, node: Any) -> None:
        self._tree = tree
        self.node = node
        self._take(node)
        self._held = True

    @property
    def held(self) -> bool:
        """Whether the node is still pinned."""
        return self._held

    def move(self, node: Any) -> None:
        """Pin ``node`` instead, without a moment in which neither is."""
        self._take(node)
        self._drop(self.node)
        self.node = node

    def release(self) -> None:
        """Let the node be evicted; the first call counts."""
        if self._held:
            self._held = False
            self._drop(self.node)

    def _take(self, node: Any) -> None:
        node.protect_host()
        self._tree.inc_lock_ref(node)

    def _drop(self, node: Any) -> None:
        self._tree.dec_lock_ref(node)
        node.release_host()

"""Objects that backup, prefetch and load back of one rank share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import Checksum
from sglang.srt.mem_cache.buffer_only.jobs import Threads
from sglang.srt.mem_cache.buffer_only.nodes import page_hashes
from sglang.srt.mem_cache.buffer_only.page_store import PageStore
from sglang.srt.mem_cache.buffer_only.settings import BufferSettings
from sglang.srt.mem_cache.buffer_only.staging import Copier, StagingPool
from sglang.srt.mem_cache.buffer_only.worth import FetchChoice

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


@dataclass
class Context:
    """Objects that backup, prefetch and load back of one rank share.

    Contract: written by the scheduler thread only. ``checksum``, ``now_ms`` and the namespace of
    ``store`` are equal on all ranks that act together.
    """

    tree: HiRadixCache
    staging_pool: StagingPool
    store: PageStore
    copier: Copier
    settings: BufferSettings
    #: True if another rank writes for this one (models whose ranks all hold the same KV).
    skip_backup: bool = False
    #: Checksum of all transfers started.
    checksum: Checksum = field(default_factory=Checksum)
    #: Totals by name (``metrics.COUNTERS``).
    counters: Counter[str] = field(default_factory=Counter)
    #: Number of hits by choice.
    choices: Counter[FetchChoice] = field(default_factory=Counter)
    #: Callback that records a duration: name of the histogram, seconds.
    observe: Callable[[str, float], None] = lambda name, seconds: None
    #: Agreed time in milliseconds, as of the last step.
    now_ms: int = 0
    #: Bytes of a page in the staging buffer.
    page_bytes: int = 0
    #: Factory of threads, given a name and a count; tests pass one that can be stopped.
    make_thread: Callable[..., Threads] = Threads
    #: All threads, to be closed at the end.
    all_threads: list[Threads] = field(default_factory=list)

    def threads(self, name: str, count: int = 1) -> Threads:
        """Return new threads, which live as long as the server."""
        self.all_threads.append(self.make_thread(name, count))
        return self.all_threads[-1]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.settings.page_size

    def match(self, key: RadixKey) -> tuple[int, TreeNode]:
        """Match ``key`` in the tree. Return the number of pages found and the last node."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        return len(match.device_indices) // self.page_size, match.last_device_node

    def prefix_keys(self, node: TreeNode) -> list[str] | None:
        """Return the keys of all pages up to the end of ``node``; None unless the backend takes
        them."""
        if not self.settings.pass_prefix_keys:
            return None
        extra_key, hashes = node.key.extra_key, list[str]()
        while node.parent is not None:
            hashes[:0] = page_hashes(node, self.page_size)
            node = node.parent
        return self.store.keys(hashes, extra_key)

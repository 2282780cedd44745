"""What backup, prefetch and load back of one rank share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import Checksum
from sglang.srt.mem_cache.buffer_only.jobs import Threads
from sglang.srt.mem_cache.buffer_only.nodes import page_hashes
from sglang.srt.mem_cache.buffer_only.settings import Settings
from sglang.srt.mem_cache.buffer_only.stage import Copier, Stage
from sglang.srt.mem_cache.buffer_only.store_client import PageStore
from sglang.srt.mem_cache.buffer_only.worth import Choice

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


@dataclass
class Context:
    """What backup, prefetch and load back of one rank work with."""

    tree: HiRadixCache
    stage: Stage
    store: PageStore
    copier: Copier
    settings: Settings
    #: Another rank writes for this one (models whose ranks all hold the same KV).
    skip_backup: bool = False
    #: Of all transfers that were started.
    checksum: Checksum = field(default_factory=Checksum)
    #: What was done so far: see ``metrics.COUNTERS``.
    counters: Counter[str] = field(default_factory=Counter)
    #: Hits, by what became of them.
    choices: Counter[Choice] = field(default_factory=Counter)
    #: Is told of durations that have ended: name of the histogram, seconds.
    observe: Callable[[str, float], None] = lambda name, seconds: None
    #: Agreed time in milliseconds, as of the last step.
    now_ms: int = 0
    #: Bytes of a page in the staging buffer.
    page_bytes: int = 0
    #: Makes threads, of a name and as many as wanted; tests make ones that stand still.
    make_thread: Callable[..., Threads] = Threads
    #: All that were made, to be closed at the end.
    made: list[Threads] = field(default_factory=list)

    def threads(self, name: str, count: int = 1) -> Threads:
        """Threads that live as long as the server."""
        self.made.append(self.make_thread(name, count))
        return self.made[-1]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.settings.page_size

    def match(self, key: RadixKey) -> tuple[int, TreeNode]:
        """Pages of ``key`` that the tree has, and the node in which they end."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        return len(match.device_indices) // self.page_size, match.last_device_node

    def prefix_keys(self, node: TreeNode) -> list[str] | None:
        """Keys of all pages up to the end of ``node``, where the backend wants them."""
        if not self.settings.pass_prefix_keys:
            return None
        extra_key, hashes = node.key.extra_key, list[str]()
        while node.parent is not None:
            hashes[:0] = page_hashes(node, self.page_size)
            node = node.parent
        return self.store.keys(hashes, extra_key)

"""Backup and prefetch of one rank, and the one step that drives them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.buffer_only.agreement import Facts, Ledger, Reduce, agree
from sglang.srt.mem_cache.buffer_only.backup import Writes
from sglang.srt.mem_cache.buffer_only.page_store import Lane, PageStore, page_hashes, store_keys
from sglang.srt.mem_cache.buffer_only.prefetch import Reads
from sglang.srt.mem_cache.buffer_only.settings import Settings
from sglang.srt.mem_cache.buffer_only.stage import Copier, Lease, Stage

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
        if not self.settings.pass_prefix_keys:
            return None
        pieces = []
        while node.parent is not None:
            pieces.append(store_keys(page_hashes(node, self.page_size), node.key.extra_key))
            node = node.parent
        return [key for piece in reversed(pieces) for key in piece]


#: How long the store may keep the threads when the server ends.
CLOSE_S = 10.0


class Pipelines:
    """Writes and reads over one stage.

    Args:
        parts: what both work with.
        reduce_min: elementwise minimum of a vector of integers over the ranks of this server.
        clock: seconds.
    """

    def __init__(
        self, parts: Parts, reduce_min: Reduce, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.parts = parts
        self.writes = Writes(parts)
        self.reads = Reads(parts)
        self._reduce_min = reduce_min
        self._clock = clock
        self._born = clock()

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way, apart from what was given up."""
        return self.writes.busy or self.reads.busy

    def step(self) -> None:
        """Once in each scheduler step, on all ranks: agree, act on what has ended, start more."""
        written, writes = self.writes.facts()
        loaded, reads = self.reads.facts()
        now_ms = int((self._clock() - self._born) * 1000)
        facts = Facts(now_ms, written, loaded, writes, reads)
        agreed = agree(facts, self.parts.ledger, self._reduce_min)
        self.parts.now_ms = max(self.parts.now_ms, agreed.clock_ms)
        self.writes.apply(agreed)
        self.reads.apply(agreed)
        # Reads first: a request waits for them.
        self.reads.pump()
        self.writes.pump()

    def reset(self) -> None:
        """The tree is about to be emptied."""
        self.writes.reset()
        self.reads.reset()

    def clear_store(self) -> bool:
        """Remove everything from the store; whether it did.

        What is known of it is forgotten in any case, since the ranks may have fared differently: a
        page that is there is not written again, but one that is believed to be there never is.
        """
        cleared = self.parts.store.guard.clear()
        self.reads.forget_found()
        self.writes.forget_stored(self.parts.tree.root_node)
        return cleared

    def close(self) -> bool:
        """End the threads, and close the store; False if it is still in a call, and then it is left
        as it is."""
        guard = self.parts.store.guard
        ended = [self.writes.close(CLOSE_S), self.reads.close(CLOSE_S)]
        if not all(ended) or guard.under_way:
            return False
        guard.close()
        return True

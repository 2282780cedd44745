"""Touch: what is noted as stored is looked up in the store while it is in use, and written again
where the store has lost it.

A prefix that every request finds on the device is never asked for in the store, and nobody would
write it again, since it is noted as stored. So the path of a request that has run is looked up, at
most once in ``touch_ms`` for each node, and not so soon after the store has taken or given it. What
it has lost is not noted as stored any more, so that the next request that passes has it written.
For a store with leases or an order of use, looking a key up is also what makes it recent: it would
lose first what is used most.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import PENDING
from sglang.srt.mem_cache.buffer_only.nodes import page_hashes, path_pieces

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.buffer_only.jobs import Job
    from sglang.srt.mem_cache.radix_cache import TreeNode

#: Paths that wait to be touched, at most; the oldest go first.
MOST_WAITING = 256


@dataclass
class Touch:
    """A path that is looked up: its first ``tokens`` tokens, which are noted as stored."""

    node: TreeNode
    #: From the start of the path to the end of ``node``, which no split and no deletion changes.
    length: int
    tokens: int
    job: Job


class Touches:
    """All touches of one rank, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = context.threads("touch")
        self._waiting: dict[TreeNode, None] = {}
        #: The path that is looked up now.
        self.running: Touch | None = None

    def used(self, node: TreeNode) -> None:
        """A request has used ``node``, which is in the store, and all above it.

        Called from the first node of its path to the last, which stands for all of them.
        """
        now = self._context.now_ms
        if not node.stored or now < node.touch_after_ms:
            return
        node.touch_after_ms = now + self._context.settings.touch_ms
        if node.parent is not None:
            self._waiting.pop(node.parent, None)
        self._waiting[node] = None
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def vote(self) -> int:
        """Leading tokens that the store has of the path that is looked up, as far as this rank
        knows; ``PENDING`` while it is asked. All of them where the store was at fault: that says
        nothing about its content."""
        touch = self.running
        if touch is None or touch.job.pages == PENDING:
            return 0 if touch is None else PENDING
        return touch.tokens if touch.job.fault else touch.job.pages * self._context.page_size

    def apply(self, found: int) -> None:
        """All ranks have an answer, unless ``found`` is ``PENDING``."""
        touch, page = self.running, self._context.page_size
        if touch is None or found == PENDING:
            return
        self.running = None
        if found >= touch.tokens:
            return
        self._context.counters["store_lost_pages"] += (touch.tokens - found) // page
        for node, back in path_pieces(touch.node, touch.length):
            begin = touch.length - back - len(node.key)
            if begin + node.stored > found:  # nothing behind what was found is stored
                node.stored = node.launched = max(0, found - begin)

    def launch(self) -> None:
        """Look up the next path, if none is."""
        while self.running is None and self._waiting:
            node = next(iter(self._waiting))
            del self._waiting[node]
            self.running = self._start(node)

    def reset(self) -> None:
        """The tree is about to be emptied, or the store was."""
        self._waiting.clear()
        if self.running is not None:
            self.running.job.cancelled = True
            self.running.tokens = 0  # whatever is found, nothing is lost

    def _start(self, node: TreeNode) -> Touch | None:
        context, store = self._context, self._context.store
        path, hashes, tokens = list(path_pieces(node, sys.maxsize))[::-1], list[str](), 0
        for piece, _ in path:
            pages = piece.stored // context.page_size
            hashes.extend(page_hashes(piece, context.page_size)[:pages])
            tokens += piece.stored
            if piece.stored < len(piece.key):
                break
        if not tokens:
            return None
        namespace, extra_key = store.namespace, node.key.extra_key
        extra: list[str] | None = [] if context.settings.pass_prefix_keys else None

        def look_up(job: Job) -> int:
            keys = store.keys(hashes, extra_key, 0, namespace)
            return store.call(job, store.client.query, keys, extra)

        context.checksum.note("touch", tokens, hashes[-1])
        length = sum(len(piece.key) for piece, _ in path)
        return Touch(node, length, tokens, self._thread.submit(look_up))

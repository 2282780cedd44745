"""Touch: prefixes that are used on the device are kept warm in the store, and written again where
it has lost them.

A store keeps what is asked for. A prefix that every request finds on the device is never asked for
there: the store would lose first what is used most, and nobody would write it again, since it is
noted as stored. So the path of a request that has run is looked up in the store, at most once in
``touch_ms`` for each node. Looking a key up is what makes it recent for a store with leases or an
order of use. What it has lost is not noted as stored any more, so that the next request that passes
has it written.

What the store has just taken or given is recent there by that: prompts that share nothing would be
asked for twice each. But only a path that nobody else has used is spared: the end of any other one
is where its older nodes become recent, also those that others have looked up a moment ago.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import PENDING
from sglang.srt.mem_cache.buffer_only.backup_queue import path_pieces
from sglang.srt.mem_cache.buffer_only.page_store import Job, page_hashes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.radix_cache import TreeNode

#: Paths that wait to be touched, at most; the oldest go first.
MOST_WAITING = 256
#: How often a request counts as a use of a node: when its prompt is computed, and when it ends.
OWN_USES = 2


@dataclass
class Touch:
    """A path that is looked up: its first ``tokens`` tokens, which are noted as stored."""

    node: TreeNode
    #: From the start of the path to the end of ``node``, which no split and no deletion changes.
    length: int
    tokens: int
    job: Job

    def found(self, page_size: int) -> int:
        """Leading tokens that the store has, as far as this rank knows; ``PENDING`` while it is
        asked. All of them where the store was at fault: that says nothing about its content."""
        if self.job.pages is None:
            return PENDING
        return self.tokens if self.job.fault else self.job.pages * page_size


class Touches:
    """All touches of one rank, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = context.make_thread("touch")
        self._waiting: dict[TreeNode, None] = {}
        self._running: Touch | None = None

    @property
    def running(self) -> Touch | None:
        """The path that is looked up now."""
        return self._running

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
        """What this rank knows of the path that is looked up."""
        return 0 if self._running is None else self._running.found(self._context.page_size)

    def apply(self, found: int) -> None:
        """All ranks have an answer, unless ``found`` is ``PENDING``."""
        touch = self._running
        if touch is None or found == PENDING:
            return
        self._running = None
        if found < touch.tokens:
            pages = (touch.tokens - found) // self._context.page_size
            self._context.counters["store_lost_pages"] += pages
            lost(touch, found)

    def launch(self) -> None:
        """Look up the next path, if none is."""
        while self._running is None and self._waiting:
            node = next(iter(self._waiting))
            del self._waiting[node]
            self._running = self._start(node)

    def reset(self) -> None:
        """The tree is about to be emptied, or the store was."""
        self._waiting.clear()
        if self._running is not None:
            self._running.job.cancel()
            self._running.tokens = 0  # whatever is found, nothing is lost

    def close(self, until: float) -> bool:
        """End the thread; False if it runs on at ``until``, of ``time.monotonic``."""
        return self._thread.close(until)

    def _start(self, node: TreeNode) -> Touch | None:
        context, store = self._context, self._context.store
        tokens, hashes = 0, []
        path = _path(node)
        for piece in path:
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
            return store.query(store.keys(hashes, extra_key, 0, namespace), extra, job)

        context.checksum.note("touch", tokens, hashes[-1])
        length = sum(len(piece.key) for piece in path)
        return Touch(node, length, tokens, self._thread.submit(look_up))


def _path(node: TreeNode) -> list[TreeNode]:
    """From the first node below the root down to ``node``."""
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found[::-1]


def recent(node: TreeNode, now_ms: int, touch_ms: int) -> None:
    """The store has just taken or given ``node``: it is asked for that in ``touch_ms`` at the
    earliest, if the request that brought it is the only one that has used its path."""
    above: TreeNode = node
    while above.parent is not None:
        if above.hit_count > OWN_USES:
            return
        above = above.parent
    node.touch_after_ms = max(node.touch_after_ms, now_ms + touch_ms)


def lost(touch: Touch, found: int) -> None:
    """The store has only the first ``found`` tokens of a path: nothing behind is stored."""
    for node, back in path_pieces(touch.node, touch.length):
        begin = touch.length - back - len(node.key)
        if begin + node.stored > found:
            node.stored = node.launched = max(0, found - begin)

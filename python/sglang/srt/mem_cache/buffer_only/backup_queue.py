"""What waits to be written, and what a node knows about its copy in the store.

Positions are counted in tokens *back from the end of a node*. Splitting a node cuts off its front
and leaves its end where it was, and a deleted node keeps its parent, so such a position names the
same tokens for as long as a transfer may take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode
else:
    TreeNode = object

#: Why tokens were not written, or not yet: label values of the counter.
FULL, EVICTED, UNCOVERED, FLUSHED = "queue_full", "evicted", "parent_failed", "flushed"
#: The staging buffer is full of what overdue calls of the store may still use.
STUCK = "store_stuck"
#: The store did not take what was tried; a request that passes has it tried again.
REFUSED = "store_refused"


class StoredNode(TreeNode):
    """Mixin for SGLang's ``TreeNode``. All zero, and unused, unless the mode is buffer_only."""

    #: Leading tokens that are durable in the store, on every rank.
    stored: int = 0
    #: Leading tokens that are durable or on their way; never less than ``stored``.
    launched: int = 0
    #: The pending backup that covers this node, shared with the nodes that a split made of it.
    pending: PendingBackup | None = None
    #: When the store is to be asked for it again, in agreed milliseconds.
    touch_after_ms: int = 0

    @property
    def storage_backed(self) -> bool:
        """Whether all of this node is durable in the store, on every rank."""
        return self.key is not None and self.stored >= len(self.key)

    @property
    def storage_ready(self) -> bool:
        """Whether the node can be evicted from the device without losing its KV."""
        return bool(self.backuped or self.storage_backed)


@dataclass(frozen=True)
class Segment:
    """Tokens of a path: from ``start`` to ``end`` back from the end of ``node`` (start > end >=
    0)."""

    node: TreeNode
    start: int
    end: int

    def __len__(self) -> int:
        return self.start - self.end


def path_pieces(node: TreeNode, tokens: int) -> Iterator[tuple[TreeNode, int]]:
    """The nodes under the last ``tokens`` tokens up to the end of ``node``, last node first.

    Yields each with how far its end lies back from the end of ``node``.
    """
    back = 0
    while back < tokens and node.parent is not None:
        yield node, back
        back += len(node.key)
        node = node.parent


def split_marks(front: TreeNode, child: TreeNode, split_len: int) -> None:
    """``front`` has just taken over the first ``split_len`` tokens of ``child``."""
    front.stored, child.stored = _cut(child.stored, split_len)
    front.launched, child.launched = _cut(child.launched, split_len)
    front.pending, front.touch_after_ms = child.pending, child.touch_after_ms


def settle(segment: Segment, durable: int) -> None:
    """The write of ``segment`` has ended; its first ``durable`` tokens are in the store.

    Only what adjoins a node's stored tokens counts: a page behind a missing one is out of reach.
    What is not durable may be written again.
    """
    for node, back in path_pieces(segment.node, segment.start):
        length = len(node.key)
        origin = back + length  # the node's first token, back from the segment's node
        if origin <= segment.end:
            continue  # a split has left the node wholly behind the segment
        start, end = origin - segment.start, origin - segment.start + durable
        if start <= node.stored < end:
            node.stored = min(length, end)
            node.launched = max(node.launched, node.stored)
        if durable < len(segment):
            node.launched = node.stored


def _cut(leading: int, split_len: int) -> tuple[int, int]:
    return min(leading, split_len), max(0, leading - split_len)


class PendingBackup:
    """One node that is to be written, with all that a split cuts off its front until then."""

    __slots__ = ("node", "serial", "tokens")

    def __init__(self, serial: int, node: TreeNode, tokens: int) -> None:
        self.serial = serial
        #: The last node of the path that is to be written.
        self.node = node
        #: Tokens to write, up to the end of ``node``.
        self.tokens = tokens

    def pieces(self) -> list[TreeNode]:
        """The nodes that the tokens lie in now, in the order of the prompt."""
        return [node for node, _ in path_pieces(self.node, self.tokens)][::-1]


class BackupQueue:
    """First in, first out; at most one entry a node; at most ``max_tokens`` tokens.

    Entries hold no lock: what is evicted while it waits is dropped. All that is dropped is counted
    in ``dropped``, in tokens by reason.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.dropped: Counter[str] = Counter()
        self._queue: dict[int, PendingBackup] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[PendingBackup]:
        return iter(list(self._queue.values()))

    def head(self) -> PendingBackup | None:
        """The oldest entry."""
        return next(iter(self._queue.values()), None)

    def add(self, node: TreeNode) -> bool:
        """Queue ``node``, which has no entry; False where the queue has no room for it."""
        tokens = len(node.key)
        if self.tokens + tokens > self.max_tokens:
            self.dropped[FULL] += tokens
            return False
        self._serial += 1
        node.pending = self._queue[self._serial] = PendingBackup(self._serial, node, tokens)
        self.tokens += tokens
        return True

    def done(self, pending: PendingBackup) -> None:
        """All of ``pending`` was launched."""
        self._remove(pending)

    def drop(self, pending: PendingBackup, reason: str) -> None:
        """``pending`` will not be launched."""
        self.dropped[reason] += sum(map(_unlaunched, pending.pieces()))
        self._remove(pending)

    def deleted(self, node: TreeNode) -> None:
        """``node``, a leaf, has left the tree; what a split made of its front may still be
        there."""
        pending = node.pending
        if pending is None:
            return
        lost = len(node.key)
        if pending.tokens <= lost or node.parent is None:
            self.drop(pending, EVICTED)
            return
        node.pending = None
        self.dropped[EVICTED] += _unlaunched(node)
        self.tokens -= lost
        pending.node, pending.tokens = node.parent, pending.tokens - lost

    def clear(self, reason: str) -> None:
        """Drop everything."""
        for pending in self:
            self.drop(pending, reason)

    def _remove(self, pending: PendingBackup) -> None:
        del self._queue[pending.serial]
        self.tokens -= pending.tokens
        for node in pending.pieces():
            node.pending = None


def _unlaunched(node: TreeNode) -> int:
    return len(node.key) - node.launched


def covered(node: TreeNode | None) -> bool:
    """Whether all of ``node`` is in the store or launched before; the root always is."""
    return node is None or node.parent is None or node.launched >= len(node.key)

"""What a tree node knows about its copy in the store.

Positions are counted in tokens *back from the end of a node*. Splitting a node cuts off its front
and leaves its end where it was, and a deleted node keeps its parent, so such a position names the
same tokens for as long as a transfer may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.intents import Intent
    from sglang.srt.mem_cache.radix_cache import TreeNode
else:
    TreeNode = object


class StoredNode(TreeNode):
    """Mixin for SGLang's ``TreeNode``. All zero, and unused, unless the mode is buffer_only."""

    #: Leading tokens that are durable in the store, on every rank.
    stored: int = 0
    #: Leading tokens that are durable or on their way; never less than ``stored``.
    launched: int = 0
    #: The pending write that covers this node, shared with the nodes that a split made of it.
    intent: Intent | None = None

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

    node: Any
    start: int
    end: int

    def __len__(self) -> int:
        return self.start - self.end


def path_pieces(node: Any, tokens: int) -> Iterator[tuple[Any, int]]:
    """The nodes under the last ``tokens`` tokens up to the end of ``node``, last node first.

    Yields each with how far its end lies back from the end of ``node``.
    """
    back = 0
    while back < tokens and node.parent is not None:
        yield node, back
        back += len(node.key)
        node = node.parent


def split_marks(front: Any, child: Any, split_len: int) -> None:
    """``front`` has just taken over the first ``split_len`` tokens of ``child``."""
    front.stored, child.stored = _cut(child.stored, split_len)
    front.launched, child.launched = _cut(child.launched, split_len)
    front.intent = child.intent


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

"""Marks on tree nodes about their copy in the store, the queue of nodes to write, and the page
hashes and images that keys are made of.

Positions are counted in tokens *back from the end of a node*. A split cuts off a node's front and
keeps its end, and a deleted node keeps its parent, so that such a position names the same tokens
for the whole time of a transfer.

SGLang replaces the tokens of an image (or other media) by 30 bits of its hash, which enter the page
hashes: among 200,000 images after one prefix, 19 collisions are expected. So the key of a page also
covers the full hashes of all images that begin before its end. They reach the inserted nodes in the
request's ``extra_key``, which still compares equal to the one without images, so that the tree
matches as in SGLang. After a prefix that was matched with another image (a collision), a request's
KV is not written to the store.

Contract: scheduler thread. Marks change only at tree operations and by agreed results, so that they
are equal on all ranks of a prefill server.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any  # Any: tokens, or pairs of them

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode
else:
    TreeNode = object

# Reasons why tokens were not written: label values of the counter ``dropped_tokens``.
#: The node was evicted while queued.
EVICTED = "evicted"
#: The parent is not stored, or was matched with another image.
UNCOVERED = "parent_failed"
#: The tree was emptied.
FLUSHED = "flushed"
#: Overdue store calls may still use every staging page that backups may have.
STUCK = "store_stuck"
#: The store did not take the tokens; the next request on the path queues them again.
REFUSED = "store_refused"
DROP_REASONS = (EVICTED, UNCOVERED, FLUSHED, STUCK, REFUSED)


class StoredNode(TreeNode):
    """Mixin for SGLang's ``TreeNode``. All zero and unused unless the mode is buffer_only."""

    #: Leading tokens that are durable in the store, on every rank.
    stored: int = 0
    #: Leading tokens that are durable or being written; never less than ``stored``.
    launched: int = 0
    #: The pending backup that covers this node, shared by the nodes of a split.
    pending: PendingBackup | None = None
    #: Earliest time of the next touch, in agreed milliseconds.
    touch_after_ms: int = 0

    @property
    def storage_backed(self) -> bool:
        """True if all of this node is durable in the store, on every rank."""
        return self.key is not None and self.stored >= len(self.key)


@dataclass(frozen=True)
class Segment:
    """Tokens of a path, from ``start`` to ``end`` tokens back from the end of ``node`` (start > end
    >= 0)."""

    node: TreeNode
    start: int
    end: int

    def __len__(self) -> int:
        return self.start - self.end


def path_pieces(node: TreeNode, tokens: int) -> Iterator[tuple[TreeNode, int]]:
    """Yield the nodes of the last ``tokens`` tokens up to the end of ``node``, last node first,
    each with the distance of its end back from the end of ``node``."""
    back = 0
    while back < tokens and node.parent is not None:
        yield node, back
        back += len(node.key)
        node = node.parent


def split_marks(front: TreeNode, child: TreeNode, split_len: int) -> None:
    """Divide the marks of ``child`` between it and ``front``, the new node with its first
    ``split_len`` tokens."""
    front.stored, front.launched = min(child.stored, split_len), min(child.launched, split_len)
    child.stored, child.launched = child.stored - front.stored, child.launched - front.launched
    front.pending, front.touch_after_ms = child.pending, child.touch_after_ms


def settle(segment: Segment, durable: int, touch_after_ms: int) -> None:
    """Mark the first ``durable`` tokens of ``segment`` as stored, after its write has ended, and
    the rest as not launched. After a complete write, set the nodes' ``touch_after_ms``.

    Only tokens adjacent to a node's stored tokens count, because a page after a missing one cannot
    be found.
    """
    for node, back in path_pieces(segment.node, segment.start):
        length = len(node.key)
        origin = back + length  # the node's first token, back from the segment's node
        if origin <= segment.end:
            continue  # after a split: all of the node is after the segment
        start, end = origin - segment.start, origin - segment.start + durable
        if start <= node.stored < end:
            node.stored = min(length, end)
            node.launched = max(node.launched, node.stored)
        if durable < len(segment):
            node.launched = node.stored
        else:
            node.touch_after_ms = touch_after_ms


@dataclass(eq=False, slots=True)
class PendingBackup:
    """One node to write, with the fronts that splits have cut off since it was queued."""

    #: The last node to write.
    node: TreeNode
    #: Tokens to write, up to the end of ``node``.
    tokens: int

    def pieces(self) -> list[TreeNode]:
        """Return the nodes that hold the tokens now, in prompt order."""
        return [node for node, _ in path_pieces(self.node, self.tokens)][::-1]


@dataclass(eq=False)
class BackupQueue:
    """FIFO of nodes to write; at most one entry per node, so that it is bounded by the device pool.

    Entries hold no lock: a node evicted while queued is dropped. ``dropped`` counts the tokens of
    dropped nodes by reason.
    """

    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    entries: dict[PendingBackup, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[PendingBackup]:
        return iter(self.entries)

    def add(self, node: TreeNode) -> None:
        """Queue ``node``, which must have no entry."""
        tokens = len(node.key)
        node.pending = PendingBackup(node, tokens)
        self.entries[node.pending] = None
        self.tokens += tokens

    def done(self, pending: PendingBackup) -> None:
        """Remove ``pending``, which was launched in full or dropped."""
        del self.entries[pending]
        self.tokens -= pending.tokens
        for node in pending.pieces():
            node.pending = None

    def drop(self, pending: PendingBackup, reason: str) -> None:
        """Remove ``pending`` and count its tokens that were not launched."""
        self.dropped[reason] += sum(len(node.key) - node.launched for node in pending.pieces())
        self.done(pending)

    def deleted(self, node: TreeNode) -> None:
        """Drop the tokens of ``node``, a leaf that has left the tree. The entry keeps the fronts
        that splits have cut off."""
        pending = node.pending
        if pending is None:
            return
        lost = len(node.key)
        if pending.tokens <= lost or node.parent is None:
            self.drop(pending, EVICTED)
            return
        node.pending = None
        self.dropped[EVICTED] += lost - node.launched
        self.tokens -= lost
        pending.node, pending.tokens = node.parent, pending.tokens - lost

    def clear(self, reason: str) -> None:
        """Drop everything."""
        for pending in list(self):
            self.drop(pending, reason)


def covered(node: TreeNode) -> bool:
    """Return True if all of ``node`` is stored or being written; the root always is."""
    return node.parent is None or node.launched >= len(node.key)


# ---- inputs of keys ----


def page_hashes(node: TreeNode, page_size: int) -> list[str]:
    """Return SGLang's page hashes of ``node``, computing those that are missing on its path."""
    unhashed = []
    while node.hash_value is None and node.parent is not None:
        unhashed.append(node)
        node = node.parent
    last, hashes = (node.hash_value or [None])[-1], node.hash_value or []
    for below in reversed(unhashed):
        below.hash_value = hashes = hashes_of(below.key.token_ids, last, page_size)
        last = hashes[-1]
    return hashes


def hashes_of(tokens: Sequence[Any], last_hash: str | None, page_size: int) -> list[str]:
    """Return SGLang's page hashes (``get_hash_str``) of ``tokens`` (whole pages) after a page with
    ``last_hash``. Tokens, or both tokens of a pair, are hashed as little-endian uint32."""
    # ``array`` for plain tokens, because numpy takes longer and this runs on a scheduler's thread.
    plain = sys.byteorder == "little" and len(tokens) > 0 and isinstance(tokens[0], int)
    values = array("I", tokens) if plain else np.asarray(tokens, dtype="<u4")
    content, sha256 = values.tobytes(), hashlib.sha256
    width = max(1, len(content) // max(1, len(tokens)) * page_size)
    hashes, last = list[str](), bytes.fromhex(last_hash or "")
    for start in range(0, len(content), width):
        last = sha256(last + content[start : start + width]).digest()
        hashes.append(last.hex())
    return hashes


class ImageKey(str):
    """An ``extra_key`` that also carries the images of one prompt."""

    #: (First token in the prompt, full hash) of each image, in prompt order.
    images: tuple[tuple[int, int], ...] = ()


def image_key(req: Req) -> ImageKey:
    """Return the ``extra_key`` of ``req`` with its images, each once, at its first position: the
    tokens show its repetitions. Images with the same placeholder are all listed, because their
    tokens are equal. An image without a position counts from the start."""
    key = ImageKey(req.extra_key or "")
    if req.multimodal_inputs is not None:
        hashes: dict[int, list[int]] = {}
        for item in req.multimodal_inputs.mm_items:
            hashes.setdefault(item.pad_value, []).append(item.hash)
        first_index: dict[int, int] = {}
        for index, token in enumerate(req.origin_input_ids):
            if token in hashes:
                first_index.setdefault(token, index)
        images = [
            (first_index.get(pad, 0), name)
            for pad, names in hashes.items()
            for name in (names[:1] if pad in first_index and len(set(names)) == 1 else names)
        ]
        key.images = tuple(sorted(images, key=lambda image: image[0]))
    return key


def images_before(extra_key: str | None, tokens: int) -> str:
    """Return the images that begin in the first ``tokens`` tokens as a name, or an empty text."""
    return " ".join(str(name) for index, name in getattr(extra_key, "images", ()) if index < tokens)


def tokens_above(node: TreeNode) -> int:
    """Return the number of prompt tokens before ``node``."""
    return sum(len(piece.key) for piece, _ in path_pieces(node, sys.maxsize)) - len(node.key)


def has_own_images(node: TreeNode) -> bool:
    """Return True if every node above ``node`` was computed with the images of its request."""
    key = node.key.extra_key
    if not isinstance(key, ImageKey):
        return True  # the model takes no images
    length = tokens_above(node) + len(node.key)
    return all(
        images_before(above.key.extra_key, length - back) == images_before(key, length - back)
        for above, back in path_pieces(node, length)
    )

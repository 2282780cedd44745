"""What a node knows about its copy in the store, what waits to be written, and the page hashes and
images from which keys are made.

Positions are counted in tokens *back from the end of a node*. Splitting a node cuts off its front
and leaves its end where it was, and a deleted node keeps its parent, so such a position names the
same tokens for as long as a transfer may take.

SGLang puts 30 bits of an image's hash (and of other media's) in the place of its tokens, and page
hashes are made of these: among 200,000 images behind one prefix, 19 pairs are expected to be one.
So the key of a page has the full hashes of all images that begin before its end. A request's
``extra_key`` brings them to the nodes that it inserts; it is equal to the one without them, so that
the tree is SGLang's, with its 30 bits. Where these have a request share KV of another image,
nothing that is computed behind that is written to the store.
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

#: Why tokens were not written, or not yet: label values of the counter.
EVICTED, UNCOVERED, FLUSHED = "evicted", "parent_failed", "flushed"
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
    front.stored, front.launched = min(child.stored, split_len), min(child.launched, split_len)
    child.stored, child.launched = child.stored - front.stored, child.launched - front.launched
    front.pending, front.touch_after_ms = child.pending, child.touch_after_ms


def settle(segment: Segment, durable: int, touch_after_ms: int) -> None:
    """The write of ``segment`` has ended; its first ``durable`` tokens are in the store. If it has
    all of them, it is asked for them again ``touch_after_ms`` at the earliest.

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
        else:
            node.touch_after_ms = touch_after_ms


@dataclass(eq=False, slots=True)
class PendingBackup:
    """One node that is to be written, with all that a split cuts off its front until then."""

    #: The last node of the path that is to be written.
    node: TreeNode
    #: Tokens to write, up to the end of ``node``.
    tokens: int

    def pieces(self) -> list[TreeNode]:
        """The nodes that the tokens lie in now, in the order of the prompt."""
        return [node for node, _ in path_pieces(self.node, self.tokens)][::-1]


@dataclass(eq=False)
class BackupQueue:
    """First in, first out; at most one entry a node, so never more tokens than the device pool.

    Entries hold no lock: what is evicted while it waits is dropped. All that is dropped is counted
    in ``dropped``, in tokens by reason.
    """

    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    entries: dict[PendingBackup, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[PendingBackup]:
        return iter(self.entries)

    def add(self, node: TreeNode) -> None:
        """Queue ``node``, which has no entry."""
        tokens = len(node.key)
        node.pending = PendingBackup(node, tokens)
        self.entries[node.pending] = None
        self.tokens += tokens

    def done(self, pending: PendingBackup) -> None:
        """All of ``pending`` was launched."""
        del self.entries[pending]
        self.tokens -= pending.tokens
        for node in pending.pieces():
            node.pending = None

    def drop(self, pending: PendingBackup, reason: str) -> None:
        """``pending`` will not be launched."""
        self.dropped[reason] += sum(len(node.key) - node.launched for node in pending.pieces())
        self.done(pending)

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
        self.dropped[EVICTED] += lost - node.launched
        self.tokens -= lost
        pending.node, pending.tokens = node.parent, pending.tokens - lost

    def clear(self, reason: str) -> None:
        """Drop everything."""
        for pending in list(self):
            self.drop(pending, reason)


def covered(node: TreeNode) -> bool:
    """Whether all of ``node`` is in the store or launched before; the root always is."""
    return node.parent is None or node.launched >= len(node.key)


# ---- what keys are made of ----


def page_hashes(node: TreeNode, page_size: int) -> list[str]:
    """SGLang's page hashes of ``node``; computed now if it was inserted without."""
    bare = []
    while node.hash_value is None and node.parent is not None:
        bare.append(node)
        node = node.parent
    last, found = (node.hash_value or [None])[-1], node.hash_value or []
    for below in reversed(bare):
        below.hash_value = found = hashes_of(below.key.token_ids, last, page_size)
        last = found[-1]
    return found


def hashes_of(tokens: Sequence[Any], last_hash: str | None, page_size: int) -> list[str]:
    """Return SGLang's page hashes (``get_hash_str``) of ``tokens`` (whole pages) after a page with
    ``last_hash``. Tokens, or both tokens of a pair, are hashed as little-endian uint32."""
    # ``array`` for plain tokens, because numpy takes longer and this runs on a scheduler's thread.
    plain = sys.byteorder == "little" and len(tokens) > 0 and isinstance(tokens[0], int)
    values = array("I", tokens) if plain else np.asarray(tokens, dtype="<u4")
    content, sha256 = values.tobytes(), hashlib.sha256
    width = max(1, len(content) // max(1, len(tokens)) * page_size)
    found, last = list[str](), bytes.fromhex(last_hash or "")
    for start in range(0, len(content), width):
        last = sha256(last + content[start : start + width]).digest()
        found.append(last.hex())
    return found


class ImageKey(str):
    """An ``extra_key`` with the images of one prompt."""

    #: Where each one begins, in tokens of the prompt, and its full hash; in that order.
    images: tuple[tuple[int, int], ...] = ()


def image_key(req: Req) -> ImageKey:
    """The ``extra_key`` of ``req`` with its images, each where it is first shown; that it is shown
    again the tokens say. Of several with one placeholder they do not say which, so that all are
    named. One without a place counts from the start."""
    key = ImageKey(req.extra_key or "")
    if req.multimodal_inputs is not None:
        hashes: dict[int, list[int]] = {}
        for one in req.multimodal_inputs.mm_items:
            hashes.setdefault(one.pad_value, []).append(one.hash)
        place: dict[int, int] = {}
        for at, token in enumerate(req.origin_input_ids):
            if token in hashes:
                place.setdefault(token, at)
        found = [
            (place.get(pad, 0), name)
            for pad, names in hashes.items()
            for name in (names[:1] if pad in place and len(set(names)) == 1 else names)
        ]
        key.images = tuple(sorted(found, key=lambda image: image[0]))
    return key


def images_before(extra_key: str | None, tokens: int) -> str:
    """The images that begin in the first ``tokens`` tokens, as a name; empty without any."""
    return " ".join(str(name) for at, name in getattr(extra_key, "images", ()) if at < tokens)


def tokens_above(node: TreeNode) -> int:
    """Tokens of the prompt before those of ``node``."""
    return sum(len(one.key) for one, _ in path_pieces(node, sys.maxsize)) - len(node.key)


def has_own_images(node: TreeNode) -> bool:
    """Whether all nodes above ``node`` have the images of its own request there."""
    own = node.key.extra_key
    if not isinstance(own, ImageKey):
        return True  # the model takes none
    length = tokens_above(node) + len(node.key)
    return all(
        images_before(above.key.extra_key, length - back) == images_before(own, length - back)
        for above, back in path_pieces(node, length)
    )

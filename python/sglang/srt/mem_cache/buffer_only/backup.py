"""Backup: device to stage to store, a few pages at a time.

A node that is to be written waits as an intent, without a lock. In each step, as far as stage and
slots go, waiting pages are put into *write operations*: their nodes are locked until the copy to
the stage has ended, then a thread has the store write them, and the staging pages are free as soon
as the store has answered, whatever it said.

What a node knows about its copy in the store is noted on it. Positions are counted in tokens *back
from the end of a node*. Splitting a node cuts off its front and leaves its end where it was, and a
deleted node keeps its parent, so such a position names the same tokens for as long as a transfer
may take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.buffer_only.agreement import PENDING, WRITE_SLOTS, Facts
from sglang.srt.mem_cache.buffer_only.page_store import BATCH_PAGES, Job, page_hashes, store_keys
from sglang.srt.mem_cache.buffer_only.stage import Copies, Direction, Lease, slots_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.pipelines import Parts
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


#: Why tokens were not written, or not yet: label values of the counter.
FULL, EVICTED, UNCOVERED, FLUSHED = "queue_full", "evicted", "parent_failed", "flushed"
#: The stage is full of what calls of the store that were given up may still use.
STUCK = "store_stuck"


class Intent:
    """One node that is to be written, with all that a split cuts off its front until then."""

    __slots__ = ("node", "serial", "tokens")

    def __init__(self, serial: int, node: Any, tokens: int) -> None:
        self.serial = serial
        #: The last node of the path that is to be written.
        self.node = node
        #: Tokens to write, up to the end of ``node``.
        self.tokens = tokens

    def pieces(self) -> list[Any]:
        """The nodes that the tokens lie in now, in the order of the prompt."""
        return [node for node, _ in path_pieces(self.node, self.tokens)][::-1]


class IntentQueue:
    """First in, first out; at most one intent a node; at most ``max_tokens`` tokens.

    Intents hold no lock: what is evicted while it waits is dropped. All that is dropped is counted
    in ``dropped``, in tokens by reason.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.dropped: Counter[str] = Counter()
        self._queue: dict[int, Intent] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Intent]:
        return iter(list(self._queue.values()))

    def head(self) -> Intent | None:
        """The oldest intent."""
        return next(iter(self._queue.values()), None)

    def add(self, node: Any) -> bool:
        """Queue ``node``, which has no intent; False where the queue has no room for it."""
        tokens = len(node.key)
        if self.tokens + tokens > self.max_tokens:
            self.dropped[FULL] += tokens
            return False
        self._serial += 1
        node.intent = self._queue[self._serial] = Intent(self._serial, node, tokens)
        self.tokens += tokens
        return True

    def done(self, intent: Intent) -> None:
        """All of ``intent`` was launched."""
        self._remove(intent)

    def drop(self, intent: Intent, reason: str) -> None:
        """``intent`` will not be launched."""
        self.dropped[reason] += sum(map(_unlaunched, intent.pieces()))
        self._remove(intent)

    def deleted(self, node: Any) -> None:
        """``node``, a leaf, has left the tree; what a split made of its front may still be
        there."""
        intent = node.intent
        if intent is None:
            return
        lost = len(node.key)
        if intent.tokens <= lost:
            self.drop(intent, EVICTED)
            return
        node.intent = None
        self.dropped[EVICTED] += _unlaunched(node)
        self.tokens -= lost
        intent.node, intent.tokens = node.parent, intent.tokens - lost

    def clear(self, reason: str) -> None:
        """Drop everything."""
        for intent in self:
            self.drop(intent, reason)

    def _remove(self, intent: Intent) -> None:
        del self._queue[intent.serial]
        self.tokens -= intent.tokens
        for node in intent.pieces():
            node.intent = None


def _unlaunched(node: Any) -> int:
    return int(len(node.key) - node.launched)


@dataclass(eq=False)
class WriteOp:
    """Pages on their way to the store."""

    segments: tuple[Segment, ...]
    keys: list[str]
    prefix_keys: list[str] | None
    lease: Lease
    #: None while the copy to the stage runs.
    job: Job | None = None
    #: Of a tree that was emptied since: nobody wants to know what became of it.
    orphan: bool = False
    #: Answered, on all ranks; but a call that was given up may still read the staging pages.
    lingering: bool = False

    @property
    def outcome(self) -> int:
        """Leading pages in the store, as far as this rank knows; of a lingering one, any number."""
        if self.job is None or (self.lingering and not self.job.quiet):
            return PENDING
        return PENDING if self.job.pages is None else self.job.pages


class Copied:
    """The finish event of a copy that is not made."""

    def query(self) -> bool:
        """It has ended."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Writes:
    """All writes of one rank."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lane = parts.make_lane("write")
        self.intents = IntentQueue(parts.settings.queue_tokens)
        self._copies = Copies()
        self._ops: list[WriteOp] = []
        # Half of what writes may have: one operation is copied while another one is stored.
        ceiling = parts.stage.shares[Direction.WRITE].ceiling
        self._op_pages = min(BATCH_PAGES, max(1, ceiling // 2))

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way; what the store was given up for does not
        count."""
        return bool(len(self.intents) or any(not op.lingering for op in self._ops))

    @property
    def ops(self) -> Sequence[WriteOp]:
        """The operations in flight, oldest first."""
        return tuple(self._ops)

    def want(self, node: Any) -> None:
        """Have ``node`` written, and before it all above it that is neither stored nor waiting."""
        chain = []
        while node.parent is not None and not _under_way(node):
            chain.append(node)
            node = node.parent
        for missing in reversed(chain):
            if not self.intents.add(missing):
                return  # what is below it would be out of reach without it

    def facts(self) -> tuple[int, tuple[int, ...]]:
        """Copies that have ended, and what is known of each operation, on this rank."""
        return self._copies.ended(), tuple(op.outcome for op in self._ops)

    def apply(self, agreed: Facts) -> None:
        """Act on what has ended on all ranks."""
        for op, durable in zip(list(self._ops), agreed.writes, strict=True):
            if durable != PENDING:
                self._answered(op, durable)
            elif op.lingering:
                self._parts.strand(op.lease)
        for op in self._copies.pop(agreed.written):
            self._unlock(op)
            self._store(op)

    def pump(self) -> None:
        """Start what stage and slots have room for, with one copy for all of it."""
        if self._stuck():
            self.intents.clear(STUCK)
        started = []
        while len(self._ops) < WRITE_SLOTS:
            pages = min(self._op_pages, self._parts.stage.room(Direction.WRITE))
            segments = self._next_segments(pages)
            if not segments:
                break
            started.append(self._start(segments))
        if started:
            self._copies.add(self._copy(started), started)

    def reset(self) -> None:
        """The tree is about to be emptied: forget it, but keep what the store still reads."""
        self.intents.clear(FLUSHED)
        for op in self._copies.pop(len(self._copies)):
            self._unlock(op)
            op.lease.release()
            self._ops.remove(op)
        for op in self._ops:
            op.orphan = True

    def forget_stored(self, root: Any) -> None:
        """The store was cleared: nothing is durable any more, and what is on its way may not be."""
        for op in self._ops:
            op.orphan = True
        nodes = [root]
        while nodes:
            node = nodes.pop()
            node.stored = node.launched = 0
            nodes.extend(node.children.values())

    def close(self, timeout: float) -> bool:
        """End the lane's thread."""
        return self._lane.close(timeout)

    def _stuck(self) -> bool:
        """Whether nothing can be written until a call returns that was given up."""
        stranded = sum(op.lease.stranded for op in self._ops)
        return stranded >= WRITE_SLOTS or not self._parts.stage.reachable(Direction.WRITE)

    def _next_segments(self, pages: int) -> list[Segment]:
        """At most ``pages`` pages from the head of the queue; they count as launched."""
        page, found = self._parts.page_size, []
        while pages > 0 and (intent := self.intents.head()) is not None:
            for node in intent.pieces():
                if not _covered(node.parent):
                    self.intents.drop(intent, UNCOVERED)
                    break
                left = len(node.key) - node.launched
                take = min(left, pages * page)
                if take:
                    found.append(Segment(node, left, left - take))
                    node.launched += take
                    pages -= take // page
                if take < left:
                    break
            else:
                self.intents.done(intent)
            if found and self._parts.settings.pass_prefix_keys:
                break  # the keys before a page are those of one path
        return found

    def _start(self, segments: Sequence[Segment]) -> WriteOp:
        parts, page = self._parts, self._parts.page_size
        keys: list[str] = []
        for segment in segments:
            node, length = segment.node, len(segment.node.key)
            first, last = (length - segment.start) // page, (length - segment.end) // page
            hashes = page_hashes(node, page)[first:last]
            keys.extend(store_keys(hashes, node.key.extra_key))
            parts.tree.inc_lock_ref(node)
        lease = parts.stage.lease(Direction.WRITE, len(keys))
        assert lease is not None, "the room was asked for"
        op = WriteOp(tuple(segments), keys, self._keys_before(segments[0]), lease)
        parts.ledger.note("write", len(keys), keys[0], keys[-1])
        self._ops.append(op)
        return op

    def _keys_before(self, segment: Segment) -> list[str] | None:
        keys = self._parts.prefix_keys(segment.node)
        return None if keys is None else keys[: len(keys) - segment.start // self._parts.page_size]

    def _copy(self, ops: Sequence[WriteOp]) -> Any:
        if self._parts.writes_elsewhere:
            return Copied()
        pairs = []
        for op in ops:
            host = slots_of(op.lease.pages, self._parts.page_size)
            for segment in op.segments:
                length = len(segment.node.key)
                device = segment.node.value[length - segment.start : length - segment.end]
                pairs.append((host[: len(device)], device.clone()))
                host = host[len(device) :]
        return self._parts.copier.to_stage(pairs)

    def _store(self, op: WriteOp) -> None:
        slots = slots_of(op.lease.pages, self._parts.page_size)

        def save(job: Job) -> int:
            if self._parts.writes_elsewhere:
                return len(op.keys)
            return self._parts.store.save(op.keys, slots, op.prefix_keys, job)

        op.job = self._lane.submit(save)

    def _answered(self, op: WriteOp, durable: int) -> None:
        """The store has answered on all ranks, or has let go of the pages on all ranks."""
        if not op.lingering:
            tally = self._parts.tally
            tally["store_written_pages"] += durable
            if durable < len(op.keys):
                tally["store_write_failures"] += 1
                op.lingering = True
            if not op.orphan:
                self._settle(op, durable)
            if op.lingering:
                return
        self._ops.remove(op)
        op.lease.release()

    def _settle(self, op: WriteOp, durable: int) -> None:
        tokens = durable * self._parts.page_size
        for segment in op.segments:
            settle(segment, min(tokens, len(segment)))
            tokens -= min(tokens, len(segment))

    def _unlock(self, op: WriteOp) -> None:
        for segment in op.segments:
            self._parts.tree.dec_lock_ref(segment.node)


def _under_way(node: Any) -> bool:
    return node.intent is not None or _covered(node)


def _covered(node: Any) -> bool:
    """Whether all of ``node`` is in the store or launched before; the root always is."""
    return node.parent is None or node.launched >= len(node.key)

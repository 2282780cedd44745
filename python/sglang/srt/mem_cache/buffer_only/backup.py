"""The write pipeline: device to stage to store, a few pages at a time.

A node that is to be written waits as an intent, without a lock. In each step, as far as stage and
slots go, waiting pages are put into *write operations*: their nodes are locked until the copy to
the stage has ended, then the store's lane writes them, and the staging pages are free as soon as
the store has answered, whatever it said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.buffer_only.agreement import PENDING, WRITE_SLOTS, Facts
from sglang.srt.mem_cache.buffer_only.copies import Copies, slots_of
from sglang.srt.mem_cache.buffer_only.intents import FLUSHED, STUCK, UNCOVERED, IntentQueue
from sglang.srt.mem_cache.buffer_only.lanes import Job
from sglang.srt.mem_cache.buffer_only.marks import Segment, settle
from sglang.srt.mem_cache.buffer_only.namespaces import store_keys
from sglang.srt.mem_cache.buffer_only.page_store import BATCH_PAGES
from sglang.srt.mem_cache.buffer_only.parts import Parts, page_hashes
from sglang.srt.mem_cache.buffer_only.stage import Direction, Lease


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

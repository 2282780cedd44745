"""Backup: device to stage to store, a few pages at a time.

A node that is to be written waits in a queue, without a lock. In each step, as far as staging pages
and slots go, waiting pages are put into *backups*: their nodes are locked until the copy to the
stage has ended, then a thread has the store write them, and the staging pages are free as soon as
the store has answered, whatever it said.

What a node knows about its copy in the store is noted on it. Positions are counted in tokens *back
from the end of a node*. Splitting a node cuts off its front and leaves its end where it was, and a
deleted node keeps its parent, so such a position names the same tokens for as long as a transfer
may take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import BACKUP_SLOTS, PENDING, TransferVote
from sglang.srt.mem_cache.buffer_only.page_store import Job, page_hashes
from sglang.srt.mem_cache.buffer_only.stage import Copies, Direction, StagingPages, slots_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.pipelines import Context
    from sglang.srt.mem_cache.buffer_only.upstream import Event, Node
    from sglang.srt.mem_cache.radix_cache import TreeNode
else:
    TreeNode = object

#: Why tokens were not written, or not yet: label values of the counter.
FULL, EVICTED, UNCOVERED, FLUSHED = "queue_full", "evicted", "parent_failed", "flushed"
#: The stage is full of what overdue calls of the store may still use.
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

    node: Node
    start: int
    end: int

    def __len__(self) -> int:
        return self.start - self.end


def path_pieces(node: Node, tokens: int) -> Iterator[tuple[Node, int]]:
    """The nodes under the last ``tokens`` tokens up to the end of ``node``, last node first.

    Yields each with how far its end lies back from the end of ``node``.
    """
    back = 0
    while back < tokens and node.parent is not None:
        yield node, back
        back += len(node.key)
        node = node.parent


def split_marks(front: Node, child: Node, split_len: int) -> None:
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

    def __init__(self, serial: int, node: Node, tokens: int) -> None:
        self.serial = serial
        #: The last node of the path that is to be written.
        self.node = node
        #: Tokens to write, up to the end of ``node``.
        self.tokens = tokens

    def pieces(self) -> list[Node]:
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

    def add(self, node: Node) -> bool:
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

    def deleted(self, node: Node) -> None:
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


def _unlaunched(node: Node) -> int:
    return len(node.key) - node.launched


@dataclass(eq=False)
class Backup:
    """Pages on their way to the store."""

    segments: tuple[Segment, ...]
    keys: list[str]
    prefix_keys: list[str] | None
    staging: StagingPages
    #: None while the copy to the stage runs.
    job: Job | None = None
    #: Of a tree that was emptied since: nobody wants to know what became of it.
    orphan: bool = False
    #: Answered, on all ranks; but an overdue call may still read the staging pages.
    overdue: bool = False

    @property
    def outcome(self) -> int:
        """Leading pages in the store, as far as this rank knows; of an overdue one, any number."""
        if self.job is None or (self.overdue and not self.job.drained):
            return PENDING
        return PENDING if self.job.pages is None else self.job.pages


class Refusals:
    """When a store that has taken nothing of a backup is tried again: after ``first_ms``, then
    after twice that and so on, at most ``longest_ms`` apart. All times are agreed milliseconds."""

    def __init__(self, first_ms: int, longest_ms: int) -> None:
        self._first, self._longest = first_ms, longest_ms
        self._wait = first_ms
        self._retry_at = 0
        #: Whether the last backup was refused: then one backup is tried, not all that fit.
        self.refused = False

    def waiting(self, now_ms: int) -> bool:
        """Whether nothing is to be tried yet."""
        return self.refused and now_ms < self._retry_at

    def ended(self, taken: bool, now_ms: int) -> None:
        """A backup has ended; the store took something of it, or nothing."""
        if taken:
            self.refused, self._wait = False, self._first
        elif not self.waiting(now_ms):  # those that were under way with it count once
            self.refused, self._retry_at = True, now_ms + self._wait
            self._wait = min(2 * self._wait, self._longest)


class _Copied:
    """The finish event of a copy that is not made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Backups:
    """All backups of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = context.make_thread("backup")
        self.queue = BackupQueue(context.settings.queue_tokens)
        self._copies: Copies[Backup] = Copies()
        self._running: list[Backup] = []
        # Half of what backups may have: one is copied while another one is stored.
        ceiling = context.stage.shares[Direction.BACKUP].ceiling
        self._most_pages = min(context.store.batch_pages, max(1, ceiling // 2))
        client = context.store.client.settings
        self._refusals = Refusals(int(client.first_retry * 1000), int(client.longest_retry * 1000))
        self._store_up = True

    @property
    def busy(self) -> bool:
        """Whether anything can be done, or is on its way; what the store was given up for does not
        count, nor what waits for a store that takes nothing."""
        return bool((self.queue and not self._held_back) or self._under_way)

    @property
    def _under_way(self) -> bool:
        return any(not backup.overdue for backup in self._running)

    @property
    def _held_back(self) -> bool:
        """Whether a copy to the stage would be for nothing."""
        return not self._store_up or self._refusals.waiting(self._context.now_ms)

    @property
    def running(self) -> Sequence[Backup]:
        """The backups in flight, oldest first."""
        return tuple(self._running)

    def request(self, node: Node) -> None:
        """Have ``node`` written, and before it all above it that is neither stored nor waiting."""
        chain = []
        while node.parent is not None and node.pending is None and not _covered(node):
            chain.append(node)
            node = node.parent
        for missing in reversed(chain):
            if not self.queue.add(missing):
                return  # what is below it would be out of reach without it

    def vote(self) -> tuple[int, tuple[int, ...]]:
        """Copies that have ended, and what is known of each backup, on this rank."""
        return self._copies.ended(), tuple(backup.outcome for backup in self._running)

    def apply(self, agreed: TransferVote) -> None:
        """Act on what has ended on all ranks."""
        self._store_up = bool(agreed.store_up)
        for backup, durable in zip(list(self._running), agreed.backups, strict=True):
            if durable != PENDING:
                self._answered(backup, durable)
            elif backup.overdue:
                self._context.strand(backup.staging)
        for backup in self._copies.pop(agreed.backup_copies):
            self._unlock(backup)
            self._write(backup)

    def launch(self) -> None:
        """Start what stage and slots have room for, with one copy for all of it."""
        if self._stuck():
            self.queue.clear(STUCK)
        if self._held_back or (self._refusals.refused and self._under_way):
            return
        started: list[Backup] = []
        while len(self._running) < BACKUP_SLOTS and not (started and self._refusals.refused):
            pages = min(self._most_pages, self._context.stage.capacity(Direction.BACKUP))
            segments = self._next_segments(pages)
            if not segments:
                break
            started.append(self._start(segments))
        if started:
            self._copies.add(self._copy(started), started)

    def reset(self) -> None:
        """The tree is about to be emptied: forget it, but keep what the store still reads."""
        self.queue.clear(FLUSHED)
        for backup in self._copies.pop(len(self._copies)):
            self._unlock(backup)
            backup.staging.release()
            self._running.remove(backup)
        for backup in self._running:
            backup.orphan = True

    def forget_stored(self, root: Node) -> None:
        """The store was cleared: nothing is durable any more, and what is on its way may not be."""
        for backup in self._running:
            backup.orphan = True
        nodes = [root]
        while nodes:
            node = nodes.pop()
            node.stored = node.launched = 0
            nodes.extend(node.children.values())

    def close(self, timeout: float) -> bool:
        """End the thread; False if that takes more than ``timeout`` seconds."""
        return self._thread.close(timeout)

    def _stuck(self) -> bool:
        """Whether nothing can be written until an overdue call returns."""
        stranded = sum(backup.staging.stranded for backup in self._running)
        capacity = self._context.stage.eventual_capacity(Direction.BACKUP)
        return stranded >= BACKUP_SLOTS or not capacity

    def _next_segments(self, pages: int) -> list[Segment]:
        """At most ``pages`` pages from the head of the queue; they count as launched."""
        page, found = self._context.page_size, []
        while pages > 0 and (pending := self.queue.head()) is not None:
            for node in pending.pieces():
                if not _covered(node.parent):
                    self.queue.drop(pending, UNCOVERED)
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
                self.queue.done(pending)
            if found and self._context.settings.pass_prefix_keys:
                break  # the keys before a page are those of one path
        return found

    def _start(self, segments: Sequence[Segment]) -> Backup:
        context, page = self._context, self._context.page_size
        keys: list[str] = []
        for segment in segments:
            node, length = segment.node, len(segment.node.key)
            first, last = (length - segment.start) // page, (length - segment.end) // page
            hashes = page_hashes(node, page)[first:last]
            keys.extend(context.store.keys(hashes, node.key.extra_key))
            context.tree.inc_lock_ref(node)
        staging = context.stage.allocate(Direction.BACKUP, len(keys))
        assert staging is not None, "there was capacity for it"
        backup = Backup(tuple(segments), keys, self._keys_before(segments[0]), staging)
        context.checksum.note("write", len(keys), keys[0], keys[-1])
        self._running.append(backup)
        return backup

    def _keys_before(self, segment: Segment) -> list[str] | None:
        keys = self._context.prefix_keys(segment.node)
        first = segment.start // self._context.page_size
        return None if keys is None else keys[: len(keys) - first]

    def _copy(self, backups: Sequence[Backup]) -> Event:
        if self._context.skip_backup:
            return _Copied()
        pairs = []
        for backup in backups:
            host = slots_of(backup.staging.pages, self._context.page_size)
            for segment in backup.segments:
                length = len(segment.node.key)
                device = segment.node.value[length - segment.start : length - segment.end]
                pairs.append((host[: len(device)], device.clone()))
                host = host[len(device) :]
        return self._context.copier.to_stage(pairs)

    def _write(self, backup: Backup) -> None:
        slots = slots_of(backup.staging.pages, self._context.page_size)

        def write(job: Job) -> int:
            if self._context.skip_backup:
                return len(backup.keys)
            return self._context.store.write(backup.keys, slots, backup.prefix_keys, job)

        backup.job = self._thread.submit(write)

    def _answered(self, backup: Backup, durable: int) -> None:
        """The store has answered on all ranks, or has let go of the pages on all ranks."""
        if not backup.overdue:
            counters = self._context.counters
            counters["store_written_pages"] += durable
            self._refusals.ended(durable > 0, self._context.now_ms)
            if durable < len(backup.keys):
                counters["store_write_failures"] += 1
                backup.overdue = True
            if not backup.orphan:
                self._settle(backup, durable)
            if backup.overdue:
                return
        self._running.remove(backup)
        backup.staging.release()

    def _settle(self, backup: Backup, durable: int) -> None:
        tokens = durable * self._context.page_size
        for segment in backup.segments:
            settle(segment, min(tokens, len(segment)))
            if tokens < len(segment) and (pending := segment.node.pending) is not None:
                # Tried on and on, what a store does not take would keep out all that is behind it.
                self.queue.drop(pending, REFUSED)
            tokens -= min(tokens, len(segment))

    def _unlock(self, backup: Backup) -> None:
        for segment in backup.segments:
            self._context.tree.dec_lock_ref(segment.node)


def _covered(node: Node | None) -> bool:
    """Whether all of ``node`` is in the store or launched before; the root always is."""
    return node is None or node.parent is None or node.launched >= len(node.key)

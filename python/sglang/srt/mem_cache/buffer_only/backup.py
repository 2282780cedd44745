"""Backup: device to staging buffer to store, a few pages at a time.

A node that is to be written waits in a queue, without a lock. In each step, as far as staging pages
and slots go, waiting pages are put into *backups*: their nodes are locked until the copy to the
staging buffer has ended, then a thread has the store write them, and the staging pages are free as
soon as the store has answered, whatever it said.

What became of it is noted on the nodes (``backup_queue``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import BACKUP_SLOTS, PENDING, TransferVote
from sglang.srt.mem_cache.buffer_only.backup_queue import (
    FLUSHED,
    REFUSED,
    STUCK,
    UNCOVERED,
    BackupQueue,
    Segment,
    covered,
    path_pieces,
    settle,
)
from sglang.srt.mem_cache.buffer_only.images import ImageKey, has_own_images, tokens_above
from sglang.srt.mem_cache.buffer_only.page_store import Job, page_hashes
from sglang.srt.mem_cache.buffer_only.stage import Copies, Direction, StagingPages, slots_of
from sglang.srt.mem_cache.buffer_only.touch import recent

if TYPE_CHECKING:
    from torch import Event

    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.radix_cache import TreeNode


@dataclass(eq=False)
class Backup:
    """Pages on their way to the store."""

    segments: tuple[Segment, ...]
    keys: list[str]
    prefix_keys: list[str] | None
    staging: StagingPages
    #: None while the copy to the staging buffer runs.
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
    """When a store that refuses is tried again: after a backup of which it took nothing, in
    ``first_ms``, then in twice that and so on, at most ``longest_ms`` apart; after one of which it
    took a part, as one that evicts does, in a sixteenth of ``first_ms``, then in twice that and so
    on up to ``first_ms``. All times are agreed milliseconds."""

    def __init__(self, first_ms: int, longest_ms: int) -> None:
        self._first, self._longest = first_ms, longest_ms
        self._wait, self._wait_for_the_rest = first_ms, first_ms // 16
        self._retry_at = 0
        #: Whether the last backup was refused, or a part of it: then one backup is tried, not all
        #: that fit.
        self.refused = False
        #: Whether the store took a part of what it refused last: it takes more soon.
        self.partly = False

    def waiting(self, now_ms: int) -> bool:
        """Whether nothing is to be tried yet."""
        return self.refused and now_ms < self._retry_at

    def ended(self, durable: int, pages: int, now_ms: int) -> None:
        """A backup of ``pages`` pages has ended, of which the store took ``durable``."""
        if durable == pages:
            self.refused = False
            self._wait, self._wait_for_the_rest = self._first, self._first // 16
        elif self.waiting(now_ms):
            return  # those that were under way with one that was refused count once
        elif durable:
            self.partly = True
            self.refused, self._retry_at = True, now_ms + self._wait_for_the_rest
            self._wait = self._first
            self._wait_for_the_rest = min(2 * self._wait_for_the_rest, self._first)
        else:
            self.partly = False
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
        more = self._store_up and self._refusals.partly
        return bool((self.queue and (more or not self._held_back)) or self._under_way)

    @property
    def _under_way(self) -> bool:
        return any(not backup.overdue for backup in self._running)

    @property
    def _held_back(self) -> bool:
        """Whether a copy to the staging buffer would be for nothing."""
        return not self._store_up or self._refusals.waiting(self._context.now_ms)

    @property
    def running(self) -> Sequence[Backup]:
        """The backups in flight, oldest first."""
        return tuple(self._running)

    def request(self, node: TreeNode) -> None:
        """Have ``node`` written, and before it all above it that is neither stored nor waiting."""
        chain = []
        while node.parent is not None and node.pending is None and not covered(node):
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
        if not self.queue:
            return
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

    def forget_stored(self, root: TreeNode) -> None:
        """The store was cleared: nothing is durable any more, and what is on its way may not be."""
        for backup in self._running:
            backup.orphan = True
        nodes = [root]
        while nodes:
            node = nodes.pop()
            node.stored = node.launched = 0
            nodes.extend(node.children.values())

    def close(self, until: float) -> bool:
        """End the thread; False if it runs on at ``until``, of ``time.monotonic``."""
        return self._thread.close(until)

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
                if not (covered(node.parent) and has_own_images(node)):
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
            extra_key = node.key.extra_key  # only for images does it matter where the pages are
            above = tokens_above(node) if isinstance(extra_key, ImageKey) else 0
            keys.extend(context.store.keys(hashes, extra_key, above // page + first))
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
            self._refusals.ended(durable, len(backup.keys), self._context.now_ms)
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
        context, tokens = self._context, durable * self._context.page_size
        for segment in backup.segments:
            settle(segment, min(tokens, len(segment)))
            if tokens >= len(segment):
                for node, _ in path_pieces(segment.node, segment.start):
                    recent(node, context.now_ms, context.settings.touch_ms)
            elif (pending := segment.node.pending) is not None:
                # Tried on and on, what a store does not take would keep out all that is behind it.
                self.queue.drop(pending, REFUSED)
            tokens -= min(tokens, len(segment))

    def _unlock(self, backup: Backup) -> None:
        for segment in backup.segments:
            self._context.tree.dec_lock_ref(segment.node)

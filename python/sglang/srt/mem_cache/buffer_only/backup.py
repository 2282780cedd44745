"""Backup: device to staging buffer to store, a few pages at a time.

Nodes to write wait in a queue, unlocked. Each step puts waiting pages into *backups* while staging
pages and slots last. A backup locks its nodes until the copy to the staging buffer has ended. Then
a thread calls the store, and the staging pages are released at the answer, good or bad.

The result is recorded on the nodes (``nodes``). After a refusal a single backup is attempted once
per interval (``BackOff``).

Touch: stored prefixes in use are queried in the store, and written again if the store lost them.
Without it, a prefix that all requests find on the device would never be queried: a store that lost
it would not get it back, and a store with leases or LRU would evict the hottest prefixes first. The
path of each request that has run is queried, each node at most once per ``touch_ms`` and not before
``touch_ms`` after the store took or delivered it. Lost pages are no longer marked as stored, so
that the next request on the path has them written.

Contract:

- Thread: scheduler thread only; store threads run only the ``Job`` and read no state from here.
- Ranks: ``vote`` is local; ``apply`` and ``launch`` run in the same step on all ranks and depend
  only on agreed values, the tree and the queue.
- Locks: a node is held (``tree.hold``) from ``_start`` until its copy has ended, never while queued
  or while the store is called.
- Staging pages: released once, after the answer on all ranks; after a call that was given up, when
  that call has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.jobs import BackOff, Job
from sglang.srt.mem_cache.buffer_only.nodes import (
    FLUSHED,
    REFUSED,
    STUCK,
    UNCOVERED,
    BackupQueue,
    ImageKey,
    Segment,
    covered,
    has_own_images,
    page_hashes,
    path_pieces,
    settle,
    tokens_above,
)
from sglang.srt.mem_cache.buffer_only.staging import (
    Copies,
    Direction,
    SlotPair,
    StagingPages,
    slots_of,
)
from sglang.srt.mem_cache.buffer_only.transfer_vote import BACKUP_SLOTS, PENDING, TransferVote

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
    from sglang.srt.mem_cache.radix_cache import TreeNode


#: Queued paths to touch; beyond it the oldest is dropped.
MAX_WAITING_PATHS = 256
#: Lost pages of one path that are located, each with a query for the pages after it. Beyond it the
#: rest of the path counts as lost.
MAX_HOLES = 16


@dataclass(eq=False)
class Backup:
    """Pages on their way to the store."""

    segments: tuple[Segment, ...]
    #: Arguments of ``PageStore.keys``: page hashes, ``extra_key``, first page of the prompt.
    parts: list[tuple[list[str], str | None, int]]
    namespace: Namespace
    prefix_keys: list[str] | None
    staging: StagingPages
    #: Token slots of the staging pages.
    slots: torch.Tensor
    #: None while the copy to the staging buffer runs.
    job: Job | None = None
    #: True if the tree or the store was emptied since: the result is ignored.
    orphan: bool = False
    #: True if answered on all ranks while an overdue call may still read the staging pages.
    overdue: bool = False

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.staging.pages)


class Backups:
    """All backups of one rank; see the module's contract."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = context.threads("backup")
        self.queue = BackupQueue()
        self.copies: Copies[Backup] = Copies()
        #: In flight, oldest first.
        self.running: list[Backup] = []
        # Half of the backups' share, so that one backup is copied while another one is stored.
        ceiling = context.staging_pool.shares[Direction.BACKUP].ceiling
        self._max_pages = min(context.store.batch_pages, max(1, ceiling // 2))
        client = context.store.client.settings
        first_ms, longest_ms = int(client.first_retry * 1000), int(client.longest_retry * 1000)
        #: Back-off after backups that the store did not take in full; agreed milliseconds.
        self._refused = BackOff(first_ms, longest_ms)
        self._store_up = True

    @property
    def busy(self) -> bool:
        """True if a backup is in flight or can be started. Overdue calls do not count, nor does a
        queue that waits for a store which takes nothing."""
        writes = self._store_up and not self._waits
        return bool((self.queue and writes) or self._under_way)

    @property
    def _under_way(self) -> bool:
        return any(not backup.overdue for backup in self.running)

    @property
    def _waits(self) -> bool:
        """True until the retry after a refusal is due."""
        return self._refused.waits(self._context.now_ms)

    def request(self, node: TreeNode) -> None:
        """Queue ``node``, after its ancestors that are neither stored nor queued."""
        chain = []
        while node.parent is not None and node.pending is None and not covered(node):
            chain.append(node)
            node = node.parent
        for missing in reversed(chain):
            self.queue.add(missing)

    def vote(self) -> tuple[int, tuple[int, ...]]:
        """Return the number of ended copies and the outcome of each backup, both on this rank."""
        jobs = [(backup.job, backup.overdue) for backup in self.running]
        outcomes = [job.outcome(overdue) if job else PENDING for job, overdue in jobs]
        return self.copies.ended(), tuple(outcomes)

    def apply(self, agreed: TransferVote) -> None:
        """Process the copies and backups that have ended on all ranks."""
        self._store_up = bool(agreed.store_up)
        for backup, durable in zip(list(self.running), agreed.backups, strict=True):
            if durable != PENDING:
                self._answered(backup, durable)
            elif backup.overdue:
                backup.staging.strand()
        self.copied(agreed.backup_copies)

    def copied(self, launches: int) -> None:
        """Have the store write the pages of the first ``launches`` copies, waiting for those that
        have not ended."""
        for backup in self.copies.pop(launches):
            self._unlock(backup)
            self._write(backup)

    def launch(self) -> None:
        """Start the backups that staging pages and slots allow, with one copy for all of them."""
        if not self.queue:
            return
        stranded = sum(backup.staging.stranded for backup in self.running)
        pool = self._context.staging_pool
        if stranded >= BACKUP_SLOTS or not pool.capacity(Direction.BACKUP, eventually=True):
            self.queue.clear(STUCK)  # because nothing can be written until an overdue call returns
        single = self._refused.failing
        if not self._store_up or self._waits or (single and self._under_way):
            return
        started, pairs = list[Backup](), list[SlotPair]()
        while len(self.running) < BACKUP_SLOTS and not (started and single):
            pages = min(self._max_pages, pool.capacity(Direction.BACKUP))
            segments = self._next_segments(pages)
            if not segments:
                break
            started.append(self._start(segments, pairs))
        if started:
            copied = self._context.copier.to_staging(pairs) if pairs else None
            self.copies.add(copied, started)

    def reset(self) -> None:
        """Forget the tree, which is about to be emptied; keep pages that the store still reads."""
        self.queue.clear(FLUSHED)
        for backup in self.copies.pop(len(self.copies.launches)):
            self.queue.dropped[FLUSHED] += sum(map(len, backup.segments))
            self._unlock(backup)
            backup.staging.release()
            self.running.remove(backup)
        for backup in self.running:
            backup.orphan = True

    def forget_stored(self, root: TreeNode) -> None:
        """Mark nothing as stored, because the store was cleared. Writes in flight may be lost."""
        for backup in self.running:
            backup.orphan = True
        nodes = [root]
        while nodes:
            node = nodes.pop()
            node.stored = node.launched = 0
            nodes.extend(node.children.values())

    def _next_segments(self, pages: int) -> list[Segment]:
        """Take at most ``pages`` pages from the head of the queue and mark them as launched."""
        page, found = self._context.page_size, []
        while pages > 0 and (pending := next(iter(self.queue), None)) is not None:
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
                break  # because one call passes the prefix keys of one path
        return found

    def _start(self, segments: Sequence[Segment], pairs: list[SlotPair]) -> Backup:
        """Start a backup of ``segments`` and append its slots to copy to ``pairs``."""
        import torch

        context, page = self._context, self._context.page_size
        staging = context.staging_pool.allocate(Direction.BACKUP, sum(map(len, segments)) // page)
        slots, values = slots_of(staging.pages, page), list[torch.Tensor]()
        parts = list[tuple[list[str], str | None, int]]()
        for segment in segments:
            node, length = segment.node, len(segment.node.key)
            start, stop = length - segment.start, length - segment.end
            hashes = page_hashes(node, page)[start // page : stop // page]
            extra_key = node.key.extra_key  # positions matter to keys with images only
            above = tokens_above(node) if isinstance(extra_key, ImageKey) else 0
            parts.append((hashes, extra_key, (above + start) // page))
            context.tree.hold(node)
            values.append(node.value[start:stop])
        if not context.skip_backup:
            pairs.append((slots, torch.cat(values)))
        prefix_keys = context.prefix_keys(segments[0].node)
        if prefix_keys is not None:
            prefix_keys = prefix_keys[: len(prefix_keys) - segments[0].start // page]
        namespace = context.store.namespace
        backup = Backup(tuple(segments), parts, namespace, prefix_keys, staging, slots)
        context.checksum.note("write", len(staging.pages), parts[0][0][0], parts[-1][0][-1])
        self.running.append(backup)
        return backup

    def _write(self, backup: Backup) -> None:
        context, store = self._context, self._context.store

        def write(job: Job) -> int:
            if context.skip_backup:
                return backup.pages
            keys = [key for part in backup.parts for key in store.keys(*part, backup.namespace)]
            return store.call(job, store.client.write, keys, backup.prefix_keys, backup.slots)

        backup.job = self._thread.submit(write)

    def _answered(self, backup: Backup, durable: int) -> None:
        """Process a backup that all ranks' stores answered, or whose overdue calls all returned."""
        if not backup.overdue:
            counters, page = self._context.counters, self._context.page_size
            counters["store_written_pages"] += durable
            now_ms, failed = self._context.now_ms, durable < backup.pages
            if not failed:
                self._refused.worked()
            elif not self._waits:  # else it was in flight with a failed backup, which counts once
                if durable:  # the store took some pages: restart from the shortest interval
                    self._refused.worked()
                self._refused.failed(now_ms)
            if failed:
                counters["store_write_failures"] += 1
                self.queue.dropped[REFUSED] += sum(map(len, backup.segments)) - durable * page
                backup.overdue = True
            if not backup.orphan:
                self._settle(backup, durable)
            if backup.overdue:
                return
        self.running.remove(backup)
        backup.staging.release()

    def _settle(self, backup: Backup, durable: int) -> None:
        context, tokens = self._context, durable * self._context.page_size
        for segment in backup.segments:
            if tokens < len(segment) and (pending := segment.node.pending) is not None:
                # Drop instead of retrying, because a refused backup would block the queue. Drop
                # before ``settle``, because ``settle`` would count the same tokens again.
                self.queue.drop(pending, REFUSED)
            settle(segment, min(tokens, len(segment)), context.now_ms + context.settings.touch_ms)
            tokens -= min(tokens, len(segment))

    def _unlock(self, backup: Backup) -> None:
        for segment in backup.segments:
            self._context.tree.unhold(segment.node)


@dataclass
class Touch:
    """A query for part of a path, which ends with ``node``."""

    node: TreeNode
    #: Tokens from the start of the part to the end of ``node``: stable under splits and deletions.
    length: int
    #: Leading tokens of the part that are marked as stored and queried.
    tokens: int
    job: Job


class Touches:
    """All touches of one rank, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = context.threads("touch")
        #: Node -> tokens to query, back from its end.
        self._waiting: dict[TreeNode, int] = {}
        #: The query in flight.
        self.running: Touch | None = None

    def used(self, node: TreeNode) -> None:
        """Queue a touch of ``node``, which a request has used, if it is due.

        Call it from the first node of the path to the last, because each node replaces its parent
        in the queue.
        """
        now = self._context.now_ms
        if not node.stored or now < node.touch_after_ms:
            return
        node.touch_after_ms = now + self._context.settings.touch_ms
        self._waiting[node] = self._waiting.pop(node.parent, 0) + len(node.key)
        if len(self._waiting) > MAX_WAITING_PATHS:
            del self._waiting[next(iter(self._waiting))]

    def vote(self) -> int:
        """Return the leading tokens of the queried path that this rank found, or ``PENDING``. After
        a failed query return all of them, because a fault says nothing about the store's content.
        """
        touch = self.running
        if touch is None or touch.job.pages == PENDING:
            return 0 if touch is None else PENDING
        return touch.tokens if touch.job.fault else touch.job.pages * self._context.page_size

    def apply(self, found: int) -> None:
        """Unmark the nodes behind the ``found`` leading tokens, unless it is ``PENDING``."""
        touch = self.running
        if touch is None or found == PENDING:
            return
        self.running = None
        if found >= touch.tokens:
            return
        self._context.counters["store_lost_pages"] += touch.job.lost
        for node, back in path_pieces(touch.node, touch.length):
            begin = touch.length - back - len(node.key)
            if begin + node.stored > found:
                node.stored = node.launched = max(0, found - begin)

    def launch(self) -> None:
        """Query the next path unless a query is in flight."""
        if self.running is not None or not self._waiting:
            return
        context, store = self._context, self._context.store
        node, length = next(iter(self._waiting.items()))
        del self._waiting[node]
        path, hashes, tokens = list(path_pieces(node, length))[::-1], list[str](), 0
        for piece, _ in path:
            pages = piece.stored // context.page_size
            hashes.extend(page_hashes(piece, context.page_size)[:pages])
            tokens += piece.stored
            if piece.stored < len(piece.key):
                break
        if not tokens:
            return  # an earlier touch found it lost
        namespace, extra_key = store.namespace, node.key.extra_key
        begin = tokens_above(path[0][0]) // context.page_size
        above = context.prefix_keys(path[0][0].parent)

        def look_up(job: Job) -> int:
            keys = store.keys(hashes, extra_key, begin, namespace)
            found = index = store.call(job, store.client.query, keys, above)
            while index < len(keys) and job.lost < MAX_HOLES and not job.fault:
                job.lost += 1
                index += 1 + store.call(
                    *(job, store.client.query, keys[index + 1 :]),
                    None if above is None else [*above, *keys[: index + 1]],
                )
            job.lost = 0 if job.fault else job.lost + len(keys) - index
            return found

        context.checksum.note("touch", tokens, hashes[-1])
        self.running = Touch(node, length, tokens, self._thread.submit(look_up))

    def reset(self) -> None:
        """Cancel all touches, because the tree is about to be emptied or the store was."""
        self._waiting.clear()
        if self.running is not None:
            self.running.job.cancelled = True
            self.running.tokens = 0  # so that no result counts as a loss

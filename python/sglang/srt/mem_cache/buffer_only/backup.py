"""Backup: device to staging buffer to store, a few pages at a time.

A node that is to be written waits in a queue, without a lock. In each step, as far as staging pages
and slots go, waiting pages are put into *backups*: their nodes are locked until the copy to the
staging buffer has ended, then a thread has the store write them, and the staging pages are free as
soon as the store has answered, whatever it said.

What became of it is noted on the nodes (``nodes``). A store that refuses is tried again after a
while (``BackOff``): one backup, not all that fit.

Touch: what is noted as stored is looked up in the store while it is in use, and written again
where the store has lost it.

The store is never asked for a prefix that every request finds on the device. Because it is noted as
stored, it would not be written again if the store lost it. So the path of a request that has run is
looked up, as far as it is due: each node at most once in ``touch_ms``, and not so soon after the
store has taken or given it. What the store has lost is not noted as stored any more, so that the
next request that passes has it written. For a store with leases or an order of use, looking a key
up is also what makes it recent: it would lose first what is used most.
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
from sglang.srt.mem_cache.buffer_only.stage import Copies, Direction, Pair, StagingPages, slots_of
from sglang.srt.mem_cache.buffer_only.transfer_vote import BACKUP_SLOTS, PENDING, TransferVote

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
    from sglang.srt.mem_cache.radix_cache import TreeNode


#: Paths that wait to be touched, at most; the oldest go first.
MOST_WAITING = 256
#: Pages that are counted as lost one by one, each with a query for those behind it. The rest of the
#: path then counts as lost.
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
    #: Of a tree that was emptied since: nobody wants to know what became of it.
    orphan: bool = False
    #: Answered, on all ranks; but an overdue call may still read the staging pages.
    overdue: bool = False

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.staging.pages)


class Backups:
    """All backups of one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = context.threads("backup")
        self.queue = BackupQueue()
        self.copies: Copies[Backup] = Copies()
        #: In flight, oldest first.
        self.running: list[Backup] = []
        # Half of what backups may have: one is copied while another one is stored.
        ceiling = context.stage.shares[Direction.BACKUP].ceiling
        self._most_pages = min(context.store.batch_pages, max(1, ceiling // 2))
        client = context.store.client.settings
        first_ms, longest_ms = int(client.first_retry * 1000), int(client.longest_retry * 1000)
        #: Of backups of which the store did not take all, in agreed milliseconds.
        self._refused = BackOff(first_ms, longest_ms)
        self._store_up = True

    @property
    def busy(self) -> bool:
        """Whether anything can be done, or is on its way; what the store was given up for does not
        count, nor what waits for a store that takes nothing."""
        writes = self._store_up and not self._waits
        return bool((self.queue and writes) or self._under_way)

    @property
    def _under_way(self) -> bool:
        return any(not backup.overdue for backup in self.running)

    @property
    def _waits(self) -> bool:
        """Whether nothing is to be tried yet, since the store refused."""
        return self._refused.waits(self._context.now_ms)

    def request(self, node: TreeNode) -> None:
        """Have ``node`` written, and before it all above it that is neither stored nor waiting."""
        chain = []
        while node.parent is not None and node.pending is None and not covered(node):
            chain.append(node)
            node = node.parent
        for missing in reversed(chain):
            self.queue.add(missing)

    def vote(self) -> tuple[int, tuple[int, ...]]:
        """Copies that have ended, and what is known of each backup, on this rank."""
        jobs = [(backup.job, backup.overdue) for backup in self.running]
        outcomes = [job.outcome(overdue) if job else PENDING for job, overdue in jobs]
        return self.copies.ended(), tuple(outcomes)

    def apply(self, agreed: TransferVote) -> None:
        """Act on what has ended on all ranks."""
        self._store_up = bool(agreed.store_up)
        for backup, durable in zip(list(self.running), agreed.backups, strict=True):
            if durable != PENDING:
                self._answered(backup, durable)
            elif backup.overdue:
                backup.staging.strand()
        self.copied(agreed.backup_copies)

    def copied(self, launches: int) -> None:
        """Have the store write the pages of the first ``launches`` copy launches; wait for launches
        that have not ended."""
        for backup in self.copies.pop(launches):
            self._unlock(backup)
            self._write(backup)

    def launch(self) -> None:
        """Start what stage and slots have room for, with one copy for all of it."""
        if not self.queue:
            return
        stranded, stage = sum(one.staging.stranded for one in self.running), self._context.stage
        if stranded >= BACKUP_SLOTS or not stage.capacity(Direction.BACKUP, eventually=True):
            self.queue.clear(STUCK)  # nothing can be written until an overdue call returns
        one = self._refused.failing
        if not self._store_up or self._waits or (one and self._under_way):
            return
        started, pairs = list[Backup](), list[Pair]()
        while len(self.running) < BACKUP_SLOTS and not (started and one):
            pages = min(self._most_pages, stage.capacity(Direction.BACKUP))
            segments = self._next_segments(pages)
            if not segments:
                break
            started.append(self._start(segments, pairs))
        if started:
            copied = self._context.copier.to_stage(pairs) if pairs else None
            self.copies.add(copied, started)

    def reset(self) -> None:
        """The tree is about to be emptied: forget it, but keep what the store still reads."""
        self.queue.clear(FLUSHED)
        for backup in self.copies.pop(len(self.copies.launches)):
            self.queue.dropped[FLUSHED] += sum(map(len, backup.segments))
            self._unlock(backup)
            backup.staging.release()
            self.running.remove(backup)
        for backup in self.running:
            backup.orphan = True

    def forget_stored(self, root: TreeNode) -> None:
        """The store was cleared: nothing is durable any more, and what is on its way may not be."""
        for backup in self.running:
            backup.orphan = True
        nodes = [root]
        while nodes:
            node = nodes.pop()
            node.stored = node.launched = 0
            nodes.extend(node.children.values())

    def _next_segments(self, pages: int) -> list[Segment]:
        """At most ``pages`` pages from the head of the queue; they count as launched."""
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
                break  # the keys before a page are those of one path
        return found

    def _start(self, segments: Sequence[Segment], pairs: list[Pair]) -> Backup:
        """``pairs``: what is to be copied, host slots and device slots."""
        import torch

        context, page = self._context, self._context.page_size
        staging = context.stage.allocate(Direction.BACKUP, sum(map(len, segments)) // page)
        slots, values = slots_of(staging.pages, page), list[torch.Tensor]()
        parts = list[tuple[list[str], str | None, int]]()
        for segment in segments:
            node, length = segment.node, len(segment.node.key)
            start, stop = length - segment.start, length - segment.end
            hashes = page_hashes(node, page)[start // page : stop // page]
            extra_key = node.key.extra_key  # only for images does it matter where the pages are
            above = tokens_above(node) if isinstance(extra_key, ImageKey) else 0
            parts.append((hashes, extra_key, (above + start) // page))
            context.tree.hold(node)
            values.append(node.value[start:stop])
        if not context.skip_backup:
            pairs.append((slots, torch.cat(values)))
        before = context.prefix_keys(segments[0].node)
        if before is not None:
            before = before[: len(before) - segments[0].start // page]
        namespace = context.store.namespace
        backup = Backup(tuple(segments), parts, namespace, before, staging, slots)
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
        """The store has answered on all ranks, or has let go of the pages on all ranks."""
        if not backup.overdue:
            counters, page = self._context.counters, self._context.page_size
            counters["store_written_pages"] += durable
            now_ms, failed = self._context.now_ms, durable < backup.pages
            if not failed:
                self._refused.worked()
            elif not self._waits:  # those that were under way with one that failed count once
                if durable:  # as of a store that evicts: it takes more soon
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
                # Tried on and on, what a store does not take would keep out all that is behind it.
                # Drop before ``settle``, because ``settle`` would count the same tokens again.
                self.queue.drop(pending, REFUSED)
            settle(segment, min(tokens, len(segment)), context.now_ms + context.settings.touch_ms)
            tokens -= min(tokens, len(segment))

    def _unlock(self, backup: Backup) -> None:
        for segment in backup.segments:
            self._context.tree.let_go(segment.node)


@dataclass
class Touch:
    """A part of a path that is looked up: its first ``tokens`` tokens, noted as stored."""

    node: TreeNode
    #: From the start of the part to the end of ``node``, which no split and no deletion changes.
    length: int
    tokens: int
    job: Job


class Touches:
    """All touches of one rank, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = context.threads("touch")
        #: Tokens to look up, back from the end of each node.
        self._waiting: dict[TreeNode, int] = {}
        #: The path that is looked up now.
        self.running: Touch | None = None

    def used(self, node: TreeNode) -> None:
        """A request has used ``node``, which is in the store, and all above it.

        Called from the first node of its path to the last, which stands for all of them.
        """
        now = self._context.now_ms
        if not node.stored or now < node.touch_after_ms:
            return
        node.touch_after_ms = now + self._context.settings.touch_ms
        self._waiting[node] = self._waiting.pop(node.parent, 0) + len(node.key)
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def vote(self) -> int:
        """Leading tokens that the store has of the path that is looked up, as far as this rank
        knows; ``PENDING`` while it is asked. All of them where the store was at fault: that says
        nothing about its content."""
        touch = self.running
        if touch is None or touch.job.pages == PENDING:
            return 0 if touch is None else PENDING
        return touch.tokens if touch.job.fault else touch.job.pages * self._context.page_size

    def apply(self, found: int) -> None:
        """All ranks have an answer, unless ``found`` is ``PENDING``."""
        touch = self.running
        if touch is None or found == PENDING:
            return
        self.running = None
        if found >= touch.tokens:
            return
        self._context.counters["store_lost_pages"] += touch.job.lost
        for node, back in path_pieces(touch.node, touch.length):
            begin = touch.length - back - len(node.key)
            if begin + node.stored > found:  # nothing behind what was found is stored
                node.stored = node.launched = max(0, found - begin)

    def launch(self) -> None:
        """Look up the next path, if none is."""
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
            return  # it was lost meanwhile
        namespace, extra_key = store.namespace, node.key.extra_key
        begin = tokens_above(path[0][0]) // context.page_size
        above = context.prefix_keys(path[0][0].parent)

        def look_up(job: Job) -> int:
            keys = store.keys(hashes, extra_key, begin, namespace)
            found = at = store.call(job, store.client.query, keys, above)
            while at < len(keys) and job.lost < MAX_HOLES and not job.fault:
                job.lost += 1
                at += 1 + store.call(
                    *(job, store.client.query, keys[at + 1 :]),
                    None if above is None else [*above, *keys[: at + 1]],
                )
            job.lost = 0 if job.fault else job.lost + len(keys) - at
            return found

        context.checksum.note("touch", tokens, hashes[-1])
        self.running = Touch(node, length, tokens, self._thread.submit(look_up))

    def reset(self) -> None:
        """The tree is about to be emptied, or the store was."""
        self._waiting.clear()
        if self.running is not None:
            self.running.job.cancelled = True
            self.running.tokens = 0  # whatever is found, nothing is lost

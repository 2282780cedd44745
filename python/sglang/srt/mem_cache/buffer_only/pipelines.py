"""Backup and prefetch of one rank, and the step that drives them.

Contract:

- Thread: scheduler thread only.
- Ranks: ``step`` runs once in every scheduler step of every rank and contains the only collective
  (``agree``); a rank that skips it blocks the rest. ``reset``, ``use``, ``hide`` and
  ``clear_store`` run in the same step on all ranks. On a decode server each rank runs alone,
  without a collective.
- Locks: none; see ``backup`` and ``load_back`` for locks on tree nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import Reduce, agree
from sglang.srt.mem_cache.buffer_only.backup import Backups, Touches
from sglang.srt.mem_cache.buffer_only.metrics import COUNTERS
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.nodes import DROP_REASONS
from sglang.srt.mem_cache.buffer_only.prefetch_line import PrefetchLine
from sglang.srt.mem_cache.buffer_only.staging import Direction
from sglang.srt.mem_cache.buffer_only.store_client import Fault
from sglang.srt.mem_cache.buffer_only.transfer_vote import TransferVote
from sglang.srt.mem_cache.buffer_only.worth import FetchChoice, Mean

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context

#: Longest wait for all store threads at the end of the server.
CLOSE_S = 10.0


class Pipelines:
    """Backups and prefetches of one rank; see the module's contract.

    Args:
        context: shared objects.
        reduce_min: elementwise minimum of a vector of integers over the ranks of this server.
        clock: seconds.
    """

    def __init__(
        self, context: Context, reduce_min: Reduce, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.context = context
        self.backups = Backups(context)
        self.prefetches = PrefetchLine(context)
        self.touches = Touches(context)
        #: Mean time to compute a prompt token on this rank.
        self._token_seconds = Mean(keep=0.9997)
        #: True if the scheduler had no batch, so that the time until the next step is idle time.
        self.is_idle = False
        #: Namespace of the server's current weights.
        self._namespace = context.store.namespace
        self._reduce_min = reduce_min
        self._clock = clock
        self._born = clock()

    @property
    def busy(self) -> bool:
        """True if a transfer waits or is in flight. Overdue calls do not count."""
        return self.backups.busy or self.prefetches.busy

    def totals(self) -> dict[tuple[str, str], int]:
        """Return the counters for ``BufferMetrics.update``."""
        context, dropped = self.context, self.backups.queue.dropped
        faults = context.store.client.faults
        return {
            **{(name, ""): context.counters[name] for name in COUNTERS},
            **{("dropped_tokens", reason): dropped[reason] for reason in DROP_REASONS},
            **{("store_faults", fault.value): faults[fault] for fault in Fault},
            **{
                ("prefetch_choices", choice.value): context.choices[choice]
                for choice in FetchChoice
            },
        }

    def gauges(self) -> dict[str, int]:
        """Return the gauges for ``BufferMetrics.update``."""
        pool, queue = self.context.staging_pool, self.backups.queue
        client = self.context.store.client
        return {
            "pages": pool.pages,
            "write_pages": pool.used(Direction.BACKUP),
            "read_pages": pool.used(Direction.PREFETCH),
            "peak_pages": pool.peak,
            "stranded_pages": pool.stranded,
            "pending_intents": len(queue),
            "pending_tokens": queue.tokens,
            # 0 while ``max_calls`` calls hang, because further calls are refused.
            "store_up": int(client.up and client.overdue < client.settings.max_calls),
            "store_calls": client.under_way,
            "store_overdue_calls": client.overdue,
        }

    def step(self) -> None:
        """Agree with all ranks, process ended transfers and start new ones. Called once in each
        scheduler step."""
        backup_copies, backups = self.backups.vote()
        queries, fetches = self.prefetches.calls.votes()
        load_back_copies = self.prefetches.load_backs.copies.ended()
        now_ms = int((self._clock() - self._born) * 1000)
        up = int(self.context.store.client.poll())
        touched = self.touches.vote()
        calls = self.prefetches.calls
        speeds = (
            -int(calls.call_seconds.value * 1e6),
            -int(calls.query_seconds.value * 1e6),
            int(calls.call_bytes.value),
            int(1 / self._token_seconds.value) if self._token_seconds.value else 0,
        )
        vote = TransferVote(
            now_ms, backup_copies, load_back_copies, backups, queries, fetches, up, touched, *speeds
        )
        agreed = agree(vote, self.context.checksum, self._reduce_min)
        before_ms = self.context.now_ms
        self.context.now_ms = max(before_ms, agreed.clock_ms)
        self.backups.apply(agreed)
        self.prefetches.apply(agreed, self.context.now_ms - before_ms, self.is_idle)
        self.is_idle = False
        self.touches.apply(agreed.touched)
        # Prefetches first, because requests wait for them.
        self.prefetches.launch()
        self.backups.launch()
        if agreed.store_up:
            self.touches.launch()

    def ran(self, seconds: float, tokens: int) -> None:
        """Record that a batch computed ``tokens`` prompt tokens in ``seconds``."""
        if tokens > 0 and seconds > 0:
            self._token_seconds.add(seconds / tokens, tokens)

    def reset(self) -> None:
        """Forget the tree, which is about to be emptied."""
        self.backups.reset()
        self.prefetches.cancel_all()
        self.prefetches.load_backs.reset()
        self.touches.reset()
        self.context.store.namespace = self._namespace

    def use(self, namespace: Namespace, nonce: str) -> None:
        """Use the keys of ``namespace``, which names the server's new weights.

        A tree that was not emptied has KV of the old weights, and KV computed after such a prefix
        belongs to neither. So until it is emptied, the keys are private to this server by
        ``nonce``, which is equal on all ranks and unique to the server.
        """
        if namespace == self._namespace:
            return
        self._namespace = namespace
        mixed = self.context.tree.serves_kv
        self.prefetches.cancel_all()
        store = self.context.store
        store.namespace = namespace.within(f"mixed {nonce}") if mixed else namespace

    def hide(self, nonce: str) -> None:
        """Make the keys private to this server by ``nonce`` until ``use``, because its weights have
        changed and their fingerprint is not known yet."""
        self._namespace = self._namespace.within(f"changed {nonce}")
        self.prefetches.cancel_all()
        self.context.store.namespace = self._namespace

    def clear_store(self) -> bool:
        """Remove everything from the store. Return True on success.

        Nodes lose their marks in any case, because some ranks may have failed: a page that is still
        there is just found again, but a page wrongly marked as stored would never be written.
        """
        cleared = self.context.store.client.clear()
        self.prefetches.cancel_all()
        self.touches.reset()
        self.backups.forget_stored(self.context.tree.root_node)
        return cleared

    def close(self) -> bool:
        """Cancel all prefetches, end the threads and close the store. Return False, with the store
        left open, if a call still runs after ``CLOSE_S``."""
        client, until = self.context.store.client, time.monotonic() + CLOSE_S
        self.prefetches.cancel_all()
        ended = [threads.close(until) for threads in self.context.all_threads]
        if not all(ended) or client.under_way:
            return False
        return client.close(until)

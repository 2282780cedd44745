"""Backup and prefetch of one rank, and the one step that drives them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.rank_agreement import Reduce, agree
from sglang.srt.mem_cache.buffer_only.backup import Backups, Touches
from sglang.srt.mem_cache.buffer_only.metrics import COUNTERS
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.prefetch_line import PrefetchLine
from sglang.srt.mem_cache.buffer_only.stage import Direction
from sglang.srt.mem_cache.buffer_only.store_client import Fault
from sglang.srt.mem_cache.buffer_only.transfer_vote import TransferVote
from sglang.srt.mem_cache.buffer_only.worth import Choice, Mean

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context

#: How long the store may keep the threads when the server ends, all of them together.
CLOSE_S = 10.0


class Pipelines:
    """Backups and prefetches over one stage.

    Args:
        context: what both work with.
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
        #: To compute a token of a prompt, on this rank.
        self._token_seconds = Mean(keep=0.9997)
        #: Set by a scheduler without a batch: the time of the next step is idle time.
        self.is_idle = False
        #: Of the weights that the server has.
        self._namespace = context.store.namespace
        self._reduce_min = reduce_min
        self._clock = clock
        self._born = clock()

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way, apart from what was given up."""
        return self.backups.busy or self.prefetches.busy

    def totals(self) -> dict[tuple[str, str], int]:
        """For ``BufferMetrics.update``."""
        context, dropped = self.context, self.backups.queue.dropped
        faults = context.store.client.faults
        return {
            **{(name, ""): context.counters[name] for name in COUNTERS},
            **{("dropped_tokens", reason): tokens for reason, tokens in dropped.items()},
            **{("store_faults", fault.value): faults[fault] for fault in Fault},
            **{("prefetch_choices", each.value): context.choices[each] for each in Choice},
        }

    def gauges(self) -> dict[str, int]:
        """For ``BufferMetrics.update``."""
        stage, queue = self.context.stage, self.backups.queue
        client = self.context.store.client
        return {
            "pages": stage.pages,
            "write_pages": stage.used(Direction.BACKUP),
            "read_pages": stage.used(Direction.PREFETCH),
            "peak_pages": stage.peak,
            "stranded_pages": stage.stranded,
            "pending_intents": len(queue),
            "pending_tokens": queue.tokens,
            # 0 while all calls that the store may have hang, because further calls are refused.
            "store_up": int(client.up and client.overdue < client.settings.max_calls),
            "store_calls": client.under_way,
            "store_overdue_calls": client.overdue,
        }

    def step(self) -> None:
        """Once in each scheduler step, on all ranks: agree, act on what has ended, start more."""
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
        # Prefetches first: a request waits for them.
        self.prefetches.launch()
        self.backups.launch()
        if agreed.store_up:
            self.touches.launch()

    def ran(self, seconds: float, tokens: int) -> None:
        """A batch took so long; it has computed so many tokens of prompts."""
        if tokens > 0 and seconds > 0:
            self._token_seconds.add(seconds / tokens, tokens)

    def reset(self) -> None:
        """The tree is about to be emptied."""
        self.backups.reset()
        self.prefetches.cancel_all()
        self.prefetches.load_backs.reset()
        self.touches.reset()
        self.context.store.namespace = self._namespace

    def use(self, namespace: Namespace, nonce: str) -> None:
        """The server's weights are those of ``namespace`` from now on.

        A tree that was not emptied has KV of other weights, and what is computed below that is of
        neither. Until it is emptied the keys are this server's alone, by ``nonce``, which is the
        same on all ranks and on no other server.
        """
        if namespace == self._namespace:
            return
        self._namespace = namespace
        mixed = self.context.tree.serves_kv
        self.prefetches.cancel_all()
        store = self.context.store
        store.namespace = namespace.within(f"mixed {nonce}") if mixed else namespace

    def hide(self, nonce: str) -> None:
        """The server's weights have changed, and nobody knows yet into which: until ``use`` the
        keys are this server's alone, by ``nonce``."""
        self._namespace = self._namespace.within(f"changed {nonce}")
        self.prefetches.cancel_all()
        self.context.store.namespace = self._namespace

    def clear_store(self) -> bool:
        """Remove everything from the store; whether it did.

        What is known of it is forgotten in any case, since the ranks may have fared differently: a
        page that is there is not written again, but one that is believed to be there never is.
        """
        cleared = self.context.store.client.clear()
        self.prefetches.cancel_all()
        self.touches.reset()
        self.backups.forget_stored(self.context.tree.root_node)
        return cleared

    def close(self) -> bool:
        """End the threads, and close the store; False if it is still in a call, and then it is left
        as it is. What is queued for requests is not asked any more."""
        client, until = self.context.store.client, time.monotonic() + CLOSE_S
        self.prefetches.cancel_all()
        ended = [threads.close(until) for threads in self.context.made]
        if not all(ended) or client.under_way:
            return False
        return client.close(until)

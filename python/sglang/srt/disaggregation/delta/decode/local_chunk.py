"""A chunk of local turns as SGLang's batch, over slots that its requests hold already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: stands in for three classes of SGLang at once

import torch

from sglang.srt.disaggregation.delta.decode.turn_choice import Decision

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


@dataclass(eq=False)
class Turn:
    """A turn that is computed locally. ``done``: tokens of its prompt whose KV was computed, or is
    computed by a chunk that was launched."""

    req: Req
    decision: Decision
    at: float
    done: int
    #: Whether a draft model goes over it too.
    drafts: bool = False

    @property
    def left(self) -> int:
        """Tokens that no chunk has taken yet."""
        return len(self.req.origin_input_ids) - self.done

    @property
    def has_begun(self) -> bool:
        """Whether a chunk has taken some of it."""
        return bool(self.done > self.req.cache_protected_len)

    @property
    def start(self) -> int:
        """The token that the next chunk begins with.

        A draft slot holds what follows from its token and the next. SGLang takes what the target
        says for the one behind a chunk, and not what the prompt goes on with: so the last token of
        a chunk is computed once more, in the next one.
        """
        return self.done - (self.drafts and self.has_begun)  # the tree's KV is the text's


class _OwnPages:
    """What a chunk's batch takes for the tree, the allocator and the row pool while it is prepared:
    its requests have their rows and slots already."""

    def __init__(self, rows: ReqToTokenPool, page: int, turns: Sequence[Turn]) -> None:
        self._rows, self.page_size = rows, page
        self._slots = torch.cat(
            [
                rows.req_to_token[turn.req.req_pool_idx, turn.start : len(turn.req.fill_ids)]
                for turn in turns
            ]
        ).to(torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    # As a tree that needs no eviction.

    @property
    def token_to_kv_pool_allocator(self) -> _OwnPages:
        """Itself."""
        return self

    def is_chunk_cache(self) -> bool:
        """Nothing is evicted for the batch."""
        return True

    def supports_swa(self) -> bool:
        """The flag takes plain pools only."""
        return False

    supports_mamba = supports_swa

    # As an allocator, and as a row pool.

    def alloc(self, wanted: Any) -> Any:
        """The slots of the batch for a number of tokens, the rows of its requests for a list."""
        if isinstance(wanted, int):
            return self._slots
        return [req.req_pool_idx for req in wanted]

    def alloc_extend(self, *_: object) -> torch.Tensor:
        """The slots of the batch."""
        return self._slots


def chunk_batch(
    scheduler: Scheduler, turns: Sequence[Turn], unfinished: Turn | None
) -> ScheduleBatch:
    """A batch (``ScheduleBatch``) that computes each turn up to its ``fill_ids``, ready to be run.

    ``unfinished``: the one of them that goes on in a later chunk. The turns count as computed so
    far from here on.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.observability.req_time_stats import set_schedule_time_batch, set_time_batch
    from sglang.srt.observability.scheduler_metrics_mixin import PrefillStats, QueueCount

    rows, reqs = scheduler.req_to_token_pool, [turn.req for turn in turns]
    for turn in turns:
        req, start = turn.req, turn.start
        req.prefix_indices = rows.req_to_token[req.req_pool_idx, :start].to(torch.int64)
        req.set_extend_input_len(len(req.fill_ids) - start)
        req.already_computed = min(req.already_computed, start)  # nothing is cached less by that
    set_time_batch(reqs, "set_forward_entry_time")
    own = _OwnPages(rows, scheduler.page_size, turns)
    batch = ScheduleBatch.init_new(
        reqs,
        own,
        scheduler.token_to_kv_pool_allocator,
        own,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
        chunked_req=unfinished.req if unfinished else None,
    )
    hits = sum(turn.done for turn in turns if not turn.has_begun)
    batch.prepare_for_extend()
    batch.req_to_token_pool, batch.tree_cache = rows, scheduler.tree_cache
    batch.decoding_reqs = None
    for turn in turns:
        turn.done = len(turn.req.fill_ids)
        # They hold all their pages, whatever is in them: that is what a release gives back.
        turn.req.kv_committed_len = turn.req.kv_allocated_len = len(turn.req.origin_input_ids)
    if unfinished:
        unfinished.req.is_chunked += 1
    # What SGLang logs of a prefill batch.
    running = QueueCount.from_reqs(scheduler.running_batch.reqs, False)
    tokens, ratio = batch.extend_num_tokens, scheduler.new_token_ratio
    batch.prefill_stats = PrefillStats(tokens, hits, ratio, running, len(batch.reqs))
    set_schedule_time_batch(batch)
    return batch

"""SGLang's batches for chunks of local turns, and the memory and LoRA adapters that they need.

SGLang loads the adapters of a batch when it runs, and admits a request only if its adapter can be
loaded beside those of admitted ones. Local turns count as admitted, and the same check admits them.

Contract: scheduler thread, no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: SGLang's objects


def build_chunk(scheduler: Any, reqs: Sequence[Any], unfinished: Any = None) -> Any:
    """Return a ``ScheduleBatch`` that computes each request from its ``prefix_len`` to its
    ``extend_end``, for which there is memory. ``unfinished``: the request that continues in a later
    chunk."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats, QueueCount
    from sglang.srt.observability.req_time_stats import set_schedule_time_batch

    hits = 0
    for req in reqs:
        req.refresh_fill_ids()
        if not req.kv.holds_kv:
            hits += req.prefix_len
            req.time_stats.set_decode_transfer_queue_entry_time()
            req.time_stats.set_wait_queue_entry_time()
            req.time_stats.set_forward_entry_time()
    batch = ScheduleBatch.init_new(
        list(reqs),
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
        chunked_req=unfinished,
    )
    batch.prepare_for_extend()
    if unfinished is not None:
        unfinished.inflight_middle_chunks += 1
    running = QueueCount.from_reqs(scheduler.running_batch.reqs, False)
    batch.prefill_stats = PrefillStats(batch.extend_num_tokens, hits, 0.0, running, len(reqs))
    set_schedule_time_batch(batch)
    return batch


def end_of_chunk(start: int, length: int, left: int, page: int) -> int:
    """Return the end of a chunk with room for ``left`` tokens that computes a prompt of ``length``
    from ``start``: the prompt's end, or whole pages."""
    return length if length - start <= left else (start + left) // page * page


def has_room(room: Any, tokens: int, reserve: int = 0, chunk: int | None = None) -> bool:
    """Return True if ``tokens`` and ``reserve`` more fit into each pool of ``room``, SGLang's
    ``PrefillBudget``. ``chunk``: maximum number of these tokens in a pool of windows at once."""
    sizes = {"paged_input": tokens, "extend_input_len": tokens, "max_new_tokens": reserve}
    return bool(room.can_allocate_prefill(**sizes, chunk_limit=chunk))


def can_load_adapter(scheduler: Any, req: Any) -> bool:
    """Return True if the adapter of a local turn can be loaded now; equal on all ranks."""
    if not scheduler.enable_lora:
        return True
    arriving = [entry.req for entry in scheduler.disagg_decode_transfer_queue.queue]
    admitted = [*scheduler.running_batch.reqs, *scheduler.waiting_queue, *arriving]
    return bool(scheduler.can_schedule_lora_req(req, adapters_of(admitted)))


def adapters_of(reqs: Sequence[Any]) -> set[str | None]:
    """Return the adapters of ``reqs``; None stands for the model without one."""
    return {req.lora_id for req in reqs}


def end_aborted(scheduler: Any, req: Any) -> None:
    """End an aborted request that has no chunk in flight."""
    from sglang.srt.mem_cache.common import release_kv_cache

    req.update_finish_state()
    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def merged(running: Any, batches: Sequence[Any]) -> Any:
    """Return the running batch with the requests of computed ``batches`` that have not ended."""
    for batch in batches:
        batch.filter_batch()
        running.filter_batch()
        if running.is_empty() and not batch.is_empty():
            running = batch
        elif not batch.is_empty():
            running.merge_batch(batch)
    return running

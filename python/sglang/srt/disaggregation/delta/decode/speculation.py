"""Speculative decoding (EAGLE with a chain of drafts) on a decode server with the radix cache.

The draft model has a KV pool of its own with the slots of the target's: one table of rows, one
allocator and one tree serve both, and a page is transferred in both. Wrong draft KV changes no
answer, only the number of accepted drafts. A draft slot depends on its token *and the next one*, so
SGLang's tree has pairs of tokens as keys (``is_eagle``), and a text of n tokens shares at most n-1
slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.policy.memory import page_ceil
from sglang.srt.patchset.flags import FLAG

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache


def step_tokens(scheduler: Scheduler, page: int) -> int:
    """Return the tokens beyond its text that a request needs for a speculative step; 0 without
    speculation, where a request takes a new page only when its last one is full.

    SGLang needs this number of tokens free for each request, in whole pages; otherwise it retracts
    requests and aborts the last one. Spec v2 needs twice the number, and a request also holds the
    slots of two steps: one that runs, and one that is launched before the result of the first.
    """
    args = scheduler.server_args
    if args.speculative_algorithm is None:
        return 0
    step = max(args.speculative_num_steps or 1, args.speculative_num_draft_tokens or 1)
    wanted: int = page_ceil(step, page)
    return 2 * wanted + 2 * step if scheduler.enable_overlap else wanted


def draft_pool(scheduler: Scheduler) -> KVCache | None:
    """Return the KV pool of the scheduler's draft model, or None without speculation."""
    worker = getattr(scheduler, "draft_worker", None)
    if worker is None:
        return None
    # With spec v2 the worker serves both models and contains the draft model's worker.
    runner = worker.draft_worker.draft_runner if scheduler.enable_overlap else worker.model_runner
    return runner.token_to_kv_pool


def check_draft_pool(target: KVCache, draft: KVCache) -> None:
    """Check that ``draft`` has the same slots as ``target``.

    Raises:
        ValueError: the pools differ, or the draft model has state that SGLang does not transfer.
    """
    if hasattr(draft, "get_state_buf_infos"):  # a sparse index has it too
        raise ValueError(
            f"{FLAG} does not support draft models with per-request state in their KV pool "
            f"({type(draft).__name__}: sliding window, state space, sparse index); remove the "
            "flag, or --speculative-algorithm."
        )
    sizes = [(pool.page_size, pool.size) for pool in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{FLAG}: the KV pools of target and draft model differ in page size or tokens "
            f"({sizes[0]} and {sizes[1]}), so their page indices do not match; remove the flag, "
            "or --speculative-algorithm."
        )


def own_draft_state(req: Req) -> None:
    """Copy the inputs of the first draft of ``req`` out of its metadata slot.

    SGLang returns views, and another room uses the slot before the request runs.
    """
    for name in ("output_topk_p", "output_topk_index", "hidden_states_tensor"):
        # Always to the host, because SGLang stacks the hidden states of requests from prefill and
        # of resumed ones without moving them to one device.
        setattr(req, name, getattr(req, name).to("cpu", copy=True))


def place_first_drafts(batch: ScheduleBatch, future_map: FutureMap) -> None:
    """Store the draft inputs of a computed ``batch`` where the next step of spec v2 reads them.

    Its chunk stored them too, but the batch may have waited, and another step may have reused those
    places."""
    start = batch.spec_info
    start.new_seq_lens = batch.seq_lens
    start.future_indices = future_map.alloc_future_indices(len(batch.reqs))
    future_map.store_to_map_for_new_batch(start.future_indices, start)

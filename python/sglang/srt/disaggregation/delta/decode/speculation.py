"""Speculative decoding (EAGLE with a chain of drafts) on a decode server with the radix cache.

The draft model has a KV pool of its own with the slots of the target's: one table of rows, one
allocator and one tree serve both, and a page that moves, moves in both. A wrong draft KV changes
no answer, only how many drafts are accepted. A draft slot holds what follows from its token *and
the next*, so SGLang's tree has pairs of tokens as keys (``is_eagle``), and a text of n tokens
shares n-1 slots at most.
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
    """Tokens behind its text that a request needs for each speculative step; 0 without speculation,
    where it opens a page when its last one is full.

    SGLang wants so much free for each request, in whole pages, or it retracts, and aborts the last
    one. Spec v2 wants twice as much, and a request holds the slots of two steps beside that: of the
    one that runs, and of the one that is launched before the first one's result is known.
    """
    args = scheduler.server_args
    if args.speculative_algorithm is None:
        return 0
    step = max(args.speculative_num_steps or 1, args.speculative_num_draft_tokens or 1)
    wanted: int = page_ceil(step, page)
    return 2 * wanted + 2 * step if scheduler.enable_overlap else wanted


def draft_pool(scheduler: Scheduler) -> KVCache | None:
    """The KV pool of a scheduler's draft model; None without speculation."""
    worker = getattr(scheduler, "draft_worker", None)
    if worker is None:
        return None
    # Spec v2 has a worker of both models, and the draft model's in it.
    runner = worker.draft_worker.draft_runner if scheduler.enable_overlap else worker.model_runner
    return runner.token_to_kv_pool


def check_draft_pool(target: KVCache, draft: KVCache) -> None:
    """Raise ``ValueError`` where the slots of ``draft`` are not those of ``target``, one by one."""
    if hasattr(draft, "get_state_buf_infos"):  # an index too: SGLang sends none of a draft model
        raise ValueError(
            f"{FLAG} does not support draft models whose KV pool has per-request state "
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
    """Copy what the first draft of ``req`` starts from out of its metadata slot.

    SGLang hands out views, and the slot is given to another room before the request runs.
    """
    for name in ("output_topk_p", "output_topk_index", "hidden_states_tensor"):
        # To the host, whoever computed it: SGLang stacks the hidden states of requests that come
        # from prefill with those of resumed ones as they lie.
        setattr(req, name, getattr(req, name).to("cpu", copy=True))


# ---- turns that are computed locally ----


def own_first_drafts(batch: ScheduleBatch) -> None:
    """Note what the first draft of each request of a computed ``batch`` starts from on the request,
    as prefill's metadata would: it starts from there again when it resumes."""
    start = batch.spec_info
    probabilities, tokens = start.topk_p.cpu(), start.topk_index.cpu()
    hidden_states = start.hidden_states.cpu()
    for at, req in enumerate(batch.reqs):
        req.output_topk_p, req.output_topk_index = probabilities[at], tokens[at]
        req.hidden_states_tensor = hidden_states[at]
        own_draft_state(req)


def place_first_drafts(batch: ScheduleBatch, future_map: FutureMap) -> None:
    """Put what a computed ``batch`` drafts from where the next step of spec v2 looks it up.

    Its chunk did so too, but those places may be another step's: the batch may have waited."""
    start = batch.spec_info
    start.new_seq_lens = batch.seq_lens
    start.future_indices = future_map.alloc_future_indices(len(batch.reqs))
    future_map.store_to_map_for_new_batch(start.future_indices, start)

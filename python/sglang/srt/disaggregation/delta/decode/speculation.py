"""Speculative decoding (EAGLE with a chain of drafts) on a decode server with the radix cache.

The draft model has a KV pool of its own with the slots of the target's: one table of rows, one
allocator and one tree serve both, and a page that moves, moves in both. A wrong draft KV changes
no answer, only how many drafts are accepted. A draft slot holds what follows from its token *and
the next*, so SGLang's tree has pairs of tokens as keys (``is_eagle``), and a text of n tokens
shares n-1 slots at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.patchset.compat import FLAG

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.decode.protocols import Req


def step_tokens(args: Any, page: int) -> int:
    """Tokens of whole pages that SGLang wants free for each request before a speculative step; 0
    without speculation, where a request opens a page when its last one is full.

    With less it retracts, and aborts the last request. ``args``: ``ServerArgs``; spec v1.
    """
    if args.speculative_algorithm is None:
        return 0
    steps, drafts = args.speculative_num_steps or 1, args.speculative_num_draft_tokens or 1
    return page_ceil(max(steps, drafts), page)


def draft_pool(scheduler: Any) -> Any:
    """The KV pool of the draft model of a scheduler with spec v1; None without speculation."""
    worker = getattr(scheduler, "draft_worker", None)
    return None if worker is None else worker.model_runner.token_to_kv_pool


def check_draft_pool(target: Any, draft: Any) -> None:
    """Raise ``ValueError`` where the slots of ``draft`` are not those of ``target``, one by one."""
    if hasattr(draft, "get_state_buf_infos"):
        raise ValueError(
            f"{FLAG} does not support draft models whose KV pool has per-request state "
            f"({type(draft).__name__}: sliding window, state space, sparse index); remove the "
            "flag, or --speculative-algorithm."
        )
    sizes = [(pool.page_size, pool.size) for pool in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{FLAG}: the KV pools of target and draft model differ in page size or tokens "
            f"({sizes[0]} and {sizes[1]}), so a page of one is none of the other; remove the flag, "
            "or --speculative-algorithm."
        )


def own_draft_state(req: Req) -> None:
    """Copy what the first draft of ``req`` starts from out of its metadata slot.

    SGLang hands out views, and the slot is given to another room before the request runs.
    """
    req.output_topk_p = req.output_topk_p.clone()
    req.output_topk_index = req.output_topk_index.clone()
    req.hidden_states_tensor = req.hidden_states_tensor.clone()

"""Speculative decoding without Triton and CUDA kernels: EAGLE.

A draft is a tree of tokens in general, and a chain with ``--speculative-eagle-topk 1``. Only the
chain has a CPU form, and on SGLang 0.5.23 a tree of one step, which is the root with its children
(with pages of one token and ``SGLANG_NATIVE_MOVE_KV_CACHE=1``). The forms are checked against
SGLang's own kernels in Triton's interpreter (``test/srt/unit/cpu_standin/test_speculative.py``).

The attention of its passes is in ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any  # Any: functions of any kind, numbers and lists of them

import torch
from torch import Tensor

from .allocator import Launch


def edit(module: ModuleType) -> None:
    """After any of the modules of ``_FORMS``: replace its kernels by the CPU forms."""
    for name, form in _FORMS[module.__name__].items():
        setattr(module, name, form)


def _each(*tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    return zip(*(tensor.tolist() for tensor in tensors), strict=False)


def _only_chains(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError(
            f"--speculative-eagle-topk {topk} has no CPU form in the stand-in: use 1"
        )


# ---- speculative.spec_utils ----


def assign_rows(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, *sizes: int
) -> None:
    """Signature of SGLang's ``assign_req_to_token_pool``: puts ``slots`` into the rows ``rows`` of
    ``table``, for request i at ``start[i]:end[i]``."""
    at = 0
    for row, first, last in _each(rows, start, end):
        table[row, first:last] = slots[at : at + last - first].to(table.dtype)
        at += last - first


def _assign_draft_cache_locs(
    rows: Tensor,
    table: Tensor,
    lens: Tensor,
    extend_lens: Tensor,
    new_pages: Tensor,
    slots: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    last_page_lens: Tensor | None,
    duplicates: int,
    pool_len: int,
    topk: int,
    steps: int,
    *sizes: int,
) -> None:
    """Signature of SGLang's ``assign_draft_cache_locs``: ``steps`` slots behind each request."""
    _only_chains(topk)
    assign_rows(rows, table, lens, lens + steps, slots)


def _after_decode(
    ids: Tensor, lens: Tensor, accepted: Tensor, positions: Tensor, last: Tensor, *sizes: int
) -> None:
    """Signature of SGLang's ``create_extend_after_decode_spec_info``.

    The draft runs on the ``accepted[i]`` tokens that end at ``lens[i]``: writes their positions,
    and the last of the ids of each request.
    """
    at = 0
    for request, (length, count) in enumerate(_each(lens, accepted)):
        positions[at : at + count] = torch.arange(length - count, length)
        at += count
        last[request] = ids[at - 1]


def _align_evict_mask(lens: Tensor, evict: Tensor, page: int, drafts: int, *sizes: int) -> None:
    """Signature of SGLang's ``align_evict_mask_to_page_size``.

    Clears the slots of the last page that is kept: a page goes as a whole or not at all.
    """
    mask = evict.view(-1, drafts)
    for request, length in enumerate(lens.tolist()):
        kept = drafts - int(mask[request].sum())
        start = (length + kept - 1) // page * page - length
        mask[request, max(start, 0) : max(0, min(start + page, drafts))] = False


# ---- speculative.eagle_utils ----


def build_tree(
    parents: Tensor,
    scores: Tensor,
    lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    following: Tensor,
    siblings: Tensor,
    topk: int,
    steps: int,
    drafts: int,
    mask_mode: int = 0,
) -> None:
    """Signature of ``sgl_kernel.build_tree_kernel_efficient``, with a mask of all keys.

    Token j of request i is row ``i * drafts + j`` and sees the request and itself: in a chain also
    the drafts before it, in a tree of one step also the root.
    """
    _only_chains(topk if steps > 1 else 1)
    depth = torch.arange(drafts)
    index.copy_(torch.arange(index.numel()).view_as(index))
    seen = torch.ones(drafts, drafts, dtype=torch.bool).tril()
    if topk == 1:
        following[:, :-1] = depth[1:]
    else:
        following[:, 0] = 1
        siblings[:, 1:-1] = depth[2:]
        depth = depth.clamp(max=1)
        seen[:, 1:] = torch.eye(drafts, dtype=torch.bool)[:, 1:]
    positions.view(-1, drafts).copy_(lens[:, None] + depth)
    at = 0
    for length in lens.tolist():
        end = at + drafts * (length + drafts)
        mask[at:end].view(drafts, -1)[:, length:] = seen
        at = end


def verify_tree(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_predict: Tensor,
    topk: int = -1,
    **tree: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces ``verify_tree_greedy_func``: a draft is accepted as long as each of its tokens is
    the one that the target predicts for its position. ``tree``: index, next token and next sibling
    of each token; the releases spell these names differently."""
    _, following, siblings = tree.values()
    drafts = candidates.shape[1]
    rows = _each(candidates, target_predict, following, siblings)
    for request, (tokens, predicted, children, others) in enumerate(rows):
        node = count = 0
        while node >= 0:
            wanted, row = predicted[node], request * drafts + node
            predicts[row], accept_index[request, count] = wanted, row
            count, node = count + 1, children[node]
            while node >= 0 and tokens[node] != wanted:
                node = others[node]
        accept_token_num[request] = count - 1
    return predicts, accept_index, accept_token_num


# ---- speculative.eagle_info_v2: with overlap scheduling, slots are in the rows beforehand ----


def _assign_draft_cache_locs_page_size_1(
    rows: Tensor, table: Tensor, lens: Tensor, slots: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Signature of SGLang's: the ``steps`` slots behind each request, of any page size."""
    _only_chains(topk)
    slots.copy_(_behind(rows, table, lens, steps).flatten())


def _assign_extend_cache_locs_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> Tensor:
    """Signature of SGLang's: the slots of each request that its drafts are verified in."""
    slots = _behind(req_pool_indices, req_to_token, start_offset, draft_token_num)
    return slots.flatten().to(torch.int64)


def _behind(rows: Tensor, table: Tensor, lens: Tensor, count: int) -> Tensor:
    """The ``count`` slots behind ``lens`` of each of ``rows``: [requests, count]."""
    return table[rows[:, None], lens[:, None] + torch.arange(count)]


def _last_accepted(ids: Tensor, accepted: Tensor, last: Tensor, drafts: int, *sizes: int) -> None:
    """Signature of SGLang's ``fill_new_verified_id`` (0.5.23: ``fill_bonus_tokens_func``): the last
    accepted id of each request."""
    first = torch.arange(len(accepted)) * drafts
    last.copy_(ids.flatten()[first + accepted - 1])


# ---- SGLang 0.5.23: the same kernels, by other names ----


def _draft_cache_locs(
    rows: Tensor, table: Tensor, lens: Tensor, slots: Tensor, topk: int, steps: int, **outs: None
) -> None:
    """Signature of ``assign_draft_cache_locs_contiguous_func``."""
    slots.copy_(_behind(rows, table, lens, topk * steps).flatten())


def _front(counts: Tensor, slots: Tensor, front: Tensor) -> None:
    """Signature of ``fill_front_out_cache_loc_func``: the first ``counts[i]`` slots of each
    request, one request behind the other."""
    window = slots.view(len(counts), -1)
    found = torch.cat([window[request, :n] for request, n in enumerate(counts.tolist())])
    front[: len(found)] = found


def _accepted(index: Tensor, slots: Tensor, accepted: Tensor, size: int) -> None:
    """Signature of ``fill_accept_out_cache_loc_func``: the slots of the accepted drafts."""
    found = slots[index[index >= 0].long()]
    accepted[: len(found)] = found


def _gather(
    rows: Tensor, scores: Tensor, index: Tensor, tokens: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Signature of ``gather_spec_extras``: the rows of each."""
    return scores[rows], index[rows], tokens[rows], None if hidden is None else hidden[rows]


def _with_overlap(args: object) -> None:
    """Replaces ``_disable_overlap_schedule_for_cpu``: the form of ``gather_spec_extras`` is all
    that overlap scheduling lacks on a CPU."""


# ---- mem_cache.memory_pool ----


def _move_kv(
    pointers: Tensor, strides: Tensor, target: Tensor, source: Tensor, *sizes: Any, **options: int
) -> None:
    """Signature of SGLang's ``copy_all_layer_kv_cache_tiled``: a pool that serves speculation tries
    it once at its start, on one slot and itself. A chain of drafts moves no KV."""
    if not torch.equal(target, source):
        raise NotImplementedError("moving KV between slots has no CPU form in the stand-in")


_FORMS: dict[str, dict[str, Any]] = {
    "sglang.srt.speculative.spec_utils": {
        "assign_req_to_token_pool": Launch(assign_rows),
        "assign_draft_cache_locs": Launch(_assign_draft_cache_locs),
        "create_extend_after_decode_spec_info": Launch(_after_decode),
        "align_evict_mask_to_page_size": Launch(_align_evict_mask),
    },
    "sglang.srt.speculative.eagle_utils": {
        "sgl_build_tree_kernel_efficient": build_tree,
        "verify_tree_greedy_func": verify_tree,
    },
    "sglang.srt.speculative.eagle_info_v2": {
        "assign_draft_cache_locs_page_size_1": Launch(_assign_draft_cache_locs_page_size_1),
        "assign_extend_cache_locs_func": _assign_extend_cache_locs_func,
        "fill_new_verified_id": Launch(_last_accepted),
    },
    "sglang.srt.mem_cache.memory_pool": {"copy_all_layer_kv_cache_tiled": Launch(_move_kv)},
    # SGLang 0.5.23
    "sglang.kernels.ops.kvcache.cache_move": {"copy_all_layer_kv_cache_func": _move_kv},
    "sglang.kernels.ops.speculative.cache_locs": {
        "assign_draft_cache_locs_contiguous_func": _draft_cache_locs,
        "assign_extend_cache_locs_func": _assign_extend_cache_locs_func,
        "fill_front_out_cache_loc_func": _front,
    },
    "sglang.kernels.ops.speculative.eagle": {
        "fill_bonus_tokens_func": _last_accepted,
        "fill_accept_out_cache_loc_func": _accepted,
    },
    "sglang.kernels.ops.speculative.gather_spec_extras": {"gather_spec_extras": _gather},
    "sglang.kernels.ops.speculative.spec_tree": {
        "build_tree_kernel_efficient_func": build_tree,
        "verify_tree_greedy_func": verify_tree,
    },
    "sglang.srt.arg_groups.speculative_hook": {"_disable_overlap_schedule_for_cpu": _with_overlap},
    "sglang.srt.mem_cache.allocation": {"assign_req_to_token_pool_func": assign_rows},
}


# ---- attention of the draft model ----


def draft_backends(module: Any) -> None:
    """After ``draft_utils``: the backends of the draft model's steps."""
    factory = module.DraftBackendFactory
    stock_decode, stock_extend = factory.create_decode_backend, factory.create_draft_extend_backend

    def decode(made: Any) -> Any:
        if not _is_torch_native(made):
            return stock_decode(made)
        steps = made.speculative_num_steps
        return None if steps == 1 else DraftSteps(made.draft_model_runner, steps)

    def extend(made: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        if not _is_torch_native(made):
            return stock_extend(made)
        return TorchNativeAttnBackend(made.draft_model_runner)

    factory.create_decode_backend, factory.create_draft_extend_backend = decode, extend


def _is_torch_native(made: Any) -> bool:
    """Whether the draft model has that attention; ``made``: a ``DraftBackendFactory``."""
    chosen = made.draft_attn_backend or made.draft_model_runner.server_args.attention_backend
    return bool(chosen == "torch_native")


class DraftSteps:
    """Attention of the draft model's decode steps: the first draft token comes without one."""

    def __init__(self, runner: Any, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class DraftStep(TorchNativeAttnBackend):
            """One step. The batch keeps the lengths from before the first of them."""

            def __init__(self, step: int) -> None:
                super().__init__(runner)
                self.steps_ahead = step + 1  # read in ``attention.py``

        self.attn_backends = [DraftStep(step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to prepare."""

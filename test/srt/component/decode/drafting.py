"""A speculative decode step without models: SGLang's own verify input and batch, drafts at random.

The draft pool's slot i holds the tag of the tokens up to the one *behind* its own, as a draft model
computes it. A negative tag stands for KV that the draft model guessed in a step and that was not
recomputed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from component.decode import kv
from sglang.srt.disaggregation.delta.decode.request import is_fake, record_of

#: Content of draft slots between a draft and its verification, while they have no owner yet.
TRANSIENT = -9


def arguments(steps: int) -> dict[str, Any]:
    """Return the ``ServerArgs`` for ``steps`` draft steps."""
    if not steps:
        return {}
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


def send_start(metadata: Any, index: int, req: Any) -> None:
    """Write prefill's start of the first draft, which names its room here."""
    metadata.output_hidden_states[index, 0] = req.bootstrap_room
    metadata.output_topk_p[index, 0] = 1.0
    metadata.output_topk_index[index, 0] = req.bootstrap_room


def start_problems(req: Any) -> list[str]:
    """Return the violation if a request that waits for its batch lost its own start."""
    found = (int(req.hidden_states_tensor[0]), int(req.output_topk_index[0]))
    if found == (req.bootstrap_room, req.bootstrap_room):
        return []
    return [f"request {req.rid}: it would draft from the start of room {found}"]


def _ids(req: Any) -> list[int]:
    return list(req.origin_input_ids + req.output_ids)


def _tags(req: Any, ids: list[int]) -> list[int]:
    return kv.tags(ids, req.extra_key, weights=record_of(req).generation)


def step(decoder: Any, batch: Any, next_token: Any, accepted: Any) -> Any:
    """Draft, verify, and draft again from the accepted tokens, as SGLang's ``EAGLEWorker`` does."""
    # In its first step, also after a retraction, a request drafts from its prompt's start.
    for req, start in zip(batch.reqs, batch.spec_info.hidden_states[:, 0].tolist(), strict=True):
        goes_on = start == 0 and req.rid in decoder.drafted
        assert goes_on or start == req.bootstrap_room or is_fake(req)
    decoder.drafted = {req.rid for req in batch.reqs}
    verify, targets = _draft(decoder, batch, next_token, accepted)
    verify.prepare_for_verify(batch, decoder.page_size)
    batch.spec_info = verify
    starts = [req.kv_committed_len for req in batch.reqs]
    reqs, width = list(batch.reqs), decoder.steps + 1
    rows = [batch.out_cache_loc[at * width : (at + 1) * width] for at in range(len(reqs))]
    for at, req in enumerate(reqs):
        assert len(_ids(req)) == starts[at] + 1
        drafts = verify.draft_token.view(-1, width)[at].tolist()
        kv.write(decoder.pool, rows[at], _tags(req, [*_ids(req)[:-1], *drafts])[-width:])
    logits = torch.zeros(len(reqs) * width, 64)
    logits[torch.arange(len(logits)), targets.flatten()] = 1.0
    verify.hidden_states = torch.zeros(len(logits), 1)
    result = verify.verify(
        batch,
        SimpleNamespace(next_token_logits=logits),
        decoder.token_to_kv_pool_allocator,
        decoder.page_size,
    )
    for at, req in enumerate(reqs):
        count = req.kv_committed_len - starts[at]
        right = _tags(req, _ids(req))[starts[at] + 1 :]
        assert len(right) == count
        kv.write(decoder.draft_pool, rows[at][:count], [-tag for tag in right])
        if req.finished():
            decoder.guessed |= set(right)
        else:
            kv.write(decoder.draft_pool, rows[at][:count], right)
    batch.spec_info = result.draft_input
    _draft_again(decoder, batch)
    return SimpleNamespace(
        copy_done=None,
        logits_output=None,
        next_token_ids=result.verified_id,
        can_run_cuda_graph=False,
        num_accepted_tokens=sum(result.accept_length_per_req_cpu),
        accept_length_per_req_cpu=result.accept_length_per_req_cpu,
    )


def extend(batch: Any, tokens: list[int]) -> list[tuple[torch.Tensor, list[int]]]:
    """Run the draft model over a chunk of a prompt, as ``EAGLEWorker`` and ``EAGLEWorkerV2`` do:
    the token behind the chunk is the target's, ``tokens``, even if the prompt goes on.

    Leaves the start of the first draft in the batch. Return the draft slots with their new tags.
    """
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    rooms = [[float(req.bootstrap_room)] for req in batch.reqs]
    start = EagleDraftInput(
        topk_p=torch.ones(len(tokens), 1),
        topk_index=torch.tensor(rooms).to(torch.int64),
        hidden_states=torch.tensor(rooms),
        verified_id=torch.tensor(tokens),
        new_seq_lens=batch.seq_lens,
    )
    start.prepare_for_extend(batch)
    batch.spec_info = start
    writes, at = [], 0
    for req, begin, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        ids = [*req.origin_input_ids[: begin + 1], *batch.input_ids[at : at + length].tolist()]
        slots = batch.out_cache_loc[at : at + length].clone()
        writes.append((slots, _tags(req, ids)[begin + 1 :]))
        at += length
    return writes


def _draft(decoder: Any, batch: Any, next_token: Any, accepted: Any) -> tuple[Any, torch.Tensor]:
    """Return the verify input, and the target's tokens for each of its rows."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput
    from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient
    from sglang.srt.speculative.eagle_worker import EAGLEWorker

    steps = decoder.steps
    worker = SimpleNamespace(
        page_size=decoder.page_size,
        topk=1,
        speculative_num_steps=steps,
        extend_lens=None,
        num_new_pages_per_topk=None,
        token_to_kv_pool_allocator=decoder.token_to_kv_pool_allocator,
    )
    EAGLEWorker._draft_preprocess_decode(worker, batch)
    kv.write(decoder.draft_pool, batch.out_cache_loc, [TRANSIENT] * len(batch.out_cache_loc))
    assert len(batch.spec_info.topk_p) == len(batch.reqs)
    targets = torch.tensor([[next_token(req) for _ in range(steps + 1)] for req in batch.reqs])
    drafts = targets[:, :-1].clone()
    for at, req in enumerate(batch.reqs):
        right = accepted(req) % (steps + 1)
        drafts[at, right:] = (drafts[at, right:] + 1) % 64
    last = torch.tensor([req.output_ids[-1] for req in batch.reqs])
    assert last.tolist() == batch.spec_info.verified_id.tolist()
    shape = (1, steps, steps + 1)
    tree = build_tree_kernel_efficient(
        last, None, None, drafts, batch.seq_lens, batch.seq_lens_sum, *shape
    )
    mask, positions, index, following, siblings, tokens = tree
    verify = EagleVerifyInput(
        draft_token=tokens,
        custom_mask=mask,
        positions=positions,
        retrive_index=index,
        retrive_next_token=following,
        retrive_next_sibling=siblings,
        retrive_cum_len=None,
        spec_steps=steps,
        topk=1,
        draft_token_num=steps + 1,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
    )
    return verify, targets


def _draft_again(decoder: Any, batch: Any) -> None:
    """Set the batch's fields as ``forward_draft_extend_after_decode`` does."""
    draft = batch.spec_info
    if len(draft.verified_id) == 0:
        return
    kept = {name: getattr(batch, name) for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices")}
    draft.prepare_extend_after_decode(batch, decoder.steps)
    for name, value in kept.items():
        setattr(batch, name, value)
    count = len(draft.verified_id)
    draft.topk_p, draft.topk_index = torch.ones(count, 1), torch.zeros(count, 1, dtype=torch.int64)
    draft.hidden_states = torch.zeros(count, 1)

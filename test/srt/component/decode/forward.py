"""Forward passes of a decode scheduler's batches: the tag of each token instead of its KV."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from component.decode import drafting, kv, recurrent
from sglang.srt.disaggregation.delta.decode.request import record_of


class ForwardPasses:
    """Part of ``Decoder``."""

    pool: Any
    draft_pool: Any
    steps: int
    chunks: list[int]
    computed: dict[str, int]
    has_states: bool

    def tick_batch(self, next_token: Any = lambda req: 2, accepted: Any = lambda req: 1) -> None:
        """Run prebuilt batch, decode batch, forward pass and results.

        ``next_token``: the target's next token; ``accepted``: number of right drafts, limited to
        the number of drafts.
        """
        batch = self.get_next_disagg_decode_batch_to_run()
        self.last_batch = self.cur_batch = batch
        if batch is None:
            self.cur_batch = None
            return
        if batch.forward_mode.is_extend():
            self._run_chunk(batch, next_token)
            return
        running = list(batch.reqs)
        if self.steps:
            result = drafting.step(self, batch, next_token, accepted)
        else:
            result = self._forward(batch, next_token)
        self.process_batch_result_decode(batch, result)
        batch.filter_batch(v1_spec_info_filtered=True)
        self.cur_batch = None
        if batch.is_empty():
            self.last_batch = None
        for req in running:
            if req.finished():
                self.finished_texts.append(req.origin_input_ids + req.output_ids)

    def _forward(self, batch: Any, next_token: Any) -> Any:
        """Generate a token for each request of the batch."""
        for req, slot in zip(batch.reqs, batch.out_cache_loc, strict=True):
            token_ids = req.origin_input_ids + req.output_ids
            assert len(token_ids) == req.kv_committed_len
            values = kv.tags(token_ids, req.extra_key, weights=record_of(req).generation)
            kv.write(self.pool, slot[None], values[-1:])
            if self.has_states:
                recurrent.advance(self.req_to_token_pool, req)
        batch.output_ids = torch.tensor([next_token(req) for req in batch.reqs])
        return SimpleNamespace(
            copy_done=None,
            logits_output=None,
            next_token_ids=batch.output_ids,
            can_run_cuda_graph=False,
            num_accepted_tokens=0,
        )

    def _run_chunk(self, batch: Any, next_token: Any) -> None:
        """Compute a chunk, and process its result."""
        tokens = [next_token(req) for req in batch.reqs]
        self.chunk_of(batch)()
        if self.steps:
            for slots, values in drafting.extend(batch, tokens):
                kv.write(self.draft_pool, slots, values)
        result = self.chunk_result(tokens)
        reqs = list(batch.reqs)
        self.process_batch_result(batch, result)
        self.cur_batch = self.last_batch = None
        for req in reqs:
            if req.finished():
                self.finished_texts.append(req.origin_input_ids + req.output_ids)

    def chunk_of(self, batch: Any) -> Callable[[], None]:
        """Launch a chunk; the returned call fills only the slots of its requests' rows."""
        found, ends, at = [], {}, 0
        self.chunks.append(batch.extend_num_tokens)
        for req, start, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            slots = batch.out_cache_loc[at : at + length].clone()
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, start : start + length]
            assert torch.equal(slots, row.to(torch.int64))
            assert start >= req.cache_protected_len, "shared pages are never written"
            ids = req.origin_input_ids[: start + length]
            assert batch.input_ids[at : at + length].tolist() == ids[start:]
            values = kv.tags(ids, req.extra_key, weights=record_of(req).generation)
            found.append((slots, values[start:]))
            ends[req.rid] = start + length
            at += length
        assert at == len(batch.out_cache_loc)

        def end_of_chunk() -> None:
            for slots, values in found:
                kv.write(self.pool, slots, values)
            self.computed |= ends

        return end_of_chunk

    @staticmethod
    def chunk_result(tokens: list[int]) -> Any:
        """Return the result of a chunk's forward pass."""
        return SimpleNamespace(
            copy_done=None,
            logits_output=None,
            next_token_ids=torch.tensor(tokens),
            can_run_cuda_graph=False,
            extend_input_len_per_req=None,
            extend_logprob_start_len_per_req=None,
            delay_sample_func=None,
        )

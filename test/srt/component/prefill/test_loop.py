"""The input of decode's first draft, as a prefill scheduler sends it at the end of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from component.prefill.prefiller import Prefiller
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


class Ending(Prefiller):
    """Runs only the end of a batch, and records sends."""

    spec_algorithm = SpeculativeAlgorithm.EAGLE
    enable_overlap = True

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.sent: list[Any] = []

    def send_kv_chunk(self, req: Any, last_chunk: bool = False, end_idx: Any = None) -> None:
        assert last_chunk
        self.sent.append(req)

    def maybe_send_health_check_signal(self) -> None:
        """Do nothing: there are no health checks."""

    def report_prefill_stats(self, **stats: Any) -> None:
        """Do nothing: there is no log."""


@pytest.mark.parametrize("overlap", [True, False], ids=["v2", "v1"])
def test_a_prompt_brings_the_start_of_its_draft(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Guards against metadata with the start of another room's draft: with overlap scheduling
    SGLang's copy of the batch has lost it."""
    prefiller = Ending(monkeypatch)
    monkeypatch.setattr(prefiller.tree_cache, "cache_unfinished_req", lambda req: None)
    reqs = [
        Req(f"r{number}", "", [number] * 8, SamplingParams(max_new_tokens=1), vocab_size=64)
        for number in (3, 4)
    ]
    start = EagleDraftInput(
        topk_p=torch.tensor([[0.3], [0.4]]),
        topk_index=torch.tensor([[3], [4]]),
        hidden_states=torch.tensor([[3.0], [4.0]]),
    )
    batch = ScheduleBatch(
        reqs=reqs,
        spec_algorithm=prefiller.spec_algorithm,
        forward_mode=ForwardMode.EXTEND,
        return_logprob=False,
        spec_info=start,
    )
    result = GenerationBatchResult(next_token_ids=torch.tensor([1, 2]))
    if overlap:
        batch, result.next_draft_input = batch.copy(), start
        assert batch.spec_info is None
    prefiller.process_batch_result_disagg_prefill(batch, result)
    assert prefiller.sent == reqs
    for number, req in zip((3, 4), reqs, strict=True):
        assert req.output_topk_index.tolist() == [number]
        assert req.hidden_states_tensor.tolist() == [float(number)]

"""SGLang's own loops on a prefill scheduler: when the requests that came are taken, and what the
end of a batch sends for the first draft on decode."""

from __future__ import annotations

from types import SimpleNamespace
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


class Stop(Exception):
    """Ends a loop that goes on for ever."""


class Looping(Prefiller):
    """Writes down what its loop does, for two turns."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.did: list[str] = []
        self.rank.manager.rooms.scheduler_time = SimpleNamespace(
            turn=lambda: self.did.append("turn")
        )
        self.disagg_prefill_bootstrap_queue.pop_bootstrapped = list
        self.running_batch = SimpleNamespace(batch_is_full=False)
        self.waiting_queue: list[Any] = []
        self.chunked_req = self.last_batch = self.cur_batch = None
        self.enable_overlap = False

    def recv_requests(self) -> list[Any]:
        if self.did.count("requests") == 2:
            raise Stop
        return []

    def process_input_requests(self, requests: list[Any]) -> None:
        self.did.append("requests")

    def get_new_batch_prefill(self) -> None:
        self.did.append("batch")

    def maybe_prepare_mlp_sync_batch(self, batch: None) -> None:
        pass

    def self_check_during_idle(self) -> None:
        pass

    def launch_batch_sample_if_needed(self, result: None) -> None:
        pass


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_every_turn_counts_once(
    monkeypatch: pytest.MonkeyPatch, loop: str, is_paused: bool
) -> None:
    """Guards against a server whose rooms never age, against one whose time goes on before the
    requests that came were looked at, and against a pause that stops rooms which decode has
    announced: their requests are held back, and come when it ends."""
    prefiller = Looping(monkeypatch)
    prefiller._engine_paused = is_paused
    with pytest.raises(Stop):
        getattr(prefiller, f"event_loop_{loop}_disagg_prefill")()
    assert prefiller.did == ["requests", *["turn"] * (not is_paused), "batch"] * 2


class Ending(Prefiller):
    """Only the end of a batch; nothing is sent."""

    spec_algorithm = SpeculativeAlgorithm.EAGLE
    enable_overlap = True

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.sent: list[Any] = []

    def send_kv_chunk(self, req: Any, last_chunk: bool = False, end_idx: Any = None) -> None:
        assert last_chunk
        self.sent.append(req)

    def maybe_send_health_check_signal(self) -> None:
        """Nobody asks."""

    def report_prefill_stats(self, **stats: Any) -> None:
        """No log."""


@pytest.mark.parametrize("overlap", [True, False], ids=["v2", "v1"])
def test_a_prompt_brings_the_start_of_its_draft(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Guards against metadata that say where another room's draft starts: with overlap scheduling
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

"""SGLang's scheduler with the mode's subclass, over a real cache and without a model."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from component.buffer_only.cache import PAGE, Cache
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.buffer_only.scheduler import BufferOnlyScheduler
from sglang.srt.mem_cache.buffer_only.store_scheduler import StoreScheduler

#: Number of requests that may run at the same time.
PLACES = 9


class FormsABatch(Exception):
    """Raised when SGLang begins to choose requests for a batch."""


class Stock(Scheduler):
    """SGLang's scheduler with all methods that need no model."""

    chunked_req = last_batch = cur_batch = prefill_delayer = draft_worker = None
    enable_hierarchical_cache = is_generation = True
    enable_overlap = is_mixed_chunk = enable_priority_preemption = False
    disaggregation_mode, pp_size, page_size = DisaggregationMode.NULL, 1, PAGE
    chunked_prefill_size: int | None = None
    new_token_ratio = 1.0
    _pending_flush, _engine_paused = None, False

    def __init__(
        self, cache: Cache, running: int = 0, found_no_room: bool = False, **changes: Any
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.tree_cache, self.token_to_kv_pool_allocator = cache.tree, cache.allocator
        self.req_to_token_pool = SimpleNamespace(clear=lambda: None)
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(
            reqs=[request("running") for _ in range(running)],
            batch_is_full=found_no_room,
            is_empty=lambda: not self.running_batch.reqs,
        )
        self.grammar_manager = SimpleNamespace(
            has_waiting_grammars=lambda: False, grammar_queue=[], clear=lambda: None
        )
        self.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        self.session_controller = SimpleNamespace(maybe_reap=lambda now: None)
        self.idle_sleeper = SimpleNamespace(maybe_sleep=lambda: self.calls.update(["sleep"]))
        self.policy = SimpleNamespace(calc_priority=self._chooses)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.server_args = SimpleNamespace(enable_dp_attention=False)
        self.model_config = SimpleNamespace(
            is_multimodal=False, hf_config=SimpleNamespace(to_dict=dict)
        )
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Linear(2, 2)))
        self.tp_cpu_group = dist.group.WORLD
        self.offload_tags: set[str] = set()
        #: Messages to the tokenizer, and the batch that SGLang forms next.
        self.told: list[Any] = []
        self.send_to_tokenizer = SimpleNamespace(send_output=lambda out, _: self.told.append(out))
        self.batch: Any = None
        vars(self).update(changes)

    def _chooses(self, *_: Any) -> None:
        raise FormsABatch

    def get_new_batch_prefill(self) -> Any:
        try:
            return super().get_new_batch_prefill()
        except FormsABatch:
            return self.batch

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        return PLACES - running_bs

    def process_prefill_chunk(self) -> None: ...

    def maybe_prepare_mlp_sync_batch(self, batch: Any) -> Any:
        return batch

    def reset_metrics(self) -> None: ...

    def run_event_loop(self) -> None:
        self.calls["ran"] += 1

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        return batch

    def process_batch_result(self, batch: Any, result: Any) -> None:
        self.calls["result"] += 1

    def release_memory_occupation(self, recv_req: Any) -> None:
        assert self.is_fully_idle()
        self.calls["released"] += 1

    def handle_generate_request(self, recv_req: Any) -> None:
        self.init_req_max_new_tokens(recv_req.req)
        self._add_request_to_queue(recv_req.req)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self._prefetch_kvcache(req)

    def init_req_max_new_tokens(self, req: Any) -> None: ...

    def update(self, recv_req: Any) -> Any:
        """Update the weights, in place of SGLang's four methods."""
        with torch.no_grad():
            self.tp_worker.model_runner.model.weight += 1
        return recv_req

    update_weights_from_disk = update_weights_from_distributed = update
    update_weights_from_tensor = update_weights_from_ipc = update


class Server(BufferOnlyScheduler, StoreScheduler, Stock):
    """The scheduler with the mode's subclass."""


def request(rid: str, tokens: Any = (), **changes: Any) -> Any:
    """Return a request with the fields of SGLang's ``Req`` that the mode reads."""
    fields = {
        "rid": rid, "origin_input_ids": list(tokens), "output_ids": [], "extra_key": None,
        "lora_id": None, "return_logprob": False, "logprob_start_len": -1,
        "multimodal_inputs": None, "retracted_stain": False, "cached_tokens_device": 0,
        "cached_tokens_host": 0, "cached_tokens_storage": 0,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)

"""A prefill scheduler without a model: SGLang's in-flight queue, tree and pools, as patched, on a
prefill rank with an agent that copies between numpy memories on a test's command."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from component.decode import kv
from component.decode.peer import Mailbox
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.prefill import (
    PrefillBootstrapQueue,
    SchedulerDisaggregationPrefillMixin,
)
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator, TransferBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from unit.delta.nixl.prefill_rank import PrefillRank
from unit.delta.nixl.sides import PAGE

PAGES, SLOTS = 39, 5
GARBAGE = 77


class Prefiller(SchedulerDisaggregationPrefillMixin, SchedulerPPMixin):  # type: ignore[misc]
    """One rank of a prefill server."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        args = ServerArgs(
            model_path="dummy", page_size=PAGE, attention_backend="torch_native", device="cpu"
        )
        set_global_server_args_for_scheduler(args)
        self.rank = PrefillRank(patch)
        _, self.token_to_kv_pool_allocator = kv.build_pool(PAGES * PAGE, PAGE)
        self.req_to_token_pool = ReqToTokenPool(8, 256, "cpu", False)
        self.tree_cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=PAGE,
            )
        )
        self.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(SLOTS)
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=lambda req: None)
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=self.rank.manager)
        self.disagg_prefill_inflight_queue: list[Any] = []
        self.enable_metrics, self.tp_rank, self.pp_rank = False, 0, 0
        self.mailbox = Mailbox()
        self.attn_cp_cpu_group = self.attn_tp_cpu_group = dist.group.WORLD

    def open_bootstrap_queue(self) -> None:
        """Add SGLang's queue of requests that wait for their announcement."""
        queue: Any = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
        queue.__dict__.update(
            queue=[],
            kv_manager=self.rank.manager,
            scheduler=self,
            tp_rank=0,
            pp_rank=0,
            bootstrap_port=8998,
            max_total_num_tokens=1000,
            transfer_backend=TransferBackend.NIXL,
            token_to_kv_pool=SimpleNamespace(page_size=PAGE),
            req_to_metadata_buffer_idx_allocator=self.req_to_metadata_buffer_idx_allocator,
        )
        self.disagg_prefill_bootstrap_queue = queue

    def stream_output(self, reqs: list[Any], *arguments: Any) -> None:
        """Record the client's answer."""
        self.mailbox.stream(reqs)

    # ---- a request ----

    def prefill(self, room: int, tokens: int, target: list[int], slot: int = 0) -> Any:
        """Compute and queue a request of ``tokens`` tokens; decode announces ``target``."""
        req = self.request(room, tokens)
        req.metadata_buffer_index = self.req_to_metadata_buffer_idx_allocator.alloc()
        self.rank.announce(room, target, slot=slot)
        req.disagg_kv_sender.init(-(-tokens // PAGE), req.metadata_buffer_index)
        self.compute(req)
        return req

    def request(self, room: int, tokens: int) -> Any:
        """Return a new request of ``tokens`` tokens."""
        req = Req(
            f"r{room}", "", [room] * tokens, SamplingParams(max_new_tokens=1), bootstrap_room=room,
            eos_token_ids=set(), vocab_size=64,
        )  # fmt: skip
        req.sampling_params.normalize(None)
        req.disagg_kv_sender = self.rank.sender(room)
        return req

    def compute(self, req: Any) -> None:
        """Compute an announced request in one step, and queue it."""
        tokens = len(req.origin_input_ids)
        req.init_next_round_input(self.tree_cache)
        assert len(req.prefix_indices) == 0
        self.tree_cache.inc_lock_ref(req.last_node)
        self.req_to_token_pool.alloc([req])
        slots = self.token_to_kv_pool_allocator.alloc(-(-tokens // PAGE) * PAGE)
        self.req_to_token_pool.write((req.req_pool_idx, slice(0, tokens)), slots[:tokens])
        req.kv_committed_len = req.kv_allocated_len = tokens
        req.output_ids.append(1)
        self.tree_cache.cache_unfinished_req(req)
        self.disagg_prefill_inflight_queue.append(req)
        self.send_kv_chunk(req, last_chunk=True)

    def expected(self, req: Any, target: list[int], slot: int = 0) -> list[np.ndarray]:
        """Return decode's buffers as they are after the whole request has arrived."""
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        pages = (row[0 : len(req.origin_input_ids) : PAGE] // PAGE).tolist()
        ours, theirs = self.rank.side, self.rank.decode["decode"]
        found = [view.copy() for _, view in (*theirs.kv, *theirs.metadata)]
        for into, (_, source) in zip(found, (*ours.kv, *ours.metadata), strict=True):
            is_metadata = len(source) == SLOTS
            into[slot if is_metadata else target] = source[
                req.metadata_buffer_index if is_metadata else pages
            ]
        return found

    def arrived(self) -> list[np.ndarray]:
        """Return decode's buffers."""
        theirs = self.rank.decode["decode"]
        return [view for _, view in (*theirs.kv, *theirs.metadata)]

    # ---- the scheduler ----

    def turn(self) -> list[int]:
        """Check the requests in flight once; return the rooms that ended."""
        return [req.bootstrap_room for req in self.process_disagg_prefill_inflight_queue()]

    def turn_of_a_stage(self) -> list[int]:
        """Check as a pipeline stage does, which gets the ids that may end from the other stages."""
        ended = self.get_rids(
            self.disagg_prefill_inflight_queue, True, [KVPoll.Success, KVPoll.Failed]
        )
        return [req.bootstrap_room for req in self.process_disagg_prefill_inflight_queue(ended)]

    def overwrite_what_is_free(self) -> None:
        """Overwrite all free or evictable pages and metadata slots, as other requests would."""
        self.tree_cache.evict(EvictParams(num_tokens=PAGES * PAGE))
        allocator = self.token_to_kv_pool_allocator
        slots = allocator.alloc(allocator.available_size())
        taken = sorted(set((slots // PAGE).tolist()))
        for _, view in self.rank.side.kv:
            view[taken] = GARBAGE
        allocator.free(slots)
        for _, view in self.rank.side.metadata:
            view[list(self.req_to_metadata_buffer_idx_allocator.free_slots)] = GARBAGE

    def free(self) -> tuple[int, int, int]:
        """Return free and evictable tokens, free rows and metadata slots: equal on all ranks."""
        return (
            self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size(),
            self.req_to_token_pool.available_size(),
            self.req_to_metadata_buffer_idx_allocator.available_size(),
        )

    def check_idle(self) -> None:
        """Check that everything is free, and that no room is left."""
        assert self.free() == (PAGES * PAGE, 8, SLOTS), self.free()
        assert self.disagg_prefill_inflight_queue == [] and torch.is_tensor(
            self.req_to_token_pool.req_to_token
        )
        self.rank.check()

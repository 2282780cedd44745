"""Two more arms: steps in which a request ends, without and with decode's writes to a store.

The time that a write costs the scheduler's thread depends on keys, pages and nodes. The store
accepts every page and keeps none, on its own thread.
"""

from __future__ import annotations

import json
import time
from typing import Any  # Any: SGLang's requests and arguments have no types
from unittest import mock

import torch.distributed as dist

from benchmark.admission.arms import PROMPT, PROMPTS, VOCABULARY, Arm, Load, Ours
from benchmark.harness import without_engine
from sglang.srt.disaggregation.delta.decode.offload import ROUND_INTERVAL_STEPS, TREE
from sglang.srt.disaggregation.delta.decode.request import Stage, record_of
from sglang.srt.disaggregation.delta.decode.tree import PrefixLease, tree_nodes
from sglang.srt.disaggregation.policy.memory import page_ceil
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.patchset import status
from sglang.srt.server_args import get_global_server_args

#: Tokens of an answer.
ANSWER = 256
#: Milliseconds that the agreed clock advances in a decode step, so that stored pages are looked up
#: as often as on a server.
STEP_MS = 20
#: Pages of the staging buffer.
STAGING = 1024


class Discarding(HiCacheStorage):
    """A store that accepts every page, claims to have every page, and keeps none."""

    def __init__(self, config: Any = None, more: Any = None) -> None:
        pass

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError("decode reads nothing")

    get = batch_get = set = batch_set = exists = batch_get_v1


class Without(Ours):
    """One more request is running; prefill has delivered its prompt. It ends in the timed step."""

    def between(self) -> None:
        """Prepare the ending request: its answer is complete, and room for it has been evicted."""
        self._inserted += 1
        number = self.load.running + PROMPTS + self._inserted
        prompt = self.load.prompt(number)
        self.ending = req = without_engine.request(number, prompt, 4_000, VOCABULARY)
        record_of(req).stage = Stage.TRANSFER
        lease, whole = PrefixLease.take(self.tree, prompt, None), PROMPT + ANSWER
        slots = self.tree.allocate(page_ceil(whole, self.load.page) - lease.length)
        new_tokens, claims = PROMPT - lease.length, self.tree.claims
        lease.bind(self.rows, req, slots[:new_tokens])
        claims.entered(req, lease.node, lease.length, PROMPT)
        self.tree.adopt(req)
        claims.started(req)
        self.rows.write(
            (req.req_pool_idx, slice(PROMPT, whole)), slots[new_tokens : new_tokens + ANSWER]
        )
        req.output_ids = [(number + index * 13) % VOCABULARY for index in range(ANSWER + 1)]
        req.kv_allocated_len = req.kv_committed_len = whole
        Arm.between(self)

    def step(self) -> float:
        began = time.thread_time_ns()
        release_kv_cache(self.ending, self.tree)
        self._drive()
        return (time.thread_time_ns() - began) / 1e3 + super().step()

    def _drive(self) -> None:
        """Run the scheduler's work that precedes admission."""


class With(Without):
    """The same, and new nodes of the tree are written to the store."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        args, self._steps = get_global_server_args(), 0
        args.hicache_host_memory_mode, args.hicache_buffer_pages = "buffer_only", STAGING
        args.hicache_mem_layout, args.hicache_io_backend = "page_first_direct", "direct"
        args.hicache_storage_backend = "dynamic"
        args.hicache_storage_backend_extra_config = json.dumps(
            {"backend_name": "discarding", "module_path": __name__, "class_name": "Discarding"}
        )
        assert status.attachment is not None, "SGLang is patched"
        status.attachment.equip(TREE, self.tree, args)
        ranks = {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
            "is_dp_attention_enabled": lambda: False,
        }
        with mock.patch.multiple(cache_controller, **ranks):
            self.tree.write_to_store(args, dist.group.WORLD)
        for node in tree_nodes(self.tree):  # prefill has stored these
            node.stored = node.launched = len(node.key)

    def between(self) -> None:
        """Wait for the store as well, because a decode step takes longer than its calls."""
        super().between()
        buffer = self.tree.buffer
        buffer.context.now_ms += STEP_MS
        while any(run.job is not None and run.job.pages < 0 for run in buffer.backups.running):
            time.sleep(0.0001)

    def _drive(self) -> None:
        self._steps += 1
        if self._steps % ROUND_INTERVAL_STEPS == 0:
            self.tree.advance()

"""A decode server's queues, pools, tree and requests, of SGLang's own classes, without an engine.

For ``benchmark.admission`` and the component tests: no model runs and no socket is opened.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
from sglang.srt.disaggregation.utils import (
    MetadataBuffers,
    ReqToMetadataIdxAllocator,
    TransferBackend,
)
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def set_arguments(page: int, **changes: Any) -> Any:
    """Return a decode server's arguments, and set them for the whole process as SGLang does."""
    arguments = ServerArgs(
        model_path="dummy",
        page_size=page,
        disaggregation_mode="decode",
        disaggregation_transfer_backend="nixl",
        attention_backend="torch_native",
        device="cpu",
        **changes,
    )
    set_global_server_args_for_scheduler(arguments)
    return arguments


def build_pool(
    tokens: int, page: int, dtype: Any, layers: int, *, latent: bool = False, sparse: bool = False
) -> tuple[Any, Any]:
    """Return a pool with one head of one element a token, and its allocator, on the CPU.

    ``latent``: an equally small pool of an MLA model. ``sparse``: that with an index of sparse
    attention, in pages of 64.
    """
    off: dict[str, Any] = {"enable_memory_saver": False}
    if sparse:
        off |= {"index_head_dim": 128, "kv_cache_dim": 2}
        pool = NSATokenToKVPool(tokens, page, 1, dtype, 1, layers, "cpu", **off)
    else:
        kind = MLATokenToKVPool if latent else MHATokenToKVPool  # widths: latent and rope, or heads
        pool = kind(tokens, page, dtype, 1, 1, layers, "cpu", **off)
    if page == 1:
        return pool, TokenToKVPoolAllocator(tokens, dtype, "cpu", pool, True)
    return pool, PagedTokenToKVPoolAllocator(tokens, page, dtype, "cpu", pool, True)


def build_tree(rows: Any, allocator: Any, page: int, policy: str = "lru", **more: Any) -> Any:
    """Return the tree of a decode scheduler with the radix flag, before it serves decode."""
    return scheduler.RadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            eviction_policy=policy,
            **more,
        )
    )


def request(number: int, tokens: list[int], new: int, vocabulary: int, **fields: Any) -> Any:
    """Return a greedy request for ``new`` tokens, in room ``1000 + number`` of a prefill server."""
    prefill = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998}
    req = Req(
        f"r{number:05d}",
        "",
        tokens,
        SamplingParams(max_new_tokens=new, temperature=0.0),
        bootstrap_room=1000 + number,
        eos_token_ids=set(),
        vocab_size=vocabulary,
        **prefill | fields,
    )
    req.sampling_params.normalize(None)
    return req


def build_queues(
    owner: Any,
    *,
    tree: Any,
    rows: Any,
    pool: Any,
    allocator: Any,
    metadata_slots: int,
    reserve: int,
    group: Any,
    manager: Any,
    spec_algorithm: Any = SpeculativeAlgorithm.NONE,
) -> Any:
    """Give ``owner``, a scheduler or its stub, its queues. Return the preallocation queue.

    ``reserve``: tokens reserved for a running request. ``group``: the ranks that step together.
    ``manager``: stub of the backend's manager.
    """
    shared: dict[str, Any] = {
        "scheduler": owner,
        "tree_cache": tree,
        "gloo_group": group,
        "tp_rank": 0,
        "req_to_metadata_buffer_idx_allocator": ReqToMetadataIdxAllocator(metadata_slots),
        "metadata_buffers": MetadataBuffers(metadata_slots, 1, torch.float32),
        "enable_staging": False,
    }
    transfers = DecodeTransferQueue.__new__(DecodeTransferQueue)
    transfers.__dict__.update(shared, queue=[], spec_algorithm=spec_algorithm, staging_handler=None)
    prealloc = DecodePreallocQueue.__new__(DecodePreallocQueue)
    prealloc.__dict__.update(
        shared,
        queue=[],
        retracted_queue=[],
        pending_reqs=[],
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=None,
        transfer_queue=transfers,
        num_reserved_decode_tokens=reserve,
        max_total_num_tokens=allocator.size,
        transfer_backend=TransferBackend.NIXL,
        kv_manager=manager,
        _ensure_retry_count={},
        _ensure_last_attempt_time={},
        _ensure_retry_interval=0.0,
        _max_ensure_retries=10**9,
    )
    owner.disagg_decode_prealloc_queue = prealloc
    owner.disagg_decode_transfer_queue = transfers
    return prealloc

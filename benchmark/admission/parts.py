"""What both arms are built of: real pools, requests and metadata slots; a prefill that is quiet.

Nothing here moves KV, runs a model or opens a socket.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 50_000
LAYERS = 1
#: What a running request reserves, SGLang's default.
RESERVE = 512


@dataclass(frozen=True)
class Load:
    """One decode server: ``prompt`` tokens a request, in ``depth`` tree nodes of which the last is
    its own; ``trunks`` prefixes that requests share."""

    page: int
    running: int
    queued: int = 64
    prompt: int = 10_000
    depth: int = 40
    trunks: int = 16

    @property
    def node(self) -> int:
        """Tokens of one node of a trunk, whole pages."""
        return max(self.prompt // self.depth // self.page, 1) * self.page

    @property
    def shared(self) -> int:
        """Tokens of a trunk."""
        return self.node * (self.depth - 1)

    @property
    def tail(self) -> int:
        """Tokens of a prompt that are its own, in whole pages."""
        return -(-(self.prompt - self.shared) // self.page) * self.page

    def trunk(self, number: int) -> list[int]:
        """A shared prefix."""
        return [(number * 7_919 + at * 31) % VOCABULARY for at in range(self.shared)]

    def tokens(self, number: int) -> list[int]:
        """The prompt of request ``number``."""
        own = [(number * 104_729 + at * 17 + 1) % VOCABULARY for at in range(self.prompt)]
        return self.trunk(number % self.trunks) + own[self.shared :]


class Room:
    """A receiver whose handshake is done; nothing is ever written."""

    require_staging = False

    def __init__(self) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self._state = KVPoll.WaitingForInput

    def poll(self) -> Any:
        """Waiting for its pages."""
        return self._state

    def send_metadata(self, pages: Any, index: int, state_indices: Any = None) -> None:
        """Stock's announcement."""

    def announce(self, pages: Any, index: int, prefix_len: int) -> None:
        """Ours."""

    def clear(self) -> None:
        """The room is forgotten."""


def request(load: Load, number: int, new: int = 4_000) -> Any:
    """Request ``number`` as the queues hold it."""
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.delta.decode.record import record_of
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        f"r{number:05d}",
        "",
        load.tokens(number),
        SamplingParams(max_new_tokens=new),
        bootstrap_host="10.0.0.1",
        bootstrap_port=8998,
        bootstrap_room=1000 + number,
        eos_token_ids=set(),
        vocab_size=VOCABULARY,
    )
    req.sampling_params.normalize(None)
    entry = DecodeRequest(req=req, kv_receiver=Room(), waiting_for_input=True)
    record_of(req).wait.since = time.monotonic()  # ours notes when a handshake was done
    return entry


def build_pool(tokens: int, page: int) -> tuple[Any, Any]:
    """A pool of a few bytes a token and its allocator, on the CPU."""
    from sglang.srt.mem_cache.allocator import (
        PagedTokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        tokens, page, torch.float16, 1, 1, LAYERS, "cpu", enable_memory_saver=False
    )
    if page == 1:
        return pool, TokenToKVPoolAllocator(tokens, torch.float16, "cpu", pool, True)
    return pool, PagedTokenToKVPoolAllocator(tokens, page, torch.float16, "cpu", pool, True)


def scheduler(load: Load) -> Any:
    """The part of a scheduler that admission reads."""
    from sglang.srt.disaggregation.delta.decode.scheduler import DecodeMetrics
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return SimpleNamespace(
        running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
        waiting_queue=[],
        last_batch=None,
        enable_metrics=False,
        enable_hisparse=False,
        server_args=SimpleNamespace(disaggregation_transfer_backend="nixl"),
        decode_metrics=DecodeMetrics(),
        model_config=SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False),
        stream_output=lambda *arguments: None,
    )


def queues(load: Load, owner: Any, tree: Any, rows: Any, pool: Any, allocator: Any) -> Any:
    """A prealloc queue of this environment's class, with its transfer queue; not handshaken."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
    from sglang.srt.disaggregation.utils import (
        MetadataBuffers,
        ReqToMetadataIdxAllocator,
        TransferBackend,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    slots = load.queued + load.running + 8
    shared: dict[str, Any] = {
        "scheduler": owner,
        "tree_cache": tree,
        "gloo_group": dist.group.WORLD,
        "tp_rank": 0,
        "req_to_metadata_buffer_idx_allocator": ReqToMetadataIdxAllocator(slots),
        "metadata_buffers": MetadataBuffers(slots, 1, torch.float32),
        "enable_staging": False,
    }
    transfers = DecodeTransferQueue.__new__(DecodeTransferQueue)
    transfers.__dict__.update(
        shared, queue=[], spec_algorithm=SpeculativeAlgorithm.NONE, staging_handler=None
    )
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
        num_reserved_decode_tokens=RESERVE,
        max_total_num_tokens=allocator.size,
        transfer_backend=TransferBackend.NIXL,
        kv_manager=SimpleNamespace(
            kv_args=SimpleNamespace(kv_item_lens=[2 * load.page] * 2 * LAYERS),
            peer_takes_delta=lambda address: True,
        ),
    )
    owner.disagg_decode_prealloc_queue = prealloc
    owner.disagg_decode_transfer_queue = transfers
    return prealloc


def request_rows(load: Load) -> Any:
    """The request-to-slot table."""
    from sglang.srt.disaggregation.decode import DecodeReqToTokenPool

    rows = load.running + load.queued + 8
    return DecodeReqToTokenPool(rows, load.prompt + 6_000, "cpu", False, 8)


def decode_once(reqs: Sequence[Any]) -> None:
    """What a decode step does to its requests' counts; their KV is of no interest here."""
    for req in reqs:
        req.kv_allocated_len += 1
        req.kv_committed_len += 1


def set_page(page: int) -> None:
    """The server's arguments, which SGLang keeps for the whole process."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs(
        model_path="dummy",
        page_size=page,
        disaggregation_mode="decode",
        disaggregation_transfer_backend="nixl",
        attention_backend="torch_native",
        device="cpu",
    )
    set_global_server_args_for_scheduler(arguments)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """The process group of a server with one rank."""
    torch.set_num_threads(1)
    # Nobody is told that it waits, or for too long, while this measures.
    for name in ("_DECODE_WAIT_LOG", "_DECODE_ADMISSION_TIMEOUT"):
        os.environ[f"SGLANG_DISAGGREGATION{name}"] = "1000000"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

"""What both arms are built of: real pools, requests and metadata slots; a prefill that is quiet.

Nothing here moves KV, runs a model or opens a socket.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmark.harness import without_engine
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool, DecodeRequest
from sglang.srt.disaggregation.delta.decode.record import Stage, record_of
from sglang.srt.disaggregation.delta.observability import Telemetry
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.server_args import get_global_server_args

VOCABULARY = 50_000
LAYERS = 1
#: What a running request reserves, SGLang's default.
RESERVE = 512
#: Prompts of a line that differ.
PROMPTS = 64


@dataclass(frozen=True)
class Load:
    """One decode server: ``prompt`` tokens a request, in ``depth`` tree nodes of which the last is
    its own; ``trunks`` prefixes that requests share. Behind the first ``PROMPTS`` in line prompts
    repeat: nobody looks at them."""

    page: int
    running: int
    queued: int = 64
    #: How many in line have the same prompt. More than one: the first of each is in transfer.
    copies: int = 1
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
        if number >= self.running:
            number = self.running + (number - self.running) // self.copies % PROMPTS
        return self._prompt(number)

    @lru_cache(maxsize=1024)  # noqa: B019, a load is as good as a module's constant
    def _prompt(self, number: int) -> list[int]:
        own = [(number * 104_729 + at * 17 + 1) % VOCABULARY for at in range(self.prompt)]
        return self.trunk(number % self.trunks) + own[self.shared :]


class Room:
    """A receiver whose handshake is done; nothing is ever written."""

    require_staging = False

    def __init__(self) -> None:
        self._state = KVPoll.WaitingForInput

    def poll(self) -> Any:
        """Waiting for its pages."""
        return self._state

    def send_metadata(self, pages: Any, index: int, state_indices: Any = None) -> None:
        """Stock's announcement."""

    def announce(self, pages: Any, index: int, prefix_len: int, state: Any = None) -> None:
        """Ours."""

    def clear(self) -> None:
        """The room is forgotten."""


def request(load: Load, number: int, new: int = 4_000) -> Any:
    """Request ``number`` as the queues hold it."""
    req = without_engine.request(number, load.tokens(number), new, VOCABULARY)
    entry = DecodeRequest(req=req, kv_receiver=Room(), waiting_for_input=True)
    record = record_of(req)  # as ours notes when a handshake was done
    record.stage, record.wait.since = Stage.IN_LINE, time.monotonic()
    return entry


def build_pool(tokens: int, page: int) -> tuple[Any, Any]:
    """A pool of a few bytes a token and its allocator, on the CPU."""
    return without_engine.build_pool(tokens, page, torch.float16, LAYERS)


def scheduler() -> Any:
    """The part of a scheduler that admission reads."""
    return SimpleNamespace(
        running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
        waiting_queue=[],
        last_batch=None,
        enable_metrics=False,
        enable_hisparse=False,
        server_args=get_global_server_args(),
        telemetry=Telemetry(),
        model_config=SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False),
        stream_output=lambda *arguments: None,
    )


def queues(load: Load, owner: Any, tree: Any, rows: Any, pool: Any, allocator: Any) -> Any:
    """A prealloc queue of this environment's class, with its transfer queue; not handshaken."""
    return without_engine.build_queues(
        owner,
        tree=tree,
        rows=rows,
        pool=pool,
        allocator=allocator,
        metadata_slots=PROMPTS + load.running + 8,
        reserve=RESERVE,
        group=dist.group.WORLD,
        manager=SimpleNamespace(
            servers=SimpleNamespace(
                connections=SimpleNamespace(forget_unwanted=lambda addresses: None)
            ),
            kv_args=SimpleNamespace(kv_item_lens=[2 * load.page] * 2 * LAYERS, state_item_lens=[]),
            peer_takes_delta=lambda address: True,
            waiting_timeout=300,
        ),
    )


def request_rows(load: Load) -> Any:
    """The request-to-slot table."""
    rows = load.running + PROMPTS + 8
    return DecodeReqToTokenPool(rows, load.prompt + 6_000, "cpu", False, 8)


def decode_once(reqs: Sequence[Any]) -> None:
    """What a decode step does to its requests' counts; their KV is of no interest here."""
    for req in reqs:
        req.kv_allocated_len += 1
        req.kv_committed_len += 1


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """The process group of a server with one rank."""
    torch.set_num_threads(1)
    # Nobody is told that it waits, or for too long, while this measures.
    for name in ("WAIT_LOG", "ADMISSION_TIMEOUT", "PREFIX_WAIT_TIMEOUT"):
        os.environ[f"SGLANG_DISAGGREGATION_DECODE_{name}"] = "1000000"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

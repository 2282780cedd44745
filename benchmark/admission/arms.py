"""The two arms: our admission queue with its tree, and the stock queue that it is derived from.

Both use real pools, requests and metadata slots, and a stub prefill server: no KV is moved, no
model runs and no socket is opened.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any  # Any: SGLang's queues, trees and requests have no types

import torch
import torch.distributed as dist

from benchmark.harness import without_engine
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool, DecodeRequest
from sglang.srt.disaggregation.delta.decode.request import Stage, record_of
from sglang.srt.disaggregation.delta.observability import Telemetry
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.server_args import get_global_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VOCABULARY = 50_000
LAYERS = 1
#: Tokens reserved for a running request: SGLang's default.
RESERVE = 512
#: Tokens of a prompt.
PROMPT = 10_000
#: Number of prefixes that requests share.
TRUNKS = 16
#: Distinct prompts in the queue. Later requests repeat them, because no step matches that many.
PROMPTS = 64
#: Requests that the pool has room for beyond the running ones.
SPARE_REQUESTS = 80


@dataclass(frozen=True)
class Load:
    """One decode server. A prompt is in ``depth`` tree nodes; only the last one is not shared."""

    page: int
    running: int
    queued: int = 64
    depth: int = 40

    @property
    def node(self) -> int:
        """Tokens of one node of a shared prefix, in whole pages."""
        return max(PROMPT // self.depth // self.page, 1) * self.page

    @property
    def shared(self) -> int:
        """Tokens of a shared prefix."""
        return self.node * (self.depth - 1)

    @property
    def tail(self) -> int:
        """Tokens of a prompt behind its shared prefix, in whole pages."""
        return -(-(PROMPT - self.shared) // self.page) * self.page

    def trunk(self, number: int) -> list[int]:
        """Return a shared prefix."""
        return [(number * 7_919 + index * 31) % VOCABULARY for index in range(self.shared)]

    def request(self, number: int) -> Any:
        """Return request ``number`` as an entry of the queues."""
        prompt_number = number
        if number >= self.running:
            prompt_number = self.running + (number - self.running) % PROMPTS
        req = without_engine.request(number, self.prompt(prompt_number), 4_000, VOCABULARY)
        record = record_of(req)  # the state that our queue records after the handshake
        record.stage, record.wait.since = Stage.IN_LINE, time.monotonic()
        return DecodeRequest(req=req, kv_receiver=Room(), waiting_for_input=True)

    @lru_cache(maxsize=1024)  # noqa: B019, loads live as long as the process
    def prompt(self, number: int) -> list[int]:
        tokens = [(number * 104_729 + index * 17 + 1) % VOCABULARY for index in range(PROMPT)]
        return self.trunk(number % TRUNKS) + tokens[self.shared :]


class Room:
    """A receiver that has finished its handshake and never receives data."""

    require_staging = False

    def poll(self) -> Any:
        """Return the status of a room that waits for its pages."""
        return KVPoll.WaitingForInput

    def _nothing(self, *arguments: Any, **named: Any) -> None:
        pass

    send_metadata = announce = clear = _nothing


class Arm:
    """One server with a full queue. Only ``step`` is timed."""

    #: Free tokens that a request needs to be admitted.
    entry: int
    queue: Any
    tree: Any

    def __init__(self, load: Load, tokens: int) -> None:
        self.load = load
        tokens = -(-tokens // load.page) * load.page  # of a few bytes
        self.pool, self.allocator = without_engine.build_pool(
            tokens, load.page, torch.float16, LAYERS
        )
        rows = load.running + PROMPTS + 8
        self.rows = DecodeReqToTokenPool(rows, PROMPT + 6_000, "cpu", False, 8)
        # The part of a scheduler that admission reads.
        self.owner: Any = SimpleNamespace(
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
        #: Whole prompts that the last step matched against the tree.
        self.matches = 0
        #: Slots that keep the pool full.
        self._ballast = torch.empty(0, dtype=torch.int64)
        self._admitted: list[Any] = []

    def build_queue(self) -> Any:
        """Return this environment's queue over ``tree``, with its transfer queue, no handshakes."""
        connections = SimpleNamespace(forget_unwanted=lambda addresses: None)
        queue = without_engine.build_queues(
            self.owner,
            tree=self.tree,
            rows=self.rows,
            pool=self.pool,
            allocator=self.allocator,
            metadata_slots=PROMPTS + self.load.running + 8,
            reserve=RESERVE,
            group=dist.group.WORLD,
            manager=SimpleNamespace(
                servers=SimpleNamespace(connections=connections),
                kv_args=SimpleNamespace(
                    kv_item_lens=[2 * self.load.page] * 2 * LAYERS, state_item_lens=[]
                ),
                peer_takes_delta=lambda address: True,
                waiting_timeout=300,
            ),
        )
        queue.clock = lambda: 0.0  # no wait is logged, and none ends, during a measurement
        return queue

    def line_up(self) -> None:
        """Fill the queue with the waiting requests."""
        first = self.load.running
        self.queue.queue = [self.load.request(first + n) for n in range(self.load.queued)]

    def between(self) -> None:
        """Add one token to each running request, as a decode step does between two admissions."""
        for req in self.owner.running_batch.reqs:
            req.kv_allocated_len += 1
            req.kv_committed_len += 1
        self.matches = 0

    def step(self) -> float:
        """Run one step of admission. Return this thread's CPU time in microseconds."""
        began = time.thread_time_ns()
        self._admitted, _ = self.queue.pop_preallocated()
        return (time.thread_time_ns() - began) / 1e3

    def room_for(self, requests: int) -> None:
        """Leave enough free tokens for ``requests`` requests from the head of the queue."""
        if len(self._ballast):
            self.allocator.free(self._ballast)
        free = self.allocator.available_size() + self.tree.evictable_size()
        spare = free - RESERVE * len(self.owner.running_batch.reqs)
        tokens = max(spare - requests * self.entry - self.entry // 2, 0)
        self._ballast = self.allocator.alloc(tokens // self.load.page * self.load.page)
        assert self._ballast is not None, "the pool has fewer free tokens than were counted"

    def put_back(self) -> int:
        """Revert the last step's admissions, so that the same requests are at the head of the queue
        again. Return the number of them."""
        for entry in self._admitted:
            release_kv_cache(entry.req, self.tree, is_insert=False)
            self.queue.req_to_metadata_buffer_idx_allocator.free(entry.metadata_buffer_index)
        reverted = [self.load.request(int(entry.req.rid[1:])) for entry in self._admitted]
        self.queue.queue = reverted + self.queue.queue
        return len(reverted)


class Ours(Arm):
    """This patch set's queue over its radix tree."""

    def __init__(self, load: Load) -> None:
        requests = (load.running + SPARE_REQUESTS) * (load.tail + 2 * RESERVE)
        super().__init__(load, TRUNKS * load.shared + requests + 4_096 * load.page)
        self.entry = load.tail + RESERVE // 2  # delta pages, half of a running request's reserve
        self.tree = without_engine.build_tree(self.rows, self.allocator, load.page)
        self.tree.serve_decode()
        match = self.tree.match_prefix

        def counting_match(params: Any) -> Any:
            self.matches += len(params.key.token_ids) > load.shared
            return match(params)

        self.tree.match_prefix = counting_match
        self.queue = self.build_queue()
        self._inserted = 0
        # Shared prefixes, each a chain of nodes, locked for the whole measurement.
        for trunk in map(load.trunk, range(TRUNKS)):
            for end in range(load.node, load.shared + 1, load.node):
                self._insert(trunk[:end])
            match_result = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(trunk, None)))
            self.tree.inc_lock_ref(match_result.last_device_node)
        for _ in range(self.entry // 4 // load.page):  # pages of requests that ended
            self._insert_page()
        self._start_running()
        self.line_up()

    def _insert(self, tokens: list[int]) -> None:
        slots = self.allocator.alloc(len(tokens))
        known = self.tree.insert(InsertParams(key=RadixKey(tokens, None), value=slots)).prefix_len
        self.allocator.free(slots[:known])

    def _insert_page(self) -> None:
        """Insert one page that belongs to no other text into the tree."""
        self._inserted += 1
        start = VOCABULARY + self._inserted
        self._insert([start + index * VOCABULARY for index in range(self.load.page)])

    def _start_running(self) -> None:
        """Admit the running requests and start their decoding, as a server does."""
        owner, slots = self.owner, self.queue.req_to_metadata_buffer_idx_allocator
        self.queue.queue = [self.load.request(number) for number in range(self.load.running)]
        while self.queue.queue:
            admitted, failed = self.queue.pop_preallocated()
            assert admitted and not failed
            reqs = [entry.req for entry in admitted]
            for req in reqs:
                self.tree.adopt(req)
                req.output_ids.append(1)
                req.init_next_round_input(self.tree)
            parts = (reqs, self.rows, self.allocator, self.tree, owner.model_config)
            batch = ScheduleBatch.init_new(*parts, False, SpeculativeAlgorithm.NONE)
            batch.prepare_for_prebuilt()
            batch.process_prebuilt(owner.server_args, None)
            owner.running_batch.reqs = [*owner.running_batch.reqs, *reqs]
            for entry in admitted:
                slots.free(entry.metadata_buffer_index)

    def between(self) -> None:
        """Add a token to each running request, and insert a page into the tree."""
        if self.allocator.available_size() < self.load.page:
            self.tree.evict(EvictParams(num_tokens=self.load.page))
        self._insert_page()
        super().between()


class Stock(Arm):
    """SGLang's own queue: the base class of this environment's queue."""

    def __init__(self, load: Load) -> None:
        super().__init__(load, (load.running + SPARE_REQUESTS) * (PROMPT + 2 * RESERVE))
        self.entry = PROMPT + RESERVE
        self.tree = ChunkCache(
            CacheInitParams(
                disable=True,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=load.page,
            )
        )
        self.queue = self.build_queue()
        self.queue.__class__ = type(self.queue).__bases__[-1]
        assert "RadixPreallocQueue" not in {kind.__name__ for kind in type(self.queue).__mro__}
        for number in range(load.running):
            req = load.request(number).req
            self.queue._pre_alloc(req)
            req.output_ids.append(1)
            self.owner.running_batch.reqs.append(req)
        self.line_up()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Provide the process group of a server with one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

"""The two arms: our admission with its tree, and the stock queue that it is derived from."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

import torch

from benchmark.admission import parts
from benchmark.admission.parts import Load
from benchmark.harness import without_engine
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

#: Tokens that the pool has beyond what its requests take.
SPARE_REQUESTS = 80


class Step(NamedTuple):
    """Microseconds of one step. ``cpu``: of this thread, whatever else the machine does."""

    wall: float
    cpu: float


class Arm:
    """One server whose queue is full. Only ``step`` is timed."""

    #: What a request takes to enter, tokens.
    entry: int

    def __init__(self, load: Load, tokens: int) -> None:
        self.load = load
        self.pool, self.allocator = parts.build_pool(tokens, load.page)
        self.rows = parts.request_rows(load)
        self.owner = parts.scheduler()
        self.queue: Any = None
        self.tree: Any = None
        #: Whole prompts that the last step matched against the tree.
        self.matches = 0
        #: Pages that the benchmark itself holds.
        self._ballast = torch.empty(0, dtype=torch.int64)
        self._admitted: list[Any] = []

    @property
    def running(self) -> Sequence[Any]:
        """The requests that decode."""
        reqs: Sequence[Any] = self.owner.running_batch.reqs
        return reqs

    def fill_queue(self) -> None:
        """Everybody who waits."""
        first = self.load.running
        self.queue.queue = [
            parts.request(self.load, number) for number in range(first, first + self.load.queued)
        ]

    def between(self) -> None:
        """What happens between two steps: every request decodes, one insert."""
        parts.decode_once(self.running)

    def free(self) -> int:
        """Tokens of the pool that can be had."""
        size: int = self.allocator.available_size()
        return size

    def hold(self, tokens: int) -> None:
        """Let the ballast be of so many tokens."""
        if len(self._ballast):
            self.allocator.free(self._ballast)
        self._ballast = torch.empty(0, dtype=torch.int64)
        if tokens > 0:
            self._ballast = self.allocator.alloc(tokens // self.load.page * self.load.page)
            assert self._ballast is not None, "more than is free"

    def step(self) -> Step:
        """One step of admission."""
        began, began_cpu = perf_counter_ns(), thread_time_ns()
        self._admitted, _ = self.queue.pop_preallocated()
        cpu, wall = thread_time_ns() - began_cpu, perf_counter_ns() - began
        return Step(wall / 1e3, cpu / 1e3)

    def room_for(self, requests: int) -> None:
        """Leave so much free that as many requests of the queue's head fit."""
        self.hold(0)
        spare = self.free() - parts.RESERVE * len(self.running)
        self.hold(spare - requests * self.entry - self.entry // 2)

    def put_back(self) -> int:
        """Undo the last step's admissions, and say how many there were: the requests are the first
        of the queue again, as they were."""
        for entry in self._admitted:
            release_kv_cache(entry.req, self.tree, is_insert=False)
            self.queue.req_to_metadata_buffer_idx_allocator.free(entry.metadata_buffer_index)
        again = [parts.request(self.load, int(entry.req.rid[1:])) for entry in self._admitted]
        self.queue.queue = again + self.queue.queue
        return len(again)


class Ours(Arm):
    """This patch set's queue over its radix tree."""

    def __init__(self, load: Load) -> None:
        tokens = load.trunks * load.shared + (load.running + SPARE_REQUESTS) * (
            load.tail + 2 * parts.RESERVE
        )
        super().__init__(load, -(-tokens // load.page) * load.page + 4_096 * load.page)
        self.entry = load.tail + parts.RESERVE // 2  # delta pages, half of a running one's reserve
        self.tree = without_engine.build_tree(self.rows, self.allocator, load.page)
        self.tree.serve_decode()
        self._count_matches()
        self.queue = parts.queues(load, self.owner, self.tree, self.rows, self.pool, self.allocator)
        self._inserted = 0
        self._grow_trunks()
        self._start_running()
        self.fill_queue()
        if load.copies > 1:
            self._start_leaders()

    def _start_leaders(self) -> None:
        """The first of each prompt is announced, and stays in transfer."""
        while admitted := self.queue.pop_preallocated()[0]:
            self.queue.transfer_queue.queue += admitted
        leaders = len(self.queue.transfer_queue.queue)
        assert leaders == self.load.queued // self.load.copies, f"{leaders} leaders"

    def _count_matches(self) -> None:
        original = self.tree.match_prefix

        def counted(params: Any) -> Any:
            self.matches += len(params.key.token_ids) > self.load.shared
            return original(params)

        self.tree.match_prefix = counted

    def _insert(self, tokens: list[int]) -> None:
        slots = self.allocator.alloc(len(tokens))
        known = self.tree.insert(InsertParams(key=RadixKey(tokens, None), value=slots)).prefix_len
        self.allocator.free(slots[:known])

    def _grow_trunks(self) -> None:
        """Shared prefixes, each a chain of nodes, in use by others whatever is running; and
        leaves of requests that ended, which may be evicted."""
        for number in range(self.load.trunks):
            trunk = self.load.trunk(number)
            for end in range(self.load.node, self.load.shared + 1, self.load.node):
                self._insert(trunk[:end])
            match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(trunk, None)))
            self.tree.inc_lock_ref(match.last_device_node)
        for _ in range(self.entry // 4 // self.load.page):
            self._insert_one()

    def _start_running(self) -> None:
        """Requests are admitted, land, and begin to decode, as on a server."""
        entries = [parts.request(self.load, number) for number in range(self.load.running)]
        self.queue.queue = entries
        while self.queue.queue:
            admitted, failed = self.queue.pop_preallocated()
            assert admitted and not failed
            reqs = [entry.req for entry in admitted]
            for req in reqs:
                self.tree.adopt(req)
                req.output_ids.append(1)
                req.init_next_round_input(self.tree)
            owner = self.owner
            batch = ScheduleBatch.init_new(
                reqs,
                self.rows,
                self.allocator,
                self.tree,
                owner.model_config,
                False,
                SpeculativeAlgorithm.NONE,
            )
            batch.prepare_for_prebuilt()
            batch.process_prebuilt(owner.server_args, None)
            owner.running_batch.reqs = [*owner.running_batch.reqs, *reqs]
            for entry in admitted:
                self.queue.req_to_metadata_buffer_idx_allocator.free(entry.metadata_buffer_index)

    def between(self) -> None:
        if self.allocator.available_size() < self.load.page:
            self.tree.evict(EvictParams(num_tokens=self.load.page))
        self._insert_one()
        super().between()
        self.matches = 0

    def _insert_one(self) -> None:
        """One page of a text of its own enters the tree."""
        self._inserted += 1
        start = parts.VOCABULARY + self._inserted
        self._insert([start + at * parts.VOCABULARY for at in range(self.load.page)])

    def free(self) -> int:
        return super().free() + int(self.tree.evictable_size())


class Stock(Arm):
    """SGLang's own queue: the class that this environment's is derived from."""

    def __init__(self, load: Load) -> None:
        tokens = (load.running + SPARE_REQUESTS) * (load.prompt + 2 * parts.RESERVE)
        super().__init__(load, -(-tokens // load.page) * load.page)
        self.entry = load.prompt + parts.RESERVE
        self.tree = ChunkCache(
            CacheInitParams(
                disable=True,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=load.page,
            )
        )
        queue = parts.queues(load, self.owner, self.tree, self.rows, self.pool, self.allocator)
        queue.__class__ = type(queue).__bases__[-1]
        assert "RadixPreallocQueue" not in {kind.__name__ for kind in type(queue).__mro__}
        self.queue = queue
        reqs = [parts.request(load, number).req for number in range(load.running)]
        for req in reqs:
            self.queue._pre_alloc(req)
            req.output_ids.append(1)
        self.owner.running_batch.reqs = reqs
        self.fill_queue()

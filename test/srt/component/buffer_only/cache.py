"""One rank's cache with a stage: SGLang's tree, controller and pools, and a scheduler's calls.

Every KV slot holds a number that depends on the namespace and on all tokens up to it, so that a
page at a wrong position, of a wrong request or half copied is detected anywhere.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist

from component.buffer_only.scripted_store import Gate, ManualThreads, ScriptedStore, until
from sglang.srt import server_args as arguments
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import hiradix_cache
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.buffer_only.context import Context
from sglang.srt.mem_cache.buffer_only.nodes import page_hashes
from sglang.srt.mem_cache.buffer_only.pipelines import Pipelines
from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch, State
from sglang.srt.mem_cache.buffer_only.settings import BATCH_PAGES, StoreClientSettings
from sglang.srt.mem_cache.buffer_only.stage import Copier, Direction, StagingPages
from sglang.srt.mem_cache.buffer_only.store_client import PageStore, StoreClient
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE = 4
LAYERS = 2


def server_arguments(**changes: Any) -> Any:
    """Return ``ServerArgs`` with the fields that the tree reads."""
    args = arguments.ServerArgs(
        model_path="dummy", page_size=PAGE, device="cpu", attention_backend="torch_native"
    )
    extra = {"interface_v1": 1, "prefetch_threshold": PAGE}
    wanted = {
        "hicache_host_memory_mode": "buffer_only",
        "hicache_buffer_pages": 16,
        "hicache_storage_backend": "dynamic",
        "hicache_mem_layout": "page_first_direct",
        "hicache_io_backend": "direct",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "hicache_storage_prefetch_policy": "wait_complete",
        "page_size": PAGE,
    }
    for name, value in (wanted | changes).items():
        setattr(args, name, value)
    arguments.set_global_server_args_for_scheduler(args)
    return args


class Cache:
    """A cache with a store, threads and a clock that the test controls. Every test must leave it
    idle (``checks.end``)."""

    #: Caches and ``Ranks`` of the running test.
    instances: ClassVar[list[Any]] = []

    def __init__(
        self,
        store: ScriptedStore | None = None,
        pages: int | None = 16,
        tokens: int = 40 * PAGE,
        reduce_min: Callable[[list[int]], list[int]] = list,
        rank: int = 0,
        threads: Any = ManualThreads,
        settings: dict[str, Any] | None = None,
        batch_pages: int = BATCH_PAGES,
        **changes: Any,
    ) -> None:
        self.store = ScriptedStore() if store is None else store
        self.now = 0.0
        self._given_up: list[Gate] = []
        #: Timeouts of the calls of the store, in seconds.
        self.waits: list[float] = []
        args = server_arguments(hicache_buffer_pages=pages, **changes)
        self.device = MHATokenToKVPool(tokens, PAGE, torch.float32, 1, 4, LAYERS, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(
            tokens, PAGE, torch.float32, "cpu", self.device, False
        )
        self.tree = self.build_tree(args, rank)
        built = self.tree.buffer
        assert built.close()
        self.client = StoreClient(
            self.store, "scripted", StoreClientSettings(), clock=lambda: self.now, wait=self._wait
        )
        context = built.context
        fresh = {f.name: getattr(context, f.name) for f in dataclasses.fields(Context)}
        limits = dataclasses.replace(context.settings, **(settings or {}))
        self.threads: dict[str, Any] = {}

        def make_thread(name: str, count: int = 1) -> Any:
            self.threads[name] = threads(name, count)
            return self.threads[name]

        fresh |= {
            "store": PageStore(self.client, PAGE, batch_pages),
            "make_thread": make_thread,
            "settings": limits,
        }
        fresh["copier"] = SlowCopier(self, context.copier)
        self.buffer = self.tree.buffer = Pipelines(Context(**fresh), reduce_min, lambda: self.now)
        self.stage = self.buffer.context.stage
        #: Staging pages that the test itself holds, and whether copies are delayed.
        self.hogs: list[StagingPages] = []
        self.slow = False
        #: Copies to the device; those made while ``slow`` may still be running.
        self.loads: list[Later] = []
        if reduce_min is list:  # one of several ranks cannot step alone
            self.instances.append(self)

    def build_tree(self, args: Any, rank: int = 0) -> Any:
        """Build the tree as SGLang does."""
        names = {
            "get_tensor_model_parallel_rank": lambda: rank,
            "get_tensor_model_parallel_world_size": lambda: 1,
            "is_dp_attention_enabled": lambda: False,
        }
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=dist.group.WORLD,
        )
        with (
            mock.patch.multiple(cache_controller, **names),
            mock.patch.object(StorageBackendFactory, "create_backend", lambda *a, **k: self.store),
            mock.patch.object(hiradix_cache.atexit, "register"),
        ):
            return hiradix_cache.HiRadixCache(params, args)

    def _wait(self, calls: Any, seconds: float) -> None:
        """Let a call's deadline expire as soon as it hangs at one of the store's gates."""
        self.waits.append(seconds)
        while not all(call.done() for call in calls):
            concurrent.futures.wait(calls, timeout=0.001)
            hanging = [gate for gate in self.store.hanging() if gate not in self._given_up]
            if hanging:
                self._given_up += hanging
                return

    def calm(self) -> None:
        """Wait until every call of the store, including probes, has returned or hangs at a gate."""
        until(lambda: self.client.under_way <= len(self.store.hanging()), pause=0.0001)

    def open_gates(self) -> None:
        """Let every hanging call return."""
        self.store.open_all()
        self.calm()

    def revive(self) -> None:
        """Let a silent store answer a probe, so that it is used again."""
        self.now += 100.0
        self.client.query(["f" * 64])
        self.calm()
        assert self.client.poll()

    # ---- threads ----

    def work(self) -> int:
        """Run all jobs of the threads. Return their number."""
        manual = [thread for thread in self.threads.values() if isinstance(thread, ManualThreads)]
        done = sum(thread.run() for thread in manual)
        self.calm()
        return done

    def step(self, work: bool = True) -> None:
        """Run a scheduler step, after the threads have done their work."""
        if work:
            self.work()
        self.tree.check_hicache_events()

    def settle(self, steps: int = 200) -> None:
        """Step until the cache is idle."""
        for _ in range(steps):
            self.step()
            if not self.buffer.busy and not self.stage.used():
                return
        raise AssertionError(f"still busy: {self.describe()}")

    def hog(self) -> None:
        """Take all staging pages that reads may have, until ``unhog``."""
        room = self.stage.capacity(Direction.PREFETCH)
        self.hogs.append(self.stage.allocate(Direction.PREFETCH, room))

    def unhog(self) -> None:
        """Free the pages that ``hog`` took."""
        while self.hogs:
            self.hogs.pop().release()

    def describe(self) -> str:
        states = [(prefetch.rid, prefetch.state.name) for prefetch in self.buffer.prefetches.line]
        return (
            f"pending {len(self.buffer.backups.queue)}, "
            f"backups {len(self.buffer.backups.running)}, prefetches {states}, "
            f"loads {len(self.buffer.prefetches.load_backs)}, "
            f"stage {self.stage.used()}"
        )

    # ---- requests ----

    def want(self, rid: str, tokens: Sequence[int], extra_key: str | None = None) -> None:
        self.tree.request_prefetch(rid, RadixKey(list(tokens), extra_key))

    def prefetch(self, rid: str) -> Prefetch | None:
        return self.buffer.prefetches.line.get(rid)

    def state(self, rid: str) -> State | None:
        prefetch = self.prefetch(rid)
        return None if prefetch is None else prefetch.state

    def match(self, tokens: Sequence[int], extra_key: str | None = None) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(list(tokens), extra_key)))

    def held_tokens(self, tokens: Sequence[int], extra_key: str | None = None) -> int:
        return len(self.match(tokens, extra_key).device_indices)

    def keys(self, tokens: Sequence[int], extra_key: str | None = None) -> list[str]:
        """Return the keys of all whole pages of a prompt that the tree has."""
        node = self.match([*tokens, 0], extra_key).last_device_node
        hashes, extra_key = list[str](), node.key.extra_key
        while node.parent is not None:
            hashes[:0] = page_hashes(node, PAGE)
            node = node.parent
        return self.buffer.context.store.keys(hashes, extra_key)

    def admit(
        self, rid: str | None, tokens: Sequence[int], extra_key: str | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Admit a request as SGLang's ``PrefillAdder`` does; return its prefix's slots and node.

        ``rid`` is None for a request that never queried the store.

        Raises:
            MemoryError: the device has no room for it.
        """
        req = SimpleNamespace(rid=rid)
        seen = list(tokens) if rid is None else list(tokens)[:-1]
        match = self.tree.match_prefix(
            MatchPrefixParams(key=RadixKey(seen, extra_key), req=None if rid is None else req)
        )
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.host_hit_length = match.host_hit_length
        self.tree.inc_lock_ref(req.last_node)
        room = self.allocator.available_size() + self.tree.evictable_size()
        try:
            if len(tokens) - len(req.prefix_indices) > room:
                raise MemoryError
            if req.host_hit_length:
                params = InitLoadBackParams(match.last_host_node, req.host_hit_length, req=req)
                new, node = self.tree.init_load_back(params)
                assert len(new) == match.host_hit_length
                req.prefix_indices = torch.cat([req.prefix_indices, new])
            else:
                node = req.last_node
        finally:
            self.tree.dec_lock_ref(req.last_node)
        if self.tree.ready_to_load_host_cache() >= 0:
            while self.loads:
                self.loads.pop().synchronize()  # a batch waits for its layers to be loaded
        if rid is not None:
            self.buffer.prefetches.cancel(rid)
        return req.prefix_indices, node

    def compute(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunked: bool = False,
        rid: str | None = None,
    ) -> int:
        """Run a request to its end, computing the tokens that the tree lacks. Return its hit
        tokens.

        Raises:
            MemoryError: the device has no room for it.
        """
        prefix, node = self.admit(rid, tokens, extra_key)
        tokens, hit = list(tokens)[: len(tokens) // PAGE * PAGE], len(prefix)
        self.verify(tokens, prefix, extra_key)
        self.tree.inc_lock_ref(node)
        try:
            new = self._slots(len(tokens) - hit)
        finally:
            self.tree.dec_lock_ref(node)
        slots = torch.cat([prefix, new])
        self.fill(tokens, slots, hit, extra_key)
        key = RadixKey(tokens, extra_key)
        result = self.tree.insert(InsertParams(key=key, value=slots, chunked=chunked))
        self.allocator.free(slots[hit : result.prefix_len])
        return hit

    def serve(self, rid: str, tokens: Sequence[int], extra_key: str | None = None) -> int:
        """Prefetch, admit and run a request. Return its hit tokens."""
        self.want(rid, tokens, extra_key)
        return self.run(rid, tokens, extra_key)

    def run(self, rid: str, tokens: Sequence[int], extra_key: str | None = None) -> int:
        """Step until a request may be admitted, and run it. Return its hit tokens."""
        for _ in range(200):
            self.step()
            if self.tree.check_prefetch_progress(rid):
                return self.compute(tokens, extra_key, rid=rid)
        raise AssertionError(f"{rid} is never admitted: {self.describe()}")

    def evict(self, tokens: int) -> int:
        return int(self.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def flush(self) -> None:
        """Flush the cache, as the scheduler does for ``/flush_cache``."""
        self.tree.reset()
        self.allocator.clear()

    def _slots(self, tokens: int) -> torch.Tensor:
        short = tokens - self.allocator.available_size()
        if short > 0:
            self.evict(short)
        slots = self.allocator.alloc(tokens) if tokens else torch.empty(0, dtype=torch.int64)
        if slots is None:
            raise MemoryError
        return slots

    # ---- content ----

    def fill(self, tokens: Sequence[int], slots: Any, begin: int, extra_key: str | None) -> None:
        values = tags(tokens, extra_key)[begin:]
        for layer in range(LAYERS):
            self.device.k_buffer[layer][slots[begin:]] = (
                values[:, None, None].expand(-1, 1, 4) + layer
            )
            self.device.v_buffer[layer][slots[begin:]] = (
                -values[:, None, None].expand(-1, 1, 4) - layer
            )

    def verify(self, tokens: Sequence[int], slots: Any, extra_key: str | None = None) -> None:
        """Check that the KV in ``slots`` is that of the first tokens."""
        values = tags(tokens, extra_key)[: len(slots)]
        for layer in range(LAYERS):
            k, v = self.device.k_buffer[layer][slots], self.device.v_buffer[layer][slots]
            assert torch.equal(k[:, 0, 3], values + layer), "wrong keys"
            assert torch.equal(v[:, 0, 0], -values - layer), "wrong values"


class Later:
    """A copy that is made, and ends, as soon as its cache is not ``slow``."""

    def __init__(self, cache: Cache, copy: Callable[[], Any]) -> None:
        self._cache = cache
        self._copy: Callable[[], Any] | None = copy

    def query(self) -> bool:
        if not self._cache.slow:
            self.synchronize()
        return self._copy is None

    def synchronize(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()


class SlowCopier:
    """Copies at once, or, while ``cache.slow``, later, so that a source or target that was reused
    too early is detected."""

    def __init__(self, cache: Cache, copier: Copier) -> None:
        self._cache, self._copier = cache, copier

    def to_stage(self, pairs: Any) -> Any:
        event = Later(self._cache, lambda: self._copier.to_stage(pairs))
        event.query()
        return event

    def to_device(self, pairs: Any) -> Any:
        event = Later(self._cache, lambda: self._copier.to_device(pairs))
        event.query()
        self._cache.loads.append(event)
        counter = self._cache.tree.cache_controller.layer_done_counter
        return event, max(0, counter.producer_index)


def tags(tokens: Sequence[int], extra_key: str | None = None) -> torch.Tensor:
    """Return the content of each token's KV: a function of the token and everything before it."""
    return _tags(tuple(tokens), extra_key)


@functools.cache
def _tags(tokens: tuple[int, ...], extra_key: str | None) -> torch.Tensor:
    crc, values = zlib.crc32((extra_key or "").encode()), []
    for token in tokens:
        crc = zlib.crc32(int(token).to_bytes(8, "little"), crc)
        values.append(float(crc % 100003))
    return torch.tensor(values)


def prompt(seed: int, pages: int, base: Sequence[int] = ()) -> list[int]:
    """Return ``base`` and ``pages`` more pages of tokens that depend on ``seed``."""
    return [*base, *(seed * 1000 + number for number in range(pages * PAGE))]

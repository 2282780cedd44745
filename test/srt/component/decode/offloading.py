"""A decode server that writes computed KV to a store (``Decoder`` has the rest)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from component.buffer_only.scripted_store import ScriptedStore, until
from component.decode import kv
from component.decode.decoder import Decoder
from sglang.srt.disaggregation.delta.decode import offload
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import memory_pool_host
from sglang.srt.mem_cache.buffer_only import store_scheduler
from sglang.srt.mem_cache.buffer_only.nodes import hashes_of
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.patchset import start_check

LAYERS = 2
BUILDING = threading.Lock()
"""Serialises construction: ranks are threads, and a patch applies to all of them."""


class Offloader(Decoder):
    """A decode server over ``store``, with ``staging`` pages."""

    def __init__(
        self, page: int, tokens: int, *, staging: int = 16, group: Any = None, **options: Any
    ) -> None:
        super().__init__(page, tokens, group=group, **options)
        args = self.server_args
        args.hicache_host_memory_mode, args.hicache_buffer_pages = "buffer_only", staging
        args.hicache_storage_backend = "dynamic"
        args.hicache_mem_layout, args.hicache_io_backend = "page_first_direct", "direct"
        args.hicache_storage_backend_extra_config = '{"interface_v1": 1}'
        self.store, model = ScriptedStore(), torch.nn.Linear(2, 2)
        self.tp_worker.model_runner = SimpleNamespace(model=model)
        self.tp_worker.update_weights_from_disk = self._load
        self.model_config.is_multimodal = False
        self.model_config.hf_config = SimpleNamespace(to_dict=dict)
        self.tp_cpu_group, self.offload_tags = dist.group.WORLD, set[str]()
        self.enable_hicache_storage = True  # as SGLang sets it with any backend
        start_check.equip(self, args)
        ranks = {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
            "is_dp_attention_enabled": lambda: False,
        }
        memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1 << 40))
        with (
            BUILDING,
            mock.patch.multiple(cache_controller, **ranks),
            mock.patch.object(StorageBackendFactory, "create_backend", lambda *a, **k: self.store),
            mock.patch.object(memory_pool_host, "psutil", memory),
            mock.patch.object(offload.atexit, "register"),
            mock.patch.object(store_scheduler, "gathered", lambda mine, group: [mine]),
        ):
            self.write_to_store()
        self.tp_cpu_group = group or dist.group.WORLD
        #: Version of the weights -> namespace of its keys.
        self.namespaces: dict[int, Any] = {}
        self._note()

    def _load(self, request: Any) -> tuple[bool, str]:
        with torch.no_grad():
            self.tp_worker.model_runner.model.weight += 1
        return True, ""

    def _note(self) -> None:
        generation, store = self.tree_cache.generation, self.tree_cache.buffer.context.store
        self.namespaces[generation] = store.namespace

    def update_weights(self) -> None:
        super().update_weights()
        self._note()

    @property
    def copied(self) -> int:
        """Launched copies to the staging buffer that have not ended, as far as the server knows."""
        return len(self.tree_cache.buffer.backups.copies.launches)

    def copy_slowly(self) -> None:
        """Let copies end only when the server waits for them."""
        self.tree_cache.buffer.context.copier = SlowCopier(self.tree_cache.buffer.context.copier)

    def tick_queues(self) -> None:
        buffer = self.tree_cache.buffer
        jobs = [one.job for one in buffer.backups.running if one.job is not None]
        if buffer.touches.running is not None:
            jobs.append(buffer.touches.running.job)
        hanging = self.store.hanging
        until(lambda: hanging() or all(job.pages >= 0 for job in jobs), pause=0.0005)
        super().tick_queues()

    def written(self) -> None:
        """Run until all queued writes are written or dropped."""
        for _ in range(300):
            self.tick_queues()
            if not self.tree_cache.buffer.busy:
                return
        raise AssertionError("still busy")

    def pages_of(
        self, tokens: list[int], extra_key: str | None = None, weights: int | None = None
    ) -> dict[str, list[int]]:
        """Return the key and the tags of each whole page of a text."""
        weights = self.tree_cache.generation if weights is None else weights
        page = self.page_size
        # With a draft model a position is a pair: its token and the next.
        whole: list[Any] = [*zip(tokens, tokens[1:], strict=False)] if self.steps else tokens
        whole = whole[: len(whole) // page * page]
        own = self.namespaces[weights].within(extra_key)
        values = kv.tags(tokens, extra_key, weights=weights)
        keys = own.keys(hashes_of(whole, None, page))
        return {key: values[at * page :][:page] for at, key in enumerate(keys)}

    def stored(self, tokens: list[int], extra_key: str | None = None) -> list[bool]:
        """Return for each whole page of a text whether it is in the store, after all writes; each
        must have its own content."""
        self.written()
        found = []
        for key, values in self.pages_of(tokens, extra_key).items():
            found.append(key in self.store.content)
            assert not found[-1] or self.content(key) == values, "the KV of another text"
        return found

    def content(self, key: str) -> list[int]:
        """Return the tags in a stored page; garbage if keys, values and layers do not agree."""
        both = torch.frombuffer(bytearray(self.store.content[key]), dtype=torch.int64)
        keys, values = both.view(2, LAYERS, self.page_size)
        tags = keys[0]
        same = all(
            torch.equal(keys[n] - n, tags) and torch.equal(-values[n] - n, tags)
            for n in range(LAYERS)
        )
        return tags.tolist() if same else [kv.GARBAGE]


class SlowCopier:
    """Copies as late as possible, so that a source that was reused too early is detected."""

    def __init__(self, copier: Any) -> None:
        self._copier = copier

    def to_stage(self, pairs: Any) -> Any:
        return SimpleNamespace(
            query=lambda: False, synchronize=lambda: self._copier.to_stage(pairs).synchronize()
        )

"""SGLang's host pools of every kind, small, in CPU memory, with different content in each page; and
the storage backends of this release on clients that keep everything in this process.

Each function that makes a backend builds SGLang's own class with the mixin of this package. Clients
record their calls in ``calls``.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang.srt.mem_cache import memory_pool_host as hosts
from sglang.srt.mem_cache.buffer_only import host_pool as page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import FileParts, MooncakeParts
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool
from sglang.srt.patchset.combine import combine, mismatches

LAYERS = 3
PAGES = 6
#: The only page size that NSA's pool supports.
PAGE = 64

KINDS = ("mha", "mla", "nsa")
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
#: Kind, layout and page size for tests with a real store. Others differ only in bytes.
THROUGH_MOONCAKE = [
    ("nsa", "page_first", PAGE),
    ("nsa", "page_first_direct", PAGE),
    ("mha", "page_first_direct", 1),
    ("mla", "page_first_direct", 16),
]


def host_pool(kind: str, layout: str, stage: bool = True, heads: int = 2, page: int = PAGE) -> Any:
    """Return a host pool of at least 6 pages for a device pool of half the size."""
    size = PAGES // 2 * page
    if kind == "mha":
        device = MHATokenToKVPool(size, page, torch.float16, heads, 8, LAYERS, "cpu", False)
        host = hosts.MHATokenToKVPoolHost(device, 2.0, 0, page, layout)
    elif kind == "mla":
        device = MLATokenToKVPool(size, page, torch.bfloat16, 16, 4, LAYERS, "cpu", False)
        host = hosts.MLATokenToKVPoolHost(device, 2.0, 0, page, layout)
    else:
        device = NSATokenToKVPool(
            size, page, 16, torch.bfloat16, 4, LAYERS, "cpu", 128, False, kv_cache_dim=20
        )
        host = hosts.NSATokenToKVPoolHost(device, 2.0, 0, page, layout)
    host.is_stage = stage
    fill(host)
    return host


def fill(pool: Any, seed: int = 0) -> None:
    """Fill all tensors of a pool with random bytes."""
    rng = np.random.default_rng(seed)
    for tensor in page_parts.tensors(pool):
        content = rng.integers(0, 256, tensor.numel() * tensor.element_size(), np.uint8)
        tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(content))


def slots(*pages: int, page: int = PAGE) -> torch.Tensor:
    """Return the host slots of pages, as HiCache passes them."""
    return torch.cat([torch.arange(p * page, (p + 1) * page) for p in pages])


def content(pool: Any, page: int) -> bytes:
    """Return all bytes of a page, with all its parts."""
    parts = page_parts.describe(pool)
    return b"".join(part.gather(page).numpy().tobytes() for part in parts)


def hashes(count: int) -> list[str]:
    """Return page keys."""
    return [f"{number:064x}" for number in range(1, count + 1)]


# ---- backends ----


def combined(base: type, mixin: type) -> Any:
    """Return SGLang's class with the mixin, which the replacement table may have added already."""
    if issubclass(base, mixin):
        return base
    assert mismatches(base, mixin) == []
    return combine(base, mixin)


def config(pool: Any, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    """Return the configuration that HiCache's controller passes to a backend."""
    defaults = {
        "tp_rank": rank, "tp_size": ranks, "pp_rank": 0, "pp_size": 1,
        "is_mla_model": not hasattr(pool, "head_num"), "enable_storage_metrics": True,
        "is_page_first_layout": pool.layout == "page_first", "model_name": "org/model",
        "extra_config": {},
    }  # fmt: skip
    return HiCacheStorageConfig(**(defaults | changes))


def _load(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def _store(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


# ---- Mooncake ----


class MooncakeClient:
    """The part of ``MooncakeDistributedStore`` that SGLang calls."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.registered: list[tuple[int, int]] = []
        self.dead = False

    def setup(self, *arguments: Any) -> int:
        return 0

    def put(self, key: str, value: bytes) -> int:
        self.content[key] = value
        return 0

    def get(self, key: str) -> bytes:
        return self.content[key]

    def is_exist(self, key: str) -> int:
        return int(key in self.content)

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.calls.append(("exist", keys))
        return [-900 if self.dead else int(key in self.content) for key in keys]

    def batch_put_from(self, keys: list[str], addresses: Any, sizes: Any) -> list[int]:
        self.calls.append(("put", keys, addresses, sizes))
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self.content[key] = _load(address, size)
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: Any, sizes: Any) -> list[int]:
        self.calls.append(("get", keys, addresses, sizes))
        results = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            content = self.content.get(key)
            if content is None or len(content) > size:
                results.append(-704)
                continue
            _store(address, content)
            results.append(len(content))
        return results


def mooncake(pool: Any, client: MooncakeClient, **changes: Any) -> Any:
    """Return a Mooncake backend on ``client``."""
    from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store

    cls = combined(mooncake_store.MooncakeStore, MooncakeParts)
    extra = {"master_server_address": "127.0.0.1:1"} | changes.pop("extra_config", {})
    with mock.patch.object(cls, "_import_mooncake_store", lambda self: lambda: client):
        store = cls(config(pool, extra_config=extra, **changes), pool)
    store.register_mem_pool_host(pool)
    client.calls.clear()
    return store


# ---- files ----


def file(pool: Any, folder: Path, **changes: Any) -> Any:
    """Return a file backend in ``folder``."""
    store = combined(HiCacheFile, FileParts)(config(pool, **changes), str(folder))
    store.register_mem_pool_host(pool)
    return store


def relative(calls: list[tuple[Any, ...]], pool: Any) -> list[Any]:
    """Return a Mooncake client's calls with addresses relative to the pool's memory."""
    base = pool.kv_buffer.data_ptr()
    return [
        (name, keys, [[address - base for address in rest[0]], rest[1]] if rest else [])
        for name, keys, *rest in calls
    ]


def address_of(view: torch.Tensor) -> tuple[int, int]:
    """Return the address and the size in bytes of a view."""
    return view.data_ptr(), view.numel() * view.element_size()

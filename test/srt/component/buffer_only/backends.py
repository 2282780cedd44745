"""The storage backends of this release on clients that keep everything in this process.

Each maker builds SGLang's own class with our mixin. Clients have ``calls``: what they were asked.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang.srt.mem_cache.buffer_only.storage_files import FileParts, Hf3fsParts
from sglang.srt.mem_cache.buffer_only.storage_kv import EicParts, MooncakeParts
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.patchset.combine import combine
from sglang.srt.patchset.guard import mismatches


def combined(base: type, mixin: type) -> Any:
    """SGLang's class with our mixin; the replacement table may have made it already."""
    if issubclass(base, mixin):
        return base
    assert mismatches(base, mixin) == []
    return combine(base, mixin)


def config(pool: Any, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    """What HiCache's controller tells a backend."""
    found = {
        "tp_rank": rank, "tp_size": ranks, "pp_rank": 0, "pp_size": 1,
        "is_mla_model": not hasattr(pool, "head_num"), "enable_storage_metrics": True,
        "is_page_first_layout": pool.layout == "page_first", "model_name": "org/model",
        "extra_config": {},
    }  # fmt: skip
    return HiCacheStorageConfig(**(found | changes))


def _load(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def _store(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


# ---- Mooncake ----


class MooncakeClient:
    """``MooncakeDistributedStore`` as far as SGLang calls it."""

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
        found = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            content = self.content.get(key)
            if content is None or len(content) > size:
                found.append(-704)
                continue
            _store(address, content)
            found.append(len(content))
        return found


def mooncake(pool: Any, client: MooncakeClient, **changes: Any) -> Any:
    """A Mooncake backend on ``client``."""
    from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store

    cls = combined(mooncake_store.MooncakeStore, MooncakeParts)
    extra = {"master_server_address": "127.0.0.1:1"} | changes.pop("extra_config", {})
    with mock.patch.object(cls, "_import_mooncake_store", lambda self: lambda: client):
        store = cls(config(pool, extra_config=extra, **changes), pool)
    store.register_mem_pool_host(pool)
    client.calls.clear()
    return store


# ---- the others ----


def file(pool: Any, folder: Path, **changes: Any) -> Any:
    """A file backend in ``folder``."""
    store = combined(HiCacheFile, FileParts)(config(pool, **changes), str(folder))
    store.register_mem_pool_host(pool)
    return store


def hf3fs(pool: Any, folder: Path, slots: int = 64) -> Any:
    """An HF3FS backend on SGLang's mock client, with a file of ``slots`` slots."""
    from sglang.srt.mem_cache.storage.hf3fs import storage_hf3fs
    from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import (
        Hf3fsLocalMetadataClient,
    )

    page_first = pool.layout != "layer_first"
    per_token = pool.get_ksize_per_token() if page_first else pool.get_size_per_token()
    slot = per_token * pool.page_size
    with mock.patch("signal.signal"), mock.patch("atexit.register"):
        store = combined(storage_hf3fs.HiCacheHF3FS, Hf3fsParts)(
            0, str(folder / "pages.bin"), slots * slot, 2, slot, 2, 5, pool.dtype,
            Hf3fsLocalMetadataClient(), is_mla_model=not hasattr(pool, "head_num"),
            use_mock_client=True,
        )  # fmt: skip
    store.register_mem_pool_host(pool)
    return store


class EicClient:
    """EIC's client, as far as SGLang calls it."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.registered: list[Any] = []
        #: Keys whose writes fail.
        self.refused: set[str] = set()

    def init(self, *arguments: Any) -> int:
        return 0

    def register_memory(self, memory: Any, info: Any) -> None:
        self.registered.extend(memory)

    def mexist(self, keys: list[str], option: Any) -> tuple[str, Any]:
        return self._answer([key in self.content for key in keys])

    def mset(self, keys: list[str], memory: Any, option: Any) -> tuple[str, Any]:
        self.calls.append(("set", list(keys), list(memory)))
        for key, (address, size, _) in zip(keys, memory, strict=True):
            if key not in self.refused:
                self.content[key] = _load(address, size)
        return self._answer([key not in self.refused for key in keys])

    def mget(self, keys: list[str], option: Any, memory: Any) -> tuple[str, Any, Any]:
        self.calls.append(("get", list(keys), list(memory)))
        there = [key in self.content for key in keys]
        for key, (address, _, _), found in zip(keys, memory, there, strict=True):
            if found:
                _store(address, self.content[key])
        status, outcome = self._answer(there)
        return status, memory, outcome

    @staticmethod
    def _answer(good: list[bool]) -> tuple[str, Any]:
        codes = ["SUCCESS" if each else "FAILED" for each in good]
        status = "SUCCESS" if all(good) else "PARTIAL_FAILED"
        return status, SimpleNamespace(status_codes=codes)


class _Buffers(list[Any]):
    def append(self, *entry: Any) -> None:
        super().append(entry)


@contextmanager
def eic(pool: Any, client: EicClient, folder: Path) -> Iterator[Any]:
    """An EIC backend on ``client``; the client library is absent, so a stub stands in for it."""
    library: Any = ModuleType("eic")
    library.Client = lambda: client
    library.StringVector, library.IOBuffers = list, _Buffers
    for name in ("InitOption", "MemoryInfo", "ExistOption", "GetOption", "SetOption"):
        setattr(library, name, SimpleNamespace)
    library.LogLevel = library.TransportType = int
    library.MemoryType = SimpleNamespace(MEMORY_CUDA=0)
    library.StatusCode = SimpleNamespace(SUCCESS="SUCCESS", PARTIAL_FAILED="PARTIAL_FAILED")
    settings = folder / "eic.yaml"
    settings.write_text(
        f"remote_url: eic://nowhere\neic_log_dir: {folder}\n"
        "enable_kvset_direct: false\nenable_kvget_direct: false\n"
    )
    name = "sglang.srt.mem_cache.storage.eic.eic_storage"
    with (
        mock.patch.dict(sys.modules, {"eic": library}),
        mock.patch.dict("os.environ", {"REMOTE_EIC_YAML": str(settings)}),
    ):
        sys.modules.pop(name, None)
        module = __import__(name, fromlist=["EICStorage"])
        store = combined(module.EICStorage, EicParts)(config(pool), pool)
        store.register_mem_pool_host(pool)
        yield store
    sys.modules.pop(name, None)


def relative(calls: list[tuple[Any, ...]], pool: Any) -> list[Any]:
    """A Mooncake client's calls with addresses counted from the start of the pool's memory."""
    base = pool.kv_buffer.data_ptr()
    return [
        (name, keys, [[at - base for at in rest[0]], rest[1]] if rest else [])
        for name, keys, *rest in calls
    ]


def address_of(view: torch.Tensor) -> tuple[int, int]:
    """Where a view lies, and its bytes."""
    return view.data_ptr(), view.numel() * view.element_size()

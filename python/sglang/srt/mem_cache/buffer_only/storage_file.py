"""The ``file`` backend: SGLang's flat page in one file; written beside it and renamed."""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    class _Base(PartStore, HiCacheFile):
        pass

else:
    _Base = PartStore


class FileParts(_Base):
    """A file is there only when it has its full length, so that one whose writer died is written
    again, and nobody reads one that is being written."""

    @override
    def __init__(self, storage_config: Any, file_path: str = "/tmp/hicache") -> None:
        from sglang.srt.environ import envs

        # SGLang looks whether the folder is there and then makes it: of two servers that start at
        # once, one would find it made meanwhile, and end.
        folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() or file_path
        os.makedirs(folder, exist_ok=True)
        super().__init__(storage_config, file_path)

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if is_stage(mem_pool_host):
            self.keep(mem_pool_host, page_parts.together(page_parts.describe(mem_pool_host)))

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        path: str = self._get_component_path(page_hash, value.label or None)
        return path

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        return [_size(path) == size for path, size in zip(keys, sizes, strict=True)]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        return [_read(path, view) for path, view in zip(keys, memory, strict=True)]

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        for path, view in zip(keys, memory, strict=True):
            _write(path, view)
        return [True] * len(keys)


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return None


def _read(path: str, view: torch.Tensor) -> int:
    if _size(path) != view.numel():
        return _size(path) or 0
    with open(path, "rb", buffering=0) as file:
        return file.readinto(memoryview(view.numpy())) or 0


def _write(path: str, view: torch.Tensor) -> None:
    beside = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(beside, "wb", buffering=0) as file:
            content = memoryview(view.numpy())
            while content:
                content = content[file.write(content) :]
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise

"""SGLang's backend ``file``, which keeps values in files."""

from __future__ import annotations

import contextlib
import glob
import os
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache

    class _File(PartStore, HiCacheFile):
        pass

else:
    _File = PartStore


#: Seconds after which nobody writes to a temporary file any more.
STALE_S = 600.0


class FileParts(_File):
    """A file is there only when it has its full length, so that one whose writer died is written
    again, and nobody reads one that is being written."""

    @override
    def __init__(
        self, storage_config: HiCacheStorageConfig, file_path: str = "/tmp/hicache"
    ) -> None:
        from sglang.srt.environ import envs

        # SGLang looks whether the folder is there and then makes it: of two servers that start at
        # once, one would find it made meanwhile, and end.
        folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() or file_path
        os.makedirs(folder, exist_ok=True)
        super().__init__(storage_config, file_path)
        # Of writers that were killed; those of others that run are younger.
        for path in glob.iglob(os.path.join(glob.escape(folder), f"*.bin.{'[0-9a-f]' * 32}")):
            with contextlib.suppress(OSError):
                if os.path.getmtime(path) < time.time() - STALE_S:
                    os.unlink(path)

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if is_stage(mem_pool_host):
            self.keep(mem_pool_host, page_parts.together(page_parts.describe(mem_pool_host)))

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        return self._get_component_path(page_hash, value.label or None)

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        found = _readable(keys, _size)
        return [there == size for there, size in zip(found, sizes, strict=True)]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        views = iter(memory)
        return [count or 0 for count in _readable(keys, lambda path: _read(path, next(views)))]

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        for path, view in zip(keys, memory, strict=True):
            _write(path, view)
        return [True] * len(keys)


def _readable(paths: list[str], look: Callable[[str], int | None]) -> list[int | None]:
    """``look`` of each path; None for a file that cannot be read, which is not there.

    Raises:
        OSError: none of them can be read, which says nothing about the files.
    """
    found: list[int | None] = []
    errors = []
    for path in paths:
        try:
            found.append(look(path))
        except OSError as error:
            found.append(None)
            errors.append(error)
    if errors and len(errors) == len(paths):
        raise errors[0]
    return found


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return None


def _read(path: str, view: torch.Tensor) -> int:
    """Bytes read; the file's own length where that is another."""
    try:
        with open(path, "rb", buffering=0) as file:
            # Of the open file: at its path there may be another one a moment later.
            size = os.fstat(file.fileno()).st_size
            return size if size != view.numel() else file.readinto(memoryview(view.numpy())) or 0
    except FileNotFoundError:
        return 0


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

"""Backends that keep values in files: SGLang's ``file``, and NIXL's plugins for files."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any  # Any: NIXL's handles

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    class _File(PartStore, HiCacheFile):
        pass

    class _Nixl(PartStore, HiCacheNixl):
        pass

else:
    _File = _Nixl = PartStore


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

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if is_stage(mem_pool_host):
            self.keep(mem_pool_host, page_parts.together(page_parts.describe(mem_pool_host)))

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        path: str = self._get_component_path(page_hash, value.label or None)
        return path

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


#: Seconds between two looks at a transfer, as SGLang has it.
_POLL = 0.0001


class NixlParts(_Nixl):
    """The host tensors are registered once; a file is there when it has its full length, is written
    beside its place and renamed, and nothing stays open or registered after a transfer."""

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)  # sets is_zero_copy from the layout
        if not is_stage(mem_pool_host):
            return
        if self.backend_selector.mem_type != "FILE":
            raise ValueError(
                f"--hicache-storage-backend nixl with its plugin "
                f"{self.backend_selector.backend_name} is not supported by "
                "--hicache-host-memory-mode buffer_only, which is tested with plugins for files "
                "alone. Use the plugin POSIX, or mooncake."
            )
        self._agent_lock = threading.Lock()
        whole = [
            (t.data_ptr(), t.numel() * t.element_size()) for t in page_parts.tensors(mem_pool_host)
        ]
        self._pool_memory = [range(start, start + size) for start, size in whole]
        with self._agent_lock:
            self.agent.register_memory([(*each, 0, "") for each in whole], "DRAM")
        described = page_parts.describe(mem_pool_host)
        self.keep(
            mem_pool_host,
            (page_parts.apart if self.is_zero_copy else page_parts.together)(described),
        )

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        key: str = self._get_suffixed_key(page_hash)
        return f"{key}_{value.label}" if value.label else key

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        return [_size(path) == size for path, size in zip(self._paths(keys), sizes, strict=True)]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        there = self.has_values(keys, [view.numel() for view in memory])
        found = [at for at, good in enumerate(there) if good]
        paths, views = self._paths([keys[at] for at in found]), [memory[at] for at in found]
        try:
            done = bool(found) and self._transfer("READ", views, paths)
        except FileNotFoundError:  # removed since
            done = False
        if not done:
            return [0] * len(keys)
        return [view.numel() if good else 0 for view, good in zip(memory, there, strict=True)]

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        paths = self._paths(keys)
        beside = [f"{path}.{uuid.uuid4().hex}" for path in paths]
        try:
            moved = self._transfer("WRITE", memory, beside)
            # Of a write that ended early, as on a file system that is full, NIXL 1.0 says that it
            # is done.
            done = [
                moved and _size(source) == view.numel()
                for source, view in zip(beside, memory, strict=True)
            ]
            for good, source, path in zip(done, beside, paths, strict=True):
                if good:
                    os.replace(source, path)
        finally:
            for source in beside:
                with contextlib.suppress(OSError):
                    os.unlink(source)
        return done

    def _paths(self, keys: list[str]) -> list[str]:
        return [self.file_manager.get_file_path(key) for key in keys]

    def _transfer(self, direction: str, memory: list[torch.Tensor], paths: list[str]) -> bool:
        """Move all, or say that it did not work; ends when nothing moves any more."""
        local = [(view.data_ptr(), view.numel(), 0) for view in memory]
        own = [
            (address, size, 0, "")
            for address, size, _ in local
            if not any(address in span for span in self._pool_memory)
        ]
        with contextlib.ExitStack() as stack:
            files = stack.enter_context(_opened(paths, create=direction == "WRITE"))
            remote = [(0, each[1], file) for each, file in zip(local, files, strict=True)]
            named = [(*each, "") for each in remote]
            stack.enter_context(self._registered(named, "FILE"))
            stack.enter_context(self._registered(own, "DRAM"))
            with self._agent_lock:
                handle = self.agent.initialize_xfer(
                    direction,
                    self.agent.get_xfer_descs(local, "DRAM"),
                    self.agent.get_xfer_descs(remote, "FILE"),
                    self.agent_name,
                )
                stack.callback(self._release, handle)
                state = self.agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                time.sleep(_POLL)
                with self._agent_lock:
                    state = self.agent.check_xfer_state(handle)  # raises in NIXL 1.5
        return bool(state == "DONE")

    def _release(self, handle: Any) -> None:
        with self._agent_lock:
            self.agent.release_xfer_handle(handle)

    @contextlib.contextmanager
    def _registered(self, regions: list[tuple[int, int, int, str]], kind: str) -> Iterator[None]:
        if not regions:
            yield
            return
        with self._agent_lock:
            registered = self.agent.register_memory(regions, kind)
        try:
            yield
        finally:
            with self._agent_lock:
                self.agent.deregister_memory(registered)


@contextlib.contextmanager
def _opened(paths: list[str], create: bool) -> Iterator[list[int]]:
    """File descriptors, closed at the end. What is read is not created: of a read from an empty
    file NIXL 1.0 says that it is done, and whatever the memory held before would be the page."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            files.append(os.open(path, flags, 0o644))
            stack.callback(os.close, files[-1])
        yield files

"""NIXL's storage plugins: every value a file or an object."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    class _Base(PartStore, HiCacheNixl):
        pass

else:
    _Base = PartStore

#: Seconds between two looks at a transfer, as SGLang has it.
_POLL = 0.0001


class NixlParts(_Base):
    """The host tensors are registered once; a file is there when it has its full length, is written
    beside its place and renamed, and nothing stays open or registered after a transfer."""

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)  # sets is_zero_copy from the layout
        if not is_stage(mem_pool_host):
            return
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
        if self._in_files():
            paths = [self.file_manager.get_file_path(key) for key in keys]
            return [_size(path) == size for path, size in zip(paths, sizes, strict=True)]
        asked = [(0, 0, 0, key) for key in keys]
        with self._agent_lock:
            found = self.agent.query_memory(asked, self.backend_selector.backend_name, "OBJ")
        return [each is not None for each in found]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        there = self.has_values(keys, [view.numel() for view in memory])
        found = [at for at, good in enumerate(there) if good]
        targets = [keys[at] for at in found]
        if self._in_files():
            targets = [self.file_manager.get_file_path(key) for key in targets]
        views = [memory[at] for at in found]
        if not found or not self._transfer("READ", views, targets):
            return [0] * len(keys)
        return [view.numel() if good else 0 for view, good in zip(memory, there, strict=True)]

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        if not self._in_files():
            return [self._transfer("WRITE", memory, keys)] * len(keys)
        paths = [self.file_manager.get_file_path(key) for key in keys]
        beside = [f"{path}.{uuid.uuid4().hex}" for path in paths]
        try:
            done = self._transfer("WRITE", memory, beside)
            if done:
                for source, path in zip(beside, paths, strict=True):
                    os.replace(source, path)
        finally:
            for source in beside:
                with contextlib.suppress(OSError):
                    os.unlink(source)
        return [done] * len(keys)

    def _in_files(self) -> bool:
        return bool(self.backend_selector.mem_type == "FILE")

    def _transfer(self, direction: str, memory: list[torch.Tensor], targets: list[str]) -> bool:
        """Move all, or say that it did not work; ends when nothing moves any more."""
        local = [(view.data_ptr(), view.numel(), 0) for view in memory]
        own = [
            (address, size, 0, "")
            for address, size, _ in local
            if not any(address in span for span in self._pool_memory)
        ]
        with contextlib.ExitStack() as stack:
            ids = stack.enter_context(_opened(targets)) if self._in_files() else [0] * len(targets)
            names = [""] * len(targets) if self._in_files() else targets
            kind = self.backend_selector.mem_type
            remote = [(0, each[1], device) for each, device in zip(local, ids, strict=True)]
            named = [(*each, name) for each, name in zip(remote, names, strict=True)]
            stack.enter_context(self._registered(named, kind))
            stack.enter_context(self._registered(own, "DRAM"))
            with self._agent_lock:
                handle = self.agent.initialize_xfer(
                    direction,
                    self.agent.get_xfer_descs(local, "DRAM"),
                    self.agent.get_xfer_descs(remote, kind),
                    self.agent_name,
                )
                state = self.agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                time.sleep(_POLL)
                with self._agent_lock:
                    state = self.agent.check_xfer_state(handle)
            with self._agent_lock:
                self.agent.release_xfer_handle(handle)
        return bool(state == "DONE")

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
def _opened(paths: list[str]) -> Iterator[list[int]]:
    """File descriptors, closed at the end."""
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            files.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
            stack.callback(os.close, files[-1])
        yield files


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return None

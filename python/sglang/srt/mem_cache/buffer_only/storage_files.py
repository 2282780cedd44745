"""Backends that keep values in files, objects or slots of a file: SGLang's ``file``, NIXL's storage
plugins, and HF3FS."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, StoreError, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile
    from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    class _File(PartStore, HiCacheFile):
        pass

    class _Nixl(PartStore, HiCacheNixl):
        pass

    class _Hf3fs(PartStore, HiCacheHF3FS):
        pass

else:
    _File = _Nixl = _Hf3fs = PartStore


class FileParts(_File):
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


#: Seconds between two looks at a transfer, as SGLang has it.
_POLL = 0.0001


class NixlParts(_Nixl):
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


class Hf3fsParts(_Hf3fs):
    """K and V have a slot each, as with SGLang; all else of a page shares one slot, since SGLang
    makes slots as large as that."""

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)  # sets is_zero_copy from the layout
        if not is_stage(mem_pool_host):
            return
        described = page_parts.describe(mem_pool_host)
        split = self.is_zero_copy and not self.is_mla_model
        values = page_parts.apart(described) if split else page_parts.packed(described)
        largest = max(value.size for value in values)
        if largest > self.bytes_per_page:
            raise ValueError(
                f"HF3FS slots of {self.bytes_per_page} bytes do not hold the {largest} bytes of a "
                f"value of layout {mem_pool_host.layout} (--hicache-mem-layout)"
            )
        self.keep(mem_pool_host, values)

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        return f"{page_hash}-{value.label}" if value.label else page_hash

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        found: list[bool] = self.metadata_client.exists(self.rank, keys)
        return found

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        slots = self._slots(keys)
        found = [at for at, slot in enumerate(slots) if slot is not None]
        counts = [0] * len(keys)
        read = self._transfer(
            "batch_read", [slots[at] for at in found], [memory[at] for at in found]
        )
        for at, count in zip(found, read, strict=True):
            counts[at] = count
        # Slots are given to other keys when the file is full: what moved meanwhile is not ours.
        return [
            count if count and now == slot else 0
            for count, now, slot in zip(counts, self._slots(keys), slots, strict=True)
        ]

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        if self.skip_backup:  # the first rank writes for all
            return [True] * len(keys)
        reserved = self.metadata_client.reserve_and_allocate_page_indices(
            self.rank, [(key, "") for key in keys]
        )
        if len(reserved) != len(keys):
            raise StoreError(f"{len(reserved)} slots reserved for {len(keys)} values")
        done = [written for written, _ in reserved]
        wanted = [at for at, (written, slot) in enumerate(reserved) if not written and slot != -1]
        slots = {at: reserved[at][1] for at in wanted}
        try:
            counts = self._transfer(
                "batch_write", list(slots.values()), [memory[at] for at in wanted]
            )
            for at, count in zip(wanted, counts, strict=True):
                done[at] = count == memory[at].numel()
        finally:
            self.metadata_client.confirm_write(
                self.rank,
                [(keys[at], slot) for at, slot in slots.items() if done[at]],
                [slot for at, slot in slots.items() if not done[at]],
            )
        return done

    def _slots(self, keys: list[str]) -> list[Any]:
        slots: list[Any] = self.metadata_client.get_page_indices(self.rank, keys)
        if len(slots) != len(keys):
            raise StoreError(f"{len(slots)} slots for {len(keys)} values")
        return slots

    def _transfer(
        self, method: str, slots: Sequence[Any], memory: Sequence[torch.Tensor]
    ) -> list[int]:
        """Bytes moved between each slot and its memory; ``entries`` of them a request."""
        offsets = [slot * self.bytes_per_page for slot in slots]
        batches = [
            self.executor.submit(
                getattr(self.clients[self.ac.next()], method),
                offsets[at : at + self.entries],
                list(memory[at : at + self.entries]),
            )
            for at in range(0, len(offsets), self.entries)
        ]
        # All have to end before this does: until then they use the memory.
        moved: list[int] = []
        errors = [error for batch in batches if (error := batch.exception()) is not None]
        if errors:
            raise errors[0]
        for batch in batches:
            moved.extend(batch.result())
        return moved

"""Storage backends on the parts of a page: what they share, and the factory that puts them on.

Only on the backends that a staging buffer uses (``is_stage`` is true on its host pool); elsewhere
they are SGLang's own. Not by rows of the replacement table: their modules are all imported at
start, and a backend's module may need a client library that most machines do not have.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any  # Any: SGLang's, handed on; what a backend answers

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.patchset.combine import combine
from sglang.srt.patchset.guard import mismatches

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
else:
    HiCacheStorage = object
    StorageBackendFactory = object


class StoreError(Exception):
    """A store's answer that says nothing about the keys that it was asked for."""


class PartStore(HiCacheStorage):
    """A storage backend that keeps values of pages; SGLang's own unless the host pool is a staging
    buffer.

    A backend says how it lays out a page (``keep``), names a value (``value_key``), and has, gets
    and puts values; what is folded into pages, copied or skipped is decided here.
    """

    #: Values of a page in their order; empty: everything goes SGLang's own way.
    page_values: tuple[page_parts.Value, ...] = ()
    #: Called for every value that was shorter in the store than it must be.
    on_short: Callable[[], None] | None = None
    part_pool: HostKVCache

    def keep(self, pool: HostKVCache, values: Sequence[page_parts.Value]) -> None:
        """Take over if ``pool`` is a staging buffer."""
        self.part_pool = pool
        self.page_values = tuple(values)

    # ---- what a backend answers ----

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        """The name of a value of a page; SGLang's own where it knows the value."""
        raise NotImplementedError

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        """Which keys are there, with ``sizes`` bytes where the backend can tell.

        Raises:
            StoreError: it cannot be said.
        """
        raise NotImplementedError

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        """Read values into ``memory`` (1-D uint8, of the size that each must have); returns how
        many bytes were read of each, zero or less for one that is not there."""
        raise NotImplementedError

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        """Write values that are not there; returns which are there now, whoever wrote them."""
        raise NotImplementedError

    # ---- SGLang's interface ----

    @override
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        if not self.page_values:
            return int(super().batch_exists(keys, extra_info))
        names = self._names(keys)
        found = self.has_values(names, page_parts.sizes(self.page_values, len(keys)))
        return page_parts.leading(self._fold(found, len(keys)))

    @override
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        if not self.page_values:
            return super().batch_get_v1(keys, host_indices, extra_info)
        pages = self._pages(keys, host_indices)
        slots = [(value, page) for page in pages for value in self.page_values]
        memory = [
            value.memory(page) if value.in_place else torch.empty(value.size, dtype=torch.uint8)
            for value, page in slots
        ]
        counts = self.get_values(self._names(keys), memory)
        self._same_length(counts, slots)
        whole = [
            self._is_whole(value, count) for (value, _), count in zip(slots, counts, strict=True)
        ]
        for (value, page), content, good in zip(slots, memory, whole, strict=True):
            if good and not value.in_place:
                value.scatter(page, content)
        return self._fold(whole, len(keys))

    @override
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        if not self.page_values:
            return super().batch_set_v1(keys, host_indices, extra_info)
        pages = self._pages(keys, host_indices)
        slots = [(value, page) for page in pages for value in self.page_values]
        names = self._names(keys)
        there = self.has_values(names, page_parts.sizes(self.page_values, len(keys)))
        self._same_length(there, slots)
        absent = [at for at, found in enumerate(there) if not found]
        if absent:
            memory = [
                value.memory(page) if value.in_place else value.gather(page)
                for value, page in (slots[at] for at in absent)
            ]
            done = self.put_values([names[at] for at in absent], memory)
            self._same_length(done, absent)
            for at, good in zip(absent, done, strict=True):
                there[at] = good
        return self._fold(there, len(keys))

    # ---- inside ----

    def _names(self, hashes: list[str]) -> list[str]:
        return page_parts.keys(self.page_values, hashes, self.value_key)

    def _pages(self, keys: list[str], host_indices: torch.Tensor) -> list[int]:
        pages = page_parts.page_numbers(host_indices, self.part_pool.page_size)
        if len(pages) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(pages)} host pages")
        return pages

    def _fold(self, found: Sequence[bool], count: int) -> list[bool]:
        return page_parts.fold(found, len(self.page_values), count)

    def _is_whole(self, value: page_parts.Value, count: int) -> bool:
        if 0 < count != value.size and self.on_short is not None:
            self.on_short()
        return count == value.size

    @staticmethod
    def _same_length(results: Sequence[object], asked: Sequence[object]) -> None:
        if len(results) != len(asked):
            raise StoreError(f"{len(results)} results for {len(asked)} values")


def is_stage(pool: object) -> bool:
    """Whether a host pool is HiCache's stage (``--hicache-host-memory-mode buffer_only``)."""
    return bool(getattr(pool, "is_stage", False))


#: Values of ``--hicache-storage-backend``, with module and name of the mixin.
MIXINS = {
    "file": ("storage_files", "FileParts"),
    "mooncake": ("storage_mooncake", "MooncakeParts"),
}

#: Calls that move pages of the host pool. SGLang's base class has them without a body.
CALLS = ("batch_get_v1", "batch_set_v1")


class PartsFactory(StorageBackendFactory):
    """For ``StorageBackendFactory``."""

    @classmethod
    @override
    def create_backend(
        cls, backend_name: str, storage_config: Any, mem_pool_host: Any, **kwargs: Any
    ) -> Any:
        backend = super().create_backend(backend_name, storage_config, mem_pool_host, **kwargs)
        if is_stage(mem_pool_host):
            _refuse_lost_parts(backend_name, mem_pool_host)
            _refuse_missing_calls(backend_name, type(backend))
        return backend

    @classmethod
    @override
    def _create_builtin_backend(
        cls, backend_name: str, backend_class: Any, storage_config: Any, mem_pool_host: Any
    ) -> Any:
        if backend_name not in MIXINS or not is_stage(mem_pool_host):
            return super()._create_builtin_backend(
                backend_name, backend_class, storage_config, mem_pool_host
            )
        return super()._create_builtin_backend(
            backend_name, _with_parts(backend_name, backend_class), storage_config, mem_pool_host
        )


def _refuse_lost_parts(name: str, pool: HostKVCache) -> None:
    extra = [part.label for part in page_parts.describe(pool) if part.extra]
    if extra and name not in MIXINS:
        raise ValueError(
            f"--hicache-storage-backend {name} does not keep all parts of a page of this model "
            f"({', '.join(extra)}); use one of {', '.join(MIXINS)}"
        )


def _refuse_missing_calls(name: str, backend: type) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as Stock

    missing = [call for call in CALLS if getattr(backend, call) is getattr(Stock, call)]
    if missing:
        raise ValueError(
            f"--hicache-storage-backend {name}: {backend.__qualname__} does not implement "
            f"{' and '.join(missing)}, with which --hicache-host-memory-mode buffer_only moves "
            "pages. Implement them, or use --hicache-host-memory-mode cache"
        )


def _with_parts(name: str, stock: type) -> type:
    module, mixin_name = MIXINS[name]
    mixin = getattr(importlib.import_module(f"{__package__}.{module}"), mixin_name)
    problems = mismatches(stock, mixin)
    if problems:
        raise RuntimeError(
            f"--hicache-storage-backend {name} with --hicache-host-memory-mode buffer_only: "
            f"{'; '.join(problems)}"
        )
    return combine(stock, mixin)

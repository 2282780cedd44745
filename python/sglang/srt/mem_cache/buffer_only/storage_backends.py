"""Storage backends on the parts of a page: what they share, SGLang's ``file`` and ``mooncake``, and
the factory that puts them on.

Only on the backends that a staging buffer uses (``is_stage`` is true on its host pool); elsewhere
they are SGLang's own. Not by rows of the replacement table: their modules are all imported at
start, and a backend's module may need a client library that most machines do not have.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any  # Any: SGLang's, handed on; what a backend answers

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import host_pool
from sglang.srt.patchset.combine import combine, mismatches

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
else:
    HiCacheStorage = object
    StorageBackendFactory = object

logger = logging.getLogger(__name__)


class StoreError(Exception):
    """A store's answer that says nothing about the keys that it was asked for."""


def is_stage(pool: object) -> bool:
    """Whether a host pool is HiCache's stage (``--hicache-host-memory-mode buffer_only``)."""
    return bool(getattr(pool, "is_stage", False))


class PartStore(HiCacheStorage):
    """A storage backend that keeps values of pages; SGLang's own unless the host pool is a staging
    buffer.

    A backend says how it lays out a page (``page_values``), names a value (``value_key``), and has,
    gets and puts values; what is folded into pages, copied or skipped is decided here.
    """

    #: Values of a page in their order; empty: everything goes SGLang's own way.
    page_values: tuple[host_pool.Part, ...] = ()

    # ---- what a backend answers ----

    def value_key(self, page_hash: str, value: host_pool.Part) -> str:
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
        _, there = self._look_up(keys)
        return host_pool.leading(host_pool.fold(there, len(self.page_values), len(keys)))

    @override
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        if not self.page_values:
            return super().batch_get_v1(keys, host_indices, extra_info)
        slots = self._slots(keys, host_indices)
        memory = [
            value.gather(page) if value.in_place else torch.empty(value.size, dtype=torch.uint8)
            for value, page in slots
        ]
        whole = []
        counts = self.get_values(self._names(keys), memory)
        for (value, page), content, count in zip(slots, memory, counts, strict=True):
            whole.append(count == value.size)
            if count == value.size and not value.in_place:
                value.scatter(page, content)
        return host_pool.fold(whole, len(self.page_values), len(keys))

    @override
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        if not self.page_values:
            return super().batch_set_v1(keys, host_indices, extra_info)
        slots = self._slots(keys, host_indices)
        names, there = self._look_up(keys)
        absent = [
            (at, value, page)
            for at, ((value, page), found) in enumerate(zip(slots, there, strict=True))
            if not found
        ]
        if absent:
            memory = [value.gather(page) for _, value, page in absent]
            done = self.put_values([names[at] for at, _, _ in absent], memory)
            for (at, _, _), good in zip(absent, done, strict=True):
                there[at] = good
        return host_pool.fold(there, len(self.page_values), len(keys))

    # ---- inside ----

    def _names(self, keys: list[str]) -> list[str]:
        return [
            self.value_key(page_hash, value) for page_hash in keys for value in self.page_values
        ]

    def _look_up(self, keys: list[str]) -> tuple[list[str], list[bool]]:
        """Names of all values of all pages, and which are there."""
        names = self._names(keys)
        return names, self.has_values(names, [value.size for value in self.page_values] * len(keys))

    def _slots(
        self, keys: list[str], host_indices: torch.Tensor
    ) -> list[tuple[host_pool.Part, int]]:
        """All values of all pages, with the host page of each."""
        pages = host_pool.page_numbers(host_indices, self.mem_pool_host.page_size)
        if len(pages) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(pages)} host pages")
        return [(value, page) for page in pages for value in self.page_values]


# ---- file ----

#: Seconds after which nobody writes to a temporary file any more.
STALE_S = 600.0
#: Longest end of a file's name that SGLang makes of model and rank, in bytes. Most file systems
#: allow 255 for a name: a page's key has 64, a temporary name 33 and a part's label a few.
MAX_SUFFIX_BYTES = 128


class FileParts(PartStore):
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
        # SGLang's class is not typed here.
        if len(suffix := vars(self)["config_suffix"].encode()) > MAX_SUFFIX_BYTES:
            self.config_suffix = f"_{hashlib.sha256(suffix).hexdigest()}"
        # Of writers that were killed; those of others that run are younger.
        for path in glob.iglob(os.path.join(glob.escape(folder), f"*.bin.{'[0-9a-f]' * 32}")):
            with contextlib.suppress(OSError):
                if os.path.getmtime(path) < time.time() - STALE_S:
                    os.unlink(path)

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if is_stage(mem_pool_host):
            self.page_values = host_pool.together(host_pool.describe(mem_pool_host))

    def value_key(self, page_hash: str, value: host_pool.Part) -> str:
        return self._get_component_path(page_hash, value.label or None)

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        found = _readable(keys, os.path.getsize)
        return [there == size for there, size in zip(found, sizes, strict=True)]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        views = iter(memory)
        return _readable(keys, lambda path: _read(path, next(views)))

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        for path, view in zip(keys, memory, strict=True):
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
        return [True] * len(keys)


def _readable(paths: list[str], look: Callable[[str], int]) -> list[int]:
    """``look`` of each path; 0 for a file that is not there or cannot be read.

    Raises:
        OSError: none of them can be read, which says nothing about the files.
    """
    found, errors = [], list[OSError]()
    for path in paths:
        try:
            found.append(look(path))
        except OSError as error:
            found.append(0)
            if not isinstance(error, FileNotFoundError):
                errors.append(error)
    if errors and len(errors) == len(paths):
        raise errors[0]
    return found


def _read(path: str, view: torch.Tensor) -> int:
    """Bytes read; the file's own length where that is another."""
    with open(path, "rb", buffering=0) as file:
        # Of the open file: at its path there may be another one a moment later.
        size = os.fstat(file.fileno()).st_size
        return size if size != view.numel() else file.readinto(memoryview(view.numpy())) or 0


# ---- mooncake ----

#: The master gives out the memory of a server that was killed until its ``--client_ttl``, 10 s by
#: default, has passed.
WARMUP_S = 20.0
#: Between two lines about writes that were refused.
LOG_EVERY_S = 30.0


class MooncakeParts(PartStore):
    """All host tensors are registered, and a value of another length than asked is a miss."""

    _next_log = 0.0

    @override
    def warmup(self) -> None:
        # SGLang's first write fails if the master puts it where a killed server was; this one may
        # be just that server, started again.
        deadline = time.monotonic() + WARMUP_S
        while True:
            try:
                super().warmup()
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            logger.warning(
                "Mooncake does not store what this server writes; the server retries in 1 s"
            )
            time.sleep(1.0)

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)  # registers the first tensor
        if not is_stage(mem_pool_host):
            return
        for tensor in host_pool.tensors(mem_pool_host)[1:]:
            self.register_buffer(tensor)
        self.page_values = host_pool.describe(mem_pool_host, self.split_factor or 1)

    def value_key(self, page_hash: str, value: host_pool.Part) -> str:
        suffix = self.mla_suffix if value.shared else self.mha_suffix
        if self.split_factor and not value.shared:
            suffix = suffix[value.group]
        tag = "" if self.extra_backend_tag is None else f"{self.extra_backend_tag}_"
        return f"{tag}{page_hash}_{suffix}_{value.label}"

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        codes = self._batch_exist(keys)
        failed = next((code for code in codes if code < 0), None)
        if failed is not None:  # no answer, for instance without its master
            raise StoreError(f"Mooncake error {failed}")
        return [code == 1 for code in codes]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        return self._move("prefetch", self._get_batch_zero_copy_impl, keys, memory)

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        codes = self._move("backup", self._put_batch_zero_copy_impl, keys, memory)
        # Failed writes cost hits, whatever the reason; the codes are what tells full from gone.
        refused, now = [code for code in codes if code], time.monotonic()
        if refused and now >= self._next_log:
            self._next_log = now + LOG_EVERY_S
            logger.warning(
                "Mooncake refused %d of %d values, error codes %s: their pages are not stored, and "
                "are computed again once they leave the device (logged at most every %.0f s)",
                *(len(refused), len(codes), sorted(set(refused)), LOG_EVERY_S),
            )
        return [code == 0 for code in codes]

    def _move(
        self,
        way: str,
        call: Callable[[list[str], list[int], list[int]], Sequence[int]],
        keys: list[str],
        memory: Sequence[torch.Tensor],
    ) -> list[int]:
        """``call``, timed for SGLang's metrics, which name the ``way`` "prefetch" or "backup"."""
        start, sizes = time.perf_counter(), [view.numel() for view in memory]
        answers = call(keys, [view.data_ptr() for view in memory], sizes)
        if self.enable_storage_metrics:
            rate = sum(sizes) / (1 << 30) / max(time.perf_counter() - start, 1e-9)
            getattr(self, f"{way}_pgs").append(len(memory) / len(self.page_values))
            getattr(self, f"{way}_bandwidth").append(rate)
        return list(answers)


# ---- the factory ----

#: By the values of ``--hicache-storage-backend``.
MIXINS: dict[str, type[PartStore]] = {"file": FileParts, "mooncake": MooncakeParts}
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
        if not is_stage(mem_pool_host):
            return backend
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as Stock

        extra = [part.label for part in host_pool.describe(mem_pool_host) if part.extra]
        if extra and backend_name not in MIXINS:
            raise ValueError(
                f"--hicache-storage-backend {backend_name} does not keep all parts of a page of "
                f"this model ({', '.join(extra)}); use one of {', '.join(MIXINS)}"
            )
        missing = [c for c in CALLS if getattr(type(backend), c) is getattr(Stock, c)]
        if missing:
            raise ValueError(
                f"--hicache-storage-backend {backend_name}: {type(backend).__qualname__} does not "
                f"implement {' and '.join(missing)}, with which --hicache-host-memory-mode "
                "buffer_only moves pages. Implement them, or use --hicache-host-memory-mode cache"
            )
        return backend

    @classmethod
    @override
    def _create_builtin_backend(
        cls, backend_name: str, backend_class: Any, storage_config: Any, mem_pool_host: Any
    ) -> Any:
        if backend_name in MIXINS and is_stage(mem_pool_host):
            mixin = MIXINS[backend_name]
            problems = mismatches(backend_class, mixin)
            if problems:
                raise RuntimeError(
                    f"--hicache-storage-backend {backend_name} with --hicache-host-memory-mode "
                    f"buffer_only: {'; '.join(problems)}"
                )
            backend_class = combine(backend_class, mixin)
        return super()._create_builtin_backend(
            backend_name, backend_class, storage_config, mem_pool_host
        )

"""Storage backends that keep the parts of a page: their base, mixins for SGLang's ``file`` and
``mooncake``, and the factory that applies the mixins.

The mixins act only on backends of a staging buffer (``is_staging`` is true on its host pool); other
backends stay stock. They are not rows of the replacement table, because the table imports every
module at start, and a backend's module may need a client library that is not installed.

Contract: threads of ``StoreClient`` call the backends, several at a time. ``page_values`` is set
once, at the registration of the host pool.
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
from typing import TYPE_CHECKING, Any  # Any: SGLang's arguments; a backend's answers

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
    """Raised if a store's answer says nothing about the keys in question."""


def is_staging(pool: object) -> bool:
    """Return True if ``pool`` is a staging buffer (``--hicache-host-memory-mode buffer_only``)."""
    return bool(getattr(pool, "is_staging", False))


class PartStore(HiCacheStorage):
    """A storage backend that keeps values of pages. Stock unless the host pool is a staging buffer.

    A subclass defines the layout of a page (``page_values``) and the name of a value
    (``value_key``), and queries, gets and puts values. This class maps pages to values.
    """

    #: Values of a page in order; empty: stock behaviour.
    page_values: tuple[host_pool.PagePart, ...] = ()

    # ---- implemented by a backend ----

    def value_key(self, page_hash: str, value: host_pool.PagePart) -> str:
        """Return the key of a value of a page: SGLang's own key, if SGLang has the value."""
        raise NotImplementedError

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        """Return for each key True if it exists, with its size in bytes if the backend can tell.

        Raises:
            StoreError: the store gave no answer.
        """
        raise NotImplementedError

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        """Read values into ``memory`` (1-D uint8, of the exact size of each). Return the bytes read
        of each; zero or less if it does not exist."""
        raise NotImplementedError

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        """Write missing values. Return for each True if it exists now, written by any server."""
        raise NotImplementedError

    # ---- SGLang's interface ----

    @override
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        if not self.page_values:
            return int(super().batch_exists(keys, extra_info))
        _, exists = self._look_up(keys)
        return host_pool.leading(host_pool.fold(exists, len(self.page_values), len(keys)))

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
        is_complete = []
        counts = self.get_values(self._names(keys), memory)
        for (value, page), content, count in zip(slots, memory, counts, strict=True):
            is_complete.append(count == value.size)
            if count == value.size and not value.in_place:
                value.scatter(page, content)
        return host_pool.fold(is_complete, len(self.page_values), len(keys))

    @override
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        if not self.page_values:
            return super().batch_set_v1(keys, host_indices, extra_info)
        slots = self._slots(keys, host_indices)
        names, exists = self._look_up(keys)
        absent = [
            (index, value, page)
            for index, ((value, page), found) in enumerate(zip(slots, exists, strict=True))
            if not found
        ]
        if absent:
            memory = [value.gather(page) for _, value, page in absent]
            results = self.put_values([names[index] for index, _, _ in absent], memory)
            for (index, _, _), is_stored in zip(absent, results, strict=True):
                exists[index] = is_stored
        return host_pool.fold(exists, len(self.page_values), len(keys))

    # ---- inside ----

    def _names(self, keys: list[str]) -> list[str]:
        return [
            self.value_key(page_hash, value) for page_hash in keys for value in self.page_values
        ]

    def _look_up(self, keys: list[str]) -> tuple[list[str], list[bool]]:
        """Return the names of all values of all pages, and for each True if it exists."""
        names = self._names(keys)
        return names, self.has_values(names, [value.size for value in self.page_values] * len(keys))

    def _slots(
        self, keys: list[str], host_indices: torch.Tensor
    ) -> list[tuple[host_pool.PagePart, int]]:
        """Return all values of all pages, each with its host page."""
        pages = host_pool.page_numbers(host_indices, self.mem_pool_host.page_size)
        if len(pages) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(pages)} host pages")
        return [(value, page) for page in pages for value in self.page_values]


# ---- file ----

#: Age at which the writer of a temporary file must have died.
STALE_S = 600.0
#: Maximum bytes of the suffix that SGLang makes of model and rank. Most file systems allow 255
#: bytes for a name: a page's key has 64, a temporary suffix 33 and a part's label a few.
MAX_SUFFIX_BYTES = 128


class FileParts(PartStore):
    """Mixin for SGLang's ``file`` backend: writes are atomic, and a file exists only at its full
    length, so that a file whose writer died is written again."""

    @override
    def __init__(
        self, storage_config: HiCacheStorageConfig, file_path: str = "/tmp/hicache"
    ) -> None:
        from sglang.srt.environ import envs

        # Created here, because SGLang checks and then creates it: of two servers that start at the
        # same time, one would fail.
        folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() or file_path
        os.makedirs(folder, exist_ok=True)
        super().__init__(storage_config, file_path)
        # By ``vars``, because SGLang's class does not declare the attribute.
        if len(suffix := vars(self)["config_suffix"].encode()) > MAX_SUFFIX_BYTES:
            self.config_suffix = f"_{hashlib.sha256(suffix).hexdigest()}"
        # Remove temporary files of killed writers; those of running writers are younger.
        for path in glob.iglob(os.path.join(glob.escape(folder), f"*.bin.{'[0-9a-f]' * 32}")):
            with contextlib.suppress(OSError):
                if os.path.getmtime(path) < time.time() - STALE_S:
                    os.unlink(path)

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if is_staging(mem_pool_host):
            self.page_values = host_pool.together(host_pool.describe(mem_pool_host))

    def value_key(self, page_hash: str, value: host_pool.PagePart) -> str:
        return self._get_component_path(page_hash, value.label or None)

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        actual_sizes = _readable(keys, os.path.getsize)
        return [actual == size for actual, size in zip(actual_sizes, sizes, strict=True)]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        views = iter(memory)
        return _readable(keys, lambda path: _read(path, next(views)))

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        for path, view in zip(keys, memory, strict=True):
            temporary = f"{path}.{uuid.uuid4().hex}"
            try:
                with open(temporary, "wb", buffering=0) as file:
                    content = memoryview(view.numpy())
                    while content:
                        content = content[file.write(content) :]
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        return [True] * len(keys)


def _readable(paths: list[str], access: Callable[[str], int]) -> list[int]:
    """Return ``access(path)`` of each path; 0 for a file that is missing or unreadable.

    Raises:
        OSError: no file is readable, which is a fault of the store and not a miss.
    """
    results, errors = [], list[OSError]()
    for path in paths:
        try:
            results.append(access(path))
        except OSError as error:
            results.append(0)
            if not isinstance(error, FileNotFoundError):
                errors.append(error)
    if errors and len(errors) == len(paths):
        raise errors[0]
    return results


def _read(path: str, view: torch.Tensor) -> int:
    """Read a file into ``view``. Return the bytes read, or the file's length if it differs."""
    with open(path, "rb", buffering=0) as file:
        # Size of the open file, because the path may be replaced at any time.
        size = os.fstat(file.fileno()).st_size
        return size if size != view.numel() else file.readinto(memoryview(view.numpy())) or 0


# ---- mooncake ----

#: Longest retry of the warm-up, because the master allocates memory of a killed server until its
#: ``--client_ttl`` (default 10 s) has passed.
WARMUP_S = 20.0
#: Minimum interval between two log lines about refused writes.
LOG_EVERY_S = 30.0


class MooncakeParts(PartStore):
    """Mixin for SGLang's ``mooncake`` backend: registers all host tensors and treats a value of a
    different length as a miss."""

    _next_log = 0.0

    @override
    def warmup(self) -> None:
        # SGLang's first write fails if the master allocates it on a killed server, which may be
        # this server before its restart.
        deadline = time.monotonic() + WARMUP_S
        while True:
            try:
                super().warmup()
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            logger.warning(
                "Mooncake does not store what this server writes; the server retries in 1 s. If "
                "this goes on, check Mooncake's master"
            )
            time.sleep(1.0)

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)  # registers the first tensor
        if not is_staging(mem_pool_host):
            return
        for tensor in host_pool.tensors(mem_pool_host)[1:]:
            self.register_buffer(tensor)
        self.page_values = host_pool.describe(mem_pool_host, self.split_factor or 1)

    def value_key(self, page_hash: str, value: host_pool.PagePart) -> str:
        suffix = self.mla_suffix if value.shared else self.mha_suffix
        if self.split_factor and not value.shared:
            suffix = suffix[value.group]
        tag = "" if self.extra_backend_tag is None else f"{self.extra_backend_tag}_"
        return f"{tag}{page_hash}_{suffix}_{value.label}"

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        codes = self._batch_exist(keys)
        failed = next((code for code in codes if code < 0), None)
        if failed is not None:  # for example, the master is not reachable
            raise StoreError(f"Mooncake error {failed}")
        return [code == 1 for code in codes]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        return self._move("prefetch", self._get_batch_zero_copy_impl, keys, memory)

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        codes = self._move("backup", self._put_batch_zero_copy_impl, keys, memory)
        # Log the codes, because only they tell a full store from a lost one.
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
        """Run ``call`` and time it for SGLang's metrics of ``way``, "prefetch" or "backup"."""
        start, sizes = time.perf_counter(), [view.numel() for view in memory]
        answers = call(keys, [view.data_ptr() for view in memory], sizes)
        if self.enable_storage_metrics:
            rate = sum(sizes) / (1 << 30) / max(time.perf_counter() - start, 1e-9)
            getattr(self, f"{way}_pgs").append(len(memory) / len(self.page_values))
            getattr(self, f"{way}_bandwidth").append(rate)
        return list(answers)


# ---- the factory ----

#: Value of ``--hicache-storage-backend`` -> mixin.
MIXINS: dict[str, type[PartStore]] = {"file": FileParts, "mooncake": MooncakeParts}
#: Calls that move pages of the host pool; SGLang's base class only declares them.
CALLS = ("batch_get_v1", "batch_set_v1")


class PartsFactory(StorageBackendFactory):
    """Mixin for ``StorageBackendFactory``."""

    @classmethod
    @override
    def create_backend(
        cls, backend_name: str, storage_config: Any, mem_pool_host: Any, **kwargs: Any
    ) -> Any:
        backend = super().create_backend(backend_name, storage_config, mem_pool_host, **kwargs)
        if not is_staging(mem_pool_host):
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
        if backend_name in MIXINS and is_staging(mem_pool_host):
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

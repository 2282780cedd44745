"""Puts the mixins on the backends that a stage uses, and on no others.

Not by rows of the replacement table: their modules are all imported at start, and a backend's
module may need a client library that most machines do not have.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import is_stage
from sglang.srt.patchset.combine import combine
from sglang.srt.patchset.guard import mismatches

if TYPE_CHECKING:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
else:
    StorageBackendFactory = object

#: Values of ``--hicache-storage-backend``, with module and name of the mixin.
MIXINS = {
    "file": ("storage_file", "FileParts"),
    "mooncake": ("storage_mooncake", "MooncakeParts"),
    "nixl": ("storage_nixl", "NixlParts"),
    "hf3fs": ("storage_hf3fs", "Hf3fsParts"),
    "eic": ("storage_eic", "EicParts"),
}


class PartsFactory(StorageBackendFactory):
    """For ``StorageBackendFactory``."""

    @classmethod
    @override
    def create_backend(
        cls, backend_name: str, storage_config: Any, mem_pool_host: Any, **kwargs: Any
    ) -> Any:
        if is_stage(mem_pool_host):
            _refuse_lost_parts(backend_name, mem_pool_host)
        return super().create_backend(backend_name, storage_config, mem_pool_host, **kwargs)

    @classmethod
    @override
    def _create_builtin_backend(
        cls, backend_name: str, backend_class: Any, storage_config: Any, mem_pool_host: Any
    ) -> Any:
        if backend_name not in MIXINS or not is_stage(mem_pool_host):
            return super()._create_builtin_backend(
                backend_name, backend_class, storage_config, mem_pool_host
            )
        combined = _with_parts(backend_name, backend_class)
        with _bound(backend_class, combined):
            return super()._create_builtin_backend(
                backend_name, combined, storage_config, mem_pool_host
            )


def _refuse_lost_parts(name: str, pool: Any) -> None:
    extra = [part.label for part in page_parts.describe(pool) if part.extra]
    if extra and name not in MIXINS:
        raise ValueError(
            f"--hicache-storage-backend {name} does not keep all parts of a page of this model "
            f"({', '.join(extra)}); use one of {', '.join(MIXINS)}"
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


@contextmanager
def _bound(stock: type, combined: type) -> Iterator[None]:
    """The backend's own module knows the class by its name: HF3FS makes its backend so."""
    module = sys.modules[stock.__module__]
    setattr(module, stock.__name__, combined)
    try:
        yield
    finally:
        setattr(module, stock.__name__, stock)

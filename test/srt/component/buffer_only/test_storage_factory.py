"""Which backends get our mixins: those of a stage, as SGLang's factory makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from component.buffer_only import backends
from component.buffer_only.host_pools import content, hashes, host_pool, slots
from component.buffer_only.scripted_store import ScriptedStore
from sglang.srt.mem_cache.buffer_only.storage_backends import PartsFactory
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

LAYOUT = "page_first_direct"


@pytest.fixture
def factory() -> Any:
    """SGLang's factory with our mixin."""
    return backends.combined(StorageBackendFactory, PartsFactory)


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))


def make(factory: Any, name: str, pool: Any, **extra: Any) -> Any:
    """As HiCache's controller does it."""
    store = factory.create_backend(name, backends.config(pool, extra_config=extra), pool)
    store.register_mem_pool_host(pool)
    return store


@pytest.mark.parametrize("kind", ["mha", "nsa"])
def test_a_stage_gets_the_mixins(factory: Any, kind: str) -> None:
    """Guards against a backend that is made some other way than by its class, and so would silently
    stay stock."""
    pool = host_pool(kind, LAYOUT)
    store = make(factory, "file", pool)
    assert store.page_values
    assert store.batch_set_v1(hashes(2), slots(1, 2)) == [True, True]
    assert store.batch_get_v1(hashes(2), slots(3, 4)) == [True, True]
    assert content(pool, 3) == content(pool, 1)


def test_a_cache_gets_stock_backends(factory: Any) -> None:
    """Guards against any change without our flag: not even the class differs."""
    store = make(factory, "file", host_pool("mha", LAYOUT, stage=False))
    assert type(store) is HiCacheFile


DYNAMIC = {
    "backend_name": "scripted",
    "module_path": "component.buffer_only.test_storage_factory",
    "class_name": "DynamicStore",
}


class DynamicStore(ScriptedStore):
    """A backend of somebody else."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__()


def test_backends_of_others_stay_as_they_are(factory: Any) -> None:
    """Guards against refusing backends that keep all there is to keep."""
    store = make(factory, "dynamic", host_pool("mha", LAYOUT), **DYNAMIC)
    assert type(store).__name__ == "DynamicStore"
    assert store.batch_set_v1(hashes(1), slots(1)) == [True]


def test_backends_of_others_are_refused_for_more_parts_than_they_know(factory: Any) -> None:
    """Guards against NSA pages that come back without their index."""
    with pytest.raises(ValueError, match="dynamic does not keep all parts .*index.*use one of"):
        make(factory, "dynamic", host_pool("nsa", LAYOUT), **DYNAMIC)


class OlderStore(DynamicStore):
    """One that has only the calls which move flat pages, besides the empty ones of its base."""

    batch_set_v1 = HiCacheStorage.batch_set_v1


def test_backends_without_the_calls_that_move_pages_are_refused(factory: Any) -> None:
    """Guards against a store whose reads and writes do nothing: SGLang's base class has these
    calls, without a body."""
    older = DYNAMIC | {"class_name": "OlderStore"}
    message = (
        "--hicache-storage-backend dynamic: OlderStore does not implement batch_set_v1, with "
        ".*--hicache-host-memory-mode buffer_only"
    )
    with pytest.raises(ValueError, match=message):
        make(factory, "dynamic", host_pool("mha", LAYOUT), **older)
    make(factory, "dynamic", host_pool("mha", LAYOUT, stage=False), **older)


def test_a_mixin_that_does_not_fit_is_refused(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an override that is silently dead with another release."""
    monkeypatch.delattr(HiCacheFile.__mro__[1], "batch_get_v1")
    with pytest.raises(RuntimeError, match="batch_get_v1 does not exist"):
        make(factory, "file", host_pool("mha", LAYOUT))

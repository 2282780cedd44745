"""Pages through the storage backends of this release: their content and keys; and the backends that
SGLang's factory makes for a stage."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from component.buffer_only import backends
from component.buffer_only.backends import (
    KINDS,
    LAYOUTS,
    PAGE,
    content,
    fill,
    hashes,
    host_pool,
    slots,
)
from component.buffer_only.scripted_store import ScriptedStore
from sglang.srt.mem_cache.buffer_only import host_pool as page_parts
from sglang.srt.mem_cache.buffer_only import storage_backends
from sglang.srt.mem_cache.buffer_only.storage_backends import PartsFactory
from sglang.srt.mem_cache.buffer_only.store_client import Fault, StoreClient
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

BACKENDS = ("file", "mooncake")
DIRECT = "page_first_direct"
COMBINATIONS = [
    (backend, kind, layout, PAGE)
    for backend in BACKENDS
    for kind in KINDS
    for layout in LAYOUTS
    if not (backend == "mooncake" and layout == "layer_first")  # refused by SGLang
]
COMBINATIONS += [
    (backend, kind, DIRECT, page)
    for backend in BACKENDS
    for kind in ("mha", "mla")
    for page in (1, 16)
]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Return a function that makes a backend by name; those of one test share an empty store."""
    client = backends.MooncakeClient()

    def build(backend: str, pool: Any) -> Any:
        if backend == "mooncake":
            return backends.mooncake(pool, client)
        return backends.file(pool, tmp_path)

    return build


@pytest.mark.parametrize(("backend", "kind", "layout", "page"), COMBINATIONS)
def test_every_byte_of_a_page_comes_back(
    make: Any, backend: str, kind: str, layout: str, page: int
) -> None:
    """Guards against parts of a page that a backend omits (the index of NSA), against pages in
    another page's place or in another order, and against a missing page that misplaces later pages,
    fails the whole batch, or is not noticed at all."""
    pool = host_pool(kind, layout, page=page)
    store = make(backend, pool)
    first, gone, last = hashes(3)
    written = [content(pool, number) for number in (4, 1)]
    assert store.batch_set_v1([first, last], slots(4, 1, page=page)) == [True, True]
    fill(pool, seed=9)
    untouched = content(pool, 0)
    counts = [store.batch_exists(keys) for keys in ([first, last, gone], [first, gone, last])]
    assert counts == [2, 1]
    answers = store.batch_get_v1([first, gone, last], slots(5, 2, 3, page=page))
    assert answers == [True, False, True]
    assert [content(pool, number) for number in (5, 3)] == written
    assert content(pool, 0) == untouched


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [(kind, layout, {}) for kind in ("mha", "mla") for layout in ("page_first", DIRECT)]
    + [("mha", "page_head", {"tp_lcm_size": 4, "should_split_heads": True})],
)
def test_mooncake_calls_are_those_of_sglang(
    kind: str, layout: str, changes: dict[str, Any]
) -> None:
    """Guards against keys, addresses or orders other than stock's, so that servers with and without
    a stage would not share pages; also if ranks store their heads separately, for servers with
    other numbers of ranks."""
    calls = {}
    for stage in (False, True):
        client, pool = backends.MooncakeClient(), host_pool(kind, layout, stage=stage)
        store = backends.mooncake(
            pool, client, rank=1, ranks=2, extra_config={"extra_backend_tag": "t"}, **changes
        )
        assert store.batch_set_v1(hashes(2), slots(4, 1)) == [True, True]
        if not changes:
            store.batch_get_v1(hashes(2), slots(4, 1))
            store.batch_exists(hashes(3))
        calls[stage] = backends.relative(client.calls, pool)
    assert calls[True] == calls[False]
    stats = store.get_stats()
    assert stats.backup_pgs == [2] and stats.prefetch_pgs == [2] * (not changes)
    assert len(calls[True][0][1]) == (8 if changes else 4 if kind == "mha" else 2)


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_shared_with_a_stock_server(make: Any, kind: str, layout: str) -> None:
    """Guards against another file format than that of SGLang's own backend."""
    stock, staged = host_pool(kind, layout, stage=False), host_pool(kind, layout)
    fill(staged, seed=7)
    stock_store, staged_store = make("file", stock), make("file", staged)
    first, second = hashes(2)
    assert stock_store.batch_set([first], [stock.get_data_page(PAGE)])
    assert staged_store.batch_get_v1([first], slots(2)) == [True]
    assert content(staged, 2) == content(stock, 1)
    assert staged_store.batch_set_v1([second], slots(5)) == [True]
    (flat,) = stock_store.batch_get([second], [stock.get_dummy_flat_data_page()])
    stock.set_from_flat_data_page(0, flat)
    assert content(stock, 0) == content(staged, 5)


# ---- specific to one backend ----


@pytest.mark.parametrize("layout", ["page_first", DIRECT])
def test_the_index_of_sparse_attention_in_mooncake(layout: str) -> None:
    """Guards against an index buffer that is not registered, with which zero-copy transfers fail,
    and against pages that a stock server stored without their index."""
    client, pool = backends.MooncakeClient(), host_pool("nsa", layout)
    store, keys = backends.mooncake(pool, client), hashes(2)
    assert client.registered == [backends.address_of(tensor) for tensor in page_parts.tensors(pool)]
    store.batch_set_v1(keys, slots(1, 2))
    assert client.calls[-1][1] == [f"{key}__{part}" for key in keys for part in ("k", "index")]
    del client.content[f"{keys[1]}__index"]
    assert store.batch_exists(keys) == 1
    assert store.batch_get_v1(keys, slots(3, 4)) == [True, False]
    assert store.batch_set_v1(keys, slots(1, 2)) == [True, True]
    assert client.calls[-1][1] == [f"{keys[1]}__index"]


def test_short_values_are_misses_and_a_lost_master_is_not() -> None:
    """Guards against the positive byte count of a value that is shorter than the page, and against
    a failed query that counts as a miss."""
    client, pool = backends.MooncakeClient(), host_pool("mha", DIRECT)
    store = backends.mooncake(pool, client)
    store_client, keys = StoreClient(store, "mooncake"), hashes(3)
    assert store_client.write(keys, slots(0, 1, 2)).pages == 3
    client.content[f"{keys[1]}_0_v"] = client.content[f"{keys[1]}_0_v"][:-1]
    assert store_client.read(keys, slots(3, 4, 5)).pages == 1
    assert store_client.faults == {Fault.MISSING: 1, Fault.HOLE: 1}
    client.dead = True
    with pytest.raises(Exception, match="Mooncake error -900"):
        store.batch_exists(keys)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces ``time``: it passes only during ``sleep``."""

    def sleep(seconds: float) -> None:
        fake_time.now += seconds

    fake_time: Any = SimpleNamespace(now=1.0, sleep=sleep, monotonic=lambda: fake_time.now)
    fake_time.perf_counter = fake_time.monotonic
    monkeypatch.setattr(storage_backends, "time", fake_time)
    return fake_time


@pytest.mark.parametrize("well_at", [10.0, 1e9])
def test_memory_of_a_killed_server_is_waited_for(clock: Any, well_at: float) -> None:
    """Guards against a server that cannot be restarted for ten seconds after it was killed: the
    master may still place the first write in the dead server's memory. The wait is bounded, for a
    store that does not recover."""
    client, stock = backends.MooncakeClient(), backends.MooncakeClient.put
    client.put = lambda *page: stock(client, *page) if clock.now >= well_at else -200  # type: ignore[method-assign]
    with nullcontext() if well_at < 20 else pytest.raises(AssertionError):
        backends.mooncake(host_pool("mha", DIRECT), client)
    assert min(well_at, storage_backends.WARMUP_S) <= clock.now < 2 + min(well_at, 21)


def test_refused_writes_are_logged_with_their_codes(
    clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a log without error codes, which alone tell a full store, a lost master and a
    key that another writer left half-written apart; and against a log that a store which refuses
    everything fills."""
    client, pages = backends.MooncakeClient(), slots(0, 1, 2)
    store = backends.mooncake(host_pool("mha", DIRECT), client)
    for codes, lines in (([0] * 6, 0), ([0, 0, -200, -600, 0, -200], 1), ([-1] * 6, 1)):
        client.batch_put_from = lambda *_, codes=codes: codes  # type: ignore[method-assign]
        good = [codes[index] == codes[index + 1] == 0 for index in (0, 2, 4)]
        assert store.batch_set_v1(hashes(3), pages) == good and len(caplog.messages) == lines
    assert "3 of 6" in caplog.text and "[-600, -200]" in caplog.text
    clock.now += storage_backends.LOG_EVERY_S
    store.batch_set_v1(hashes(3), pages)
    assert len(caplog.messages) == 2


def test_two_servers_that_create_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a server that does not start because another one, started at the same time,
    has just created the folder."""
    exists = os.path.exists

    def created_by_another(path: Any) -> bool:
        existed = exists(path)
        os.makedirs(path, exist_ok=True)
        return existed

    monkeypatch.setattr(os.path, "exists", created_by_another)
    store = backends.file(host_pool("mha", DIRECT), tmp_path / "new")
    assert store.batch_exists(hashes(1)) == 0


def test_temporary_files_of_killed_writers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against temporary files that killed writers leave for ever. Files of running writers,
    and foreign ones, stay."""

    def killed(*_: Any) -> None:
        raise SystemExit

    pool = host_pool("mha", DIRECT)
    store = backends.file(pool, tmp_path)
    assert store.batch_set_v1(hashes(1), slots(1)) == [True]
    (page,) = tmp_path.iterdir()
    with monkeypatch.context() as patched:  # nothing cleans up behind a killed writer
        patched.setattr(os, "replace", killed)
        patched.setattr(os, "unlink", lambda path: None)
        for number in (2, 3):
            with pytest.raises(SystemExit):
                store.batch_set_v1(hashes(3)[number - 1 : number], slots(number))
    stale, fresh = (path for path in tmp_path.iterdir() if path != page)
    others = [tmp_path / "notes.bin.txt", tmp_path / f"{page.name}.{'x' * 32}"]
    for path in others:
        path.touch()
    for path in (page, stale, *others):
        os.utime(path, (1.0, 1.0))
    backends.file(pool, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([page, fresh, *others])


@pytest.mark.parametrize(
    "name", ["m" * 150, "org/" + "m" * 400, "\u6a21" * 60], ids=["long", "longer", "not ASCII"]
)
def test_a_model_name_of_any_length(tmp_path: Path, name: str) -> None:
    """Guards against file names that no file system accepts: no page would be stored."""
    pool = host_pool("mha", DIRECT)
    for rank in (0, 1):
        store = backends.file(pool, tmp_path, model_name=name, rank=rank, ranks=2)
        assert store.batch_exists(hashes(1)) == 0  # not another rank's page
        assert store.batch_set_v1(hashes(1), slots(rank)) == [True]
    other = backends.file(pool, tmp_path, model_name=f"{name}-2", ranks=2)
    assert other.batch_exists(hashes(1)) == 0


@pytest.mark.parametrize("how", ["cut short", "not readable"])
def test_an_unreadable_file_counts_as_one_missing_page(tmp_path: Path, how: str) -> None:
    """Guards against a file of a dead writer that is found for ever but never read, and against an
    unreadable file that makes the pages before it count as missing too."""
    pool = host_pool("mha", DIRECT)
    store, keys = backends.file(pool, tmp_path), hashes(3)
    assert store.batch_set_v1(keys, slots(0, 1, 2)) == [True] * 3
    (bad,) = (path for path in tmp_path.iterdir() if path.name.startswith(keys[1]))
    if how == "cut short":
        bad.write_bytes(bad.read_bytes()[:100])
    else:
        bad.unlink()
        bad.symlink_to(bad)
    assert store.batch_exists(keys) == 1
    assert store.batch_get_v1(keys, slots(3, 4, 5)) == [True, False, True]
    assert store.batch_set_v1(keys, slots(0, 1, 2)) == [True] * 3
    assert store.batch_exists(keys) == 3
    assert len(list(tmp_path.iterdir())) == 3  # without other files
    for path in tmp_path.iterdir():
        path.unlink()
        path.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        store.batch_exists(keys)


@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_file_that_comes_or_goes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Guards against a page that another server has just written, for which the memory's old
    content would count; and against a page that a clean-up has just removed, which must count as
    missing and not fail the call."""
    pool = host_pool("mha", DIRECT)
    store, keys = backends.file(pool, tmp_path), hashes(2)
    store.batch_set_v1(keys, slots(1, 2))
    path = store.value_key(keys[1], store.page_values[0])
    aside = str(tmp_path / "aside")
    if change == "written":
        os.rename(path, aside)
    size = os.path.getsize

    def then(file: Any) -> int:
        try:
            return size(file)
        finally:  # right after the first check
            if file == path and change == "removed" and os.path.exists(path):
                os.unlink(path)
            if file == path and change == "written" and os.path.exists(aside):
                os.rename(aside, path)

    monkeypatch.setattr(os.path, "getsize", then)
    untouched = content(pool, 4)
    good = store.batch_get_v1(keys, slots(3, 4))
    assert good[0] and content(pool, 3) == content(pool, 1)
    assert content(pool, 4) == (content(pool, 2) if good[1] else untouched)


# ---- backends of a stage ----


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's factory with the mixin."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    return backends.combined(StorageBackendFactory, PartsFactory)


class DynamicStore(ScriptedStore):
    """A backend of another project."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__()


class OlderStore(DynamicStore):
    """A backend with calls for flat pages only; the ``_v1`` calls of its base do nothing."""

    batch_set_v1 = HiCacheStorage.batch_set_v1


def created(factory: Any, store: str, kind: str, stage: bool = True) -> Any:
    """Create the backend ``file``, or a class of this module, as HiCache's controller does."""
    pool, dynamic = host_pool(kind, DIRECT, stage=stage), store != "file"
    names = {"backend_name": "scripted", "module_path": __name__, "class_name": store}
    config = backends.config(pool, extra_config=names if dynamic else {})
    backend = factory.create_backend("dynamic" if dynamic else store, config, pool)
    backend.register_mem_pool_host(pool)
    return backend


@pytest.mark.parametrize(
    ("store", "kind", "stage"),
    [
        ("file", "mha", True),
        ("file", "nsa", True),
        ("DynamicStore", "mha", True),
        ("file", "nsa", False),
        ("OlderStore", "mha", False),
    ],
)
def test_backends_of_a_stage(factory: Any, store: str, kind: str, stage: bool) -> None:
    """Guards against a backend that is created another way than by its class, and so stays stock;
    against refusing other projects' backends that store all parts of a page; and against any change
    without the flag."""
    backend = created(factory, store, kind, stage)
    ours = store == "file" and stage
    assert bool(getattr(backend, "page_values", ())) is ours
    assert type(backend).__name__ == store or type(backend) is HiCacheFile or ours
    if stage:
        pool = backend.mem_pool_host
        assert backend.batch_set_v1(hashes(2), slots(1, 2)) == [True, True]
        assert backend.batch_get_v1(hashes(2), slots(3, 4)) == [True, True]
        assert content(pool, 3) == content(pool, 1)


@pytest.mark.parametrize(
    ("store", "kind", "message"),
    [
        ("DynamicStore", "nsa", "dynamic does not keep all parts .*index.*use one of"),
        # SGLang's base class has these calls with an empty body.
        ("OlderStore", "mha", "--hicache-storage-backend dynamic: OlderStore does not implement "
         "batch_set_v1, with .*--hicache-host-memory-mode buffer_only"),
    ],
)  # fmt: skip
def test_backends_that_are_refused(factory: Any, store: str, kind: str, message: str) -> None:
    """Guards against NSA pages that are loaded without their index, and against a store with reads
    and writes that do nothing."""
    with pytest.raises(ValueError, match=message):
        created(factory, store, kind)


@pytest.mark.parametrize("layout", ["page_first_kv_split", "unheard_of", None])
def test_unknown_pools_are_refused(layout: str | None) -> None:
    """Guards against an unknown page layout: the message names the flag. State-space models, whose
    state is not made of pages, are refused too."""
    pool: Any = object()
    if layout:
        pool = host_pool("mla", DIRECT)
        pool.layout = layout
    with pytest.raises(
        ValueError, match=f"{layout} .*--hicache-mem-layout" if layout else "object"
    ):
        page_parts.describe(pool)

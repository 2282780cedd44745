"""Pages through the storage backends of this release: what they keep, and where; and which backends
a stage gets from SGLang's factory."""

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
    """Backends by name, each on an empty store that all stores of one test share."""
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
    """Guards against parts of a page that a backend forgets (the index of NSA), against pages that
    come back at another page's place or in another order, and against a missing page that moves
    later pages to wrong places, fails the whole batch, or is not noticed at all."""
    pool = host_pool(kind, layout, page=page)
    store = make(backend, pool)
    first, gone, last = hashes(3)
    written = [content(pool, number) for number in (4, 1)]
    assert store.batch_set_v1([first, last], slots(4, 1, page=page)) == [True, True]
    fill(pool, seed=9)
    untouched = content(pool, 0)
    found = [store.batch_exists(keys) for keys in ([first, last, gone], [first, gone, last])]
    assert found == [2, 1]
    answers = store.batch_get_v1([first, gone, last], slots(5, 2, 3, page=page))
    assert answers == [True, False, True]
    assert [content(pool, number) for number in (5, 3)] == written
    assert content(pool, 0) == untouched


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [(kind, layout, {}) for kind in ("mha", "mla") for layout in ("page_first", DIRECT)]
    + [("mha", "page_head", {"tp_lcm_size": 4, "should_split_heads": True})],
)
def test_mooncake_asks_as_sglang_does(kind: str, layout: str, changes: dict[str, Any]) -> None:
    """Guards against keys, addresses or orders other than stock, so that servers with and without
    a stage would not find each other's pages; also where ranks store their heads apart, for servers
    with other numbers of ranks."""
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
def test_files_of_a_stock_server_are_found_and_the_other_way(
    make: Any, kind: str, layout: str
) -> None:
    """Guards against a page that is kept otherwise than SGLang's own backend keeps it."""
    stock, ours = host_pool(kind, layout, stage=False), host_pool(kind, layout)
    fill(ours, seed=7)
    theirs, mine = make("file", stock), make("file", ours)
    one, two = hashes(2)
    assert theirs.batch_set([one], [stock.get_data_page(PAGE)])
    assert mine.batch_get_v1([one], slots(2)) == [True]
    assert content(ours, 2) == content(stock, 1)
    assert mine.batch_set_v1([two], slots(5)) == [True]
    (flat,) = theirs.batch_get([two], [stock.get_dummy_flat_data_page()])
    stock.set_from_flat_data_page(0, flat)
    assert content(stock, 0) == content(ours, 5)


# ---- what only one of them does ----


@pytest.mark.parametrize("layout", ["page_first", DIRECT])
def test_the_index_of_sparse_attention_in_mooncake(layout: str) -> None:
    """Guards against an index buffer that is not registered, for zero-copy transfers of it fail,
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
    a failed query that is taken for the news that nothing is stored."""
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
    """Time that passes only while somebody sleeps."""

    def sleep(seconds: float) -> None:
        found.now += seconds

    found: Any = SimpleNamespace(now=1.0, sleep=sleep, monotonic=lambda: found.now)
    found.perf_counter = found.monotonic
    monkeypatch.setattr(storage_backends, "time", found)
    return found


@pytest.mark.parametrize("well_at", [10.0, 1e9])
def test_memory_of_a_killed_server_is_waited_for(clock: Any, well_at: float) -> None:
    """Guards against a server that cannot be started again for ten seconds after it was killed: the
    master does not know of that yet, and may put the first write where the server was. For a store
    that does not work no server waits for ever."""
    client, stock = backends.MooncakeClient(), backends.MooncakeClient.put
    client.put = lambda *page: stock(client, *page) if clock.now >= well_at else -200  # type: ignore[method-assign]
    with nullcontext() if well_at < 20 else pytest.raises(AssertionError):
        backends.mooncake(host_pool("mha", DIRECT), client)
    assert min(well_at, storage_backends.WARMUP_S) <= clock.now < 2 + min(well_at, 21)


def test_refused_writes_are_told_with_their_codes(
    clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A full store, a lost master and a key that another writer left half-written all look alike in
    the counters; the codes tell them apart. And a store that refuses everything must not fill the
    log."""
    client, pages = backends.MooncakeClient(), slots(0, 1, 2)
    store = backends.mooncake(host_pool("mha", DIRECT), client)
    for codes, lines in (([0] * 6, 0), ([0, 0, -200, -600, 0, -200], 1), ([-1] * 6, 1)):
        client.batch_put_from = lambda *_, codes=codes: codes  # type: ignore[method-assign]
        good = [codes[at] == codes[at + 1] == 0 for at in (0, 2, 4)]
        assert store.batch_set_v1(hashes(3), pages) == good and len(caplog.messages) == lines
    assert "3 of 6" in caplog.text and "[-600, -200]" in caplog.text
    clock.now += storage_backends.LOG_EVERY_S
    store.batch_set_v1(hashes(3), pages)
    assert len(caplog.messages) == 2


def test_two_servers_that_make_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that does not start because another one, started at the same time,
    has just made the folder."""
    exists = os.path.exists

    def made_by_another(path: Any) -> bool:
        found = exists(path)
        os.makedirs(path, exist_ok=True)
        return found

    monkeypatch.setattr(os.path, "exists", made_by_another)
    store = backends.file(host_pool("mha", DIRECT), tmp_path / "new")
    assert store.batch_exists(hashes(1)) == 0


def test_temporary_files_of_killed_writers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each writer that is killed would leave some for ever. Those of writers that run stay, and
    so does all that is not ours."""

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
    """Guards against file names that no file system takes: not a page would be stored."""
    pool = host_pool("mha", DIRECT)
    for rank in (0, 1):
        store = backends.file(pool, tmp_path, model_name=name, rank=rank, ranks=2)
        assert store.batch_exists(hashes(1)) == 0  # not of another rank
        assert store.batch_set_v1(hashes(1), slots(rank)) == [True]
    other = backends.file(pool, tmp_path, model_name=f"{name}-2", ranks=2)
    assert other.batch_exists(hashes(1)) == 0


@pytest.mark.parametrize("how", ["cut short", "not readable"])
def test_a_file_that_is_no_page_is_missing_alone(tmp_path: Path, how: str) -> None:
    """Guards against a file whose writer died: found for ever, and read by nobody; and against one
    whose folder was moved, for which the pages before it would count as missing too."""
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
    assert len(list(tmp_path.iterdir())) == 3  # and nothing beside them
    for path in tmp_path.iterdir():
        path.unlink()
        path.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        store.batch_exists(keys)


@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_file_that_comes_or_goes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Another server has just written it: whatever the memory held before would be the page. Or a
    clean-up has just removed it: that is one page that is not there, and no failed call."""
    pool = host_pool("mha", DIRECT)
    store, keys = backends.file(pool, tmp_path), hashes(2)
    store.batch_set_v1(keys, slots(1, 2))
    path = store.value_key(keys[1], store.page_values[0])
    aside = str(tmp_path / "aside")
    if change == "written":
        os.rename(path, aside)
    size = os.path.getsize

    def then(what: Any) -> int:
        try:
            return size(what)
        finally:  # right after the first look
            if what == path and change == "removed" and os.path.exists(path):
                os.unlink(path)
            if what == path and change == "written" and os.path.exists(aside):
                os.rename(aside, path)

    monkeypatch.setattr(os.path, "getsize", then)
    untouched = content(pool, 4)
    good = store.batch_get_v1(keys, slots(3, 4))
    assert good[0] and content(pool, 3) == content(pool, 1)
    assert content(pool, 4) == (content(pool, 2) if good[1] else untouched)


# ---- which backends a stage gets ----


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's factory with our mixin."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    return backends.combined(StorageBackendFactory, PartsFactory)


class DynamicStore(ScriptedStore):
    """A backend of somebody else."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__()


class OlderStore(DynamicStore):
    """One that has only the calls which move flat pages, besides the empty ones of its base."""

    batch_set_v1 = HiCacheStorage.batch_set_v1


def created(factory: Any, store: str, kind: str, stage: bool = True) -> Any:
    """As HiCache's controller does it: ``file``, or a class of this module."""
    pool, dynamic = host_pool(kind, DIRECT, stage=stage), store != "file"
    names = {"backend_name": "scripted", "module_path": __name__, "class_name": store}
    config = backends.config(pool, extra_config=names if dynamic else {})
    found = factory.create_backend("dynamic" if dynamic else store, config, pool)
    found.register_mem_pool_host(pool)
    return found


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
    """Guards against a backend that is made some other way than by its class, and so would silently
    stay stock; against refusing backends of others that keep all there is to keep; and against any
    change without our flag."""
    found = created(factory, store, kind, stage)
    ours = store == "file" and stage
    assert bool(getattr(found, "page_values", ())) is ours
    assert type(found).__name__ == store or type(found) is HiCacheFile or ours
    if stage:
        pool = found.mem_pool_host
        assert found.batch_set_v1(hashes(2), slots(1, 2)) == [True, True]
        assert found.batch_get_v1(hashes(2), slots(3, 4)) == [True, True]
        assert content(pool, 3) == content(pool, 1)


@pytest.mark.parametrize(
    ("store", "kind", "message"),
    [
        ("DynamicStore", "nsa", "dynamic does not keep all parts .*index.*use one of"),
        # SGLang's base class has these calls, without a body.
        ("OlderStore", "mha", "--hicache-storage-backend dynamic: OlderStore does not implement "
         "batch_set_v1, with .*--hicache-host-memory-mode buffer_only"),
    ],
)  # fmt: skip
def test_backends_that_are_refused(factory: Any, store: str, kind: str, message: str) -> None:
    """Guards against NSA pages that come back without their index, and against a store whose reads
    and writes do nothing."""
    with pytest.raises(ValueError, match=message):
        created(factory, store, kind)


@pytest.mark.parametrize("layout", ["page_first_kv_split", "unheard_of", None])
def test_pools_that_are_not_known_are_refused(layout: str | None) -> None:
    """Guards against pages that are guessed at: the message names the flag; and against state-space
    models, whose pages are something else."""
    pool: Any = object()
    if layout:
        pool = host_pool("mla", DIRECT)
        pool.layout = layout
    with pytest.raises(
        ValueError, match=f"{layout} .*--hicache-mem-layout" if layout else "object"
    ):
        page_parts.describe(pool)

"""Pages through the storage backends of this release: what they keep, and where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from component.buffer_only import backends
from component.buffer_only.host_pools import (
    KINDS,
    LAYOUTS,
    PAGE,
    content,
    fill,
    hashes,
    host_pool,
    slots,
)
from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.store_client import Fault, StoreClient

BACKENDS = ("file", "mooncake")
COMBINATIONS = [
    (backend, kind, layout)
    for backend in BACKENDS
    for kind in KINDS
    for layout in LAYOUTS
    if not (backend == "mooncake" and layout == "layer_first")  # refused by SGLang
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


@pytest.mark.parametrize(("backend", "kind", "layout"), COMBINATIONS)
def test_every_byte_of_a_page_comes_back(make: Any, backend: str, kind: str, layout: str) -> None:
    """Guards against parts of a page that a backend forgets (the index of NSA), and against pages
    that come back at another page's place or in another order."""
    pool = host_pool(kind, layout)
    store = make(backend, pool)
    keys = hashes(3)
    written = [content(pool, page) for page in (4, 1, 2)]
    assert store.batch_set_v1(keys, slots(4, 1, 2)) == [True] * 3
    fill(pool, seed=9)
    untouched = content(pool, 0)
    assert store.batch_exists([*keys, "f" * 64]) == 3
    assert store.batch_get_v1(keys, slots(5, 3, 4)) == [True] * 3
    assert [content(pool, page) for page in (5, 3, 4)] == written
    assert content(pool, 0) == untouched


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_other_sizes_come_back(make: Any, backend: str, kind: str, page: int) -> None:
    """Guards against bytes and places that are those of pages of 64 tokens only."""
    pool = host_pool(kind, "page_first_direct", page=page)
    store = make(backend, pool)
    written = [content(pool, number) for number in (4, 1)]
    assert store.batch_set_v1(hashes(2), slots(4, 1, page=page)) == [True, True]
    fill(pool, seed=9)
    assert store.batch_get_v1(hashes(2), slots(0, 5, page=page)) == [True, True]
    assert [content(pool, number) for number in (0, 5)] == written


@pytest.mark.parametrize(("backend", "kind", "layout"), COMBINATIONS)
def test_a_page_that_is_missing_is_missing_alone(
    make: Any, backend: str, kind: str, layout: str
) -> None:
    """Guards against a missing page in the middle that moves later pages to wrong places, fails
    the whole batch, or is not noticed at all."""
    pool = host_pool(kind, layout)
    store = make(backend, pool)
    first, gone, last = hashes(3)
    written = content(pool, 2)
    assert store.batch_set_v1([first, last], slots(1, 2)) == [True, True]
    assert store.batch_exists([first, gone, last]) == 1
    assert store.batch_get_v1([first, gone, last], slots(3, 4, 5)) == [True, False, True]
    assert content(pool, 5) == written


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_mooncake_asks_as_sglang_does(make: Any, kind: str, layout: str) -> None:
    """Guards against keys, addresses or orders other than stock, so that servers with and without
    a stage would not find each other's pages."""
    calls = {}
    for stage in (False, True):
        client = backends.MooncakeClient()
        pool = host_pool(kind, layout, stage=stage)
        store = backends.mooncake(
            pool, client, rank=1, ranks=2, extra_config={"extra_backend_tag": "t"}
        )
        store.batch_set_v1(hashes(2), slots(4, 1))
        store.batch_get_v1(hashes(2), slots(4, 1))
        store.batch_exists(hashes(3))
        calls[stage] = backends.relative(client.calls, pool)
    assert calls[True] == calls[False]


@pytest.mark.parametrize("layout", ["page_head"])
def test_mooncake_asks_as_sglang_does_for_groups_of_heads(layout: str) -> None:
    """The same where ranks store their heads apart, for servers with other numbers of ranks."""
    calls = {}
    for stage in (False, True):
        client = backends.MooncakeClient()
        pool = host_pool("mha", layout, stage=stage)
        store = backends.mooncake(
            pool, client, rank=1, ranks=2, tp_lcm_size=4, should_split_heads=True
        )
        assert store.batch_set_v1(hashes(2), slots(4, 1)) == [True, True]
        calls[stage] = backends.relative(client.calls, pool)
    assert calls[True] == calls[False]
    assert {key.split("_")[1] for key in calls[True][0][1]} == {"2", "3"}


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


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_mooncake_registers_every_host_tensor(layout: str) -> None:
    """Guards against an index buffer that is not registered: zero-copy transfers of it fail."""
    client, pool = backends.MooncakeClient(), host_pool("nsa", layout)
    store = backends.mooncake(pool, client)
    assert client.registered == [backends.address_of(tensor) for tensor in page_parts.tensors(pool)]
    assert store.batch_set_v1(hashes(1), slots(1)) == [True]
    key = hashes(1)[0]
    assert client.calls[-1][1] == [f"{key}__k", f"{key}__index"]


def test_a_page_without_its_index_is_not_there() -> None:
    """Guards against NSA pages that a stock server stored without their index."""
    client = backends.MooncakeClient()
    pool = host_pool("nsa", "page_first_direct")
    store = backends.mooncake(pool, client)
    keys = hashes(2)
    store.batch_set_v1(keys, slots(1, 2))
    del client.content[f"{keys[1]}__index"]
    assert store.batch_exists(keys) == 1
    assert store.batch_get_v1(keys, slots(3, 4)) == [True, False]
    assert store.batch_set_v1(keys, slots(1, 2)) == [True, True]
    assert client.calls[-1][1] == [f"{keys[1]}__index"]


def test_short_values_are_misses_and_counted() -> None:
    """Guards against the positive byte count of a value that is shorter than the page."""
    client, pool = backends.MooncakeClient(), host_pool("mha", "page_first_direct")
    store_client = StoreClient(backends.mooncake(pool, client), "mooncake")
    keys = hashes(3)
    assert store_client.write(keys, slots(0, 1, 2)).pages == 3
    client.content[f"{keys[1]}_0_v"] = client.content[f"{keys[1]}_0_v"][:-1]
    assert store_client.read(keys, slots(3, 4, 5)).pages == 1
    assert store_client.faults == {Fault.SHORT: 1, Fault.MISSING: 1, Fault.HOLE: 1}


def test_mooncake_without_a_master_is_no_miss() -> None:
    """Guards against a failed query that is taken for the news that nothing is stored."""
    client, pool = backends.MooncakeClient(), host_pool("mha", "page_first_direct")
    store = backends.mooncake(pool, client)
    client.dead = True
    with pytest.raises(Exception, match="Mooncake error -900"):
        store.batch_exists(hashes(2))


def test_two_servers_that_make_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that does not start because another one, started at the same time,
    has just made the folder."""
    exists = os.path.exists

    def made_by_another(path: Any) -> bool:
        found = exists(path)
        os.makedirs(path, exist_ok=True)
        return found

    monkeypatch.setattr(os.path, "exists", made_by_another)
    store = backends.file(host_pool("mha", "page_first_direct"), tmp_path / "new")
    assert store.batch_exists(hashes(1)) == 0


def test_temporary_files_of_killed_writers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each writer that is killed would leave some for ever. Those of writers that run stay, and
    so does all that is not ours."""

    def killed(*_: Any) -> None:
        raise SystemExit

    pool = host_pool("mha", "page_first_direct")
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


def test_a_file_cut_short_is_written_again(tmp_path: Path) -> None:
    """Guards against a file whose writer died: found for ever, and read by nobody."""
    pool = host_pool("mha", "page_first_direct")
    store = backends.file(pool, tmp_path)
    keys = hashes(2)
    store.batch_set_v1(keys, slots(1, 2))
    path = Path(store.value_key(keys[0], store.page_values[0]))
    path.write_bytes(path.read_bytes()[:100])
    assert store.batch_exists(keys) == 0
    assert store.batch_get_v1(keys, slots(3, 4)) == [False, True]
    assert store.batch_set_v1(keys, slots(1, 2)) == [True, True]
    assert store.batch_exists(keys) == 2
    assert len(list(tmp_path.iterdir())) == 2  # and nothing beside them


@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_file_that_comes_or_goes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Another server has just written it: whatever the memory held before would be the page. Or a
    clean-up has just removed it: that is one page that is not there, and no failed call."""
    pool = host_pool("mha", "page_first_direct")
    store = backends.file(pool, tmp_path)
    keys = hashes(2)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_stage_the_backend_is_stock(tmp_path: Path, kind: str, layout: str) -> None:
    """Guards against any change for servers without our flag."""
    pool = host_pool(kind, layout, stage=False)
    assert backends.file(pool, tmp_path).page_values == ()
    if layout != "layer_first":
        client = backends.MooncakeClient()
        assert backends.mooncake(pool, client).page_values == ()
        assert client.registered == [backends.address_of(pool.kv_buffer)]


@pytest.mark.parametrize("layout", ["page_first_kv_split", "unheard_of"])
def test_layouts_that_are_not_known_are_refused(layout: str) -> None:
    """Guards against pages that are guessed at; the message names the flag."""
    pool = host_pool("mla", "page_first_direct")
    pool.layout = layout
    with pytest.raises(ValueError, match=f"{layout} .*--hicache-mem-layout"):
        page_parts.describe(pool)


def test_pools_that_are_not_known_are_refused() -> None:
    """Guards against state-space models, whose pages are something else."""
    with pytest.raises(ValueError, match="object"):
        page_parts.describe(object())


def test_a_file_that_cannot_be_read_is_missing_alone(tmp_path: Path) -> None:
    """The pages before it would count as missing too; and it is written again."""
    pool = host_pool("mha", "page_first_direct")
    store, keys = backends.file(pool, tmp_path), hashes(3)
    assert store.batch_set_v1(keys, slots(0, 1, 2)) == [True] * 3
    (bad,) = (path for path in tmp_path.iterdir() if path.name.startswith(keys[2]))
    bad.unlink()
    bad.symlink_to(bad)  # as one whose folder was moved by another client of a shared file system
    assert store.batch_exists(keys) == 2
    assert store.batch_get_v1(keys, slots(3, 4, 5)) == [True, True, False]
    assert store.batch_set_v1(keys, slots(0, 1, 2)) == [True] * 3
    assert store.batch_exists(keys) == 3
    for path in tmp_path.iterdir():
        path.unlink()
        path.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        store.batch_exists(keys)

"""Pages through NIXL's storage plugin POSIX and a real agent; prints a line for each scenario.

Run by ``test_storage_nixl.py`` in an interpreter of its own, since NIXL may crash one while
it exits.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from component.buffer_only.backends import combined, config  # noqa: E402
from component.buffer_only.host_pools import (  # noqa: E402
    KINDS,
    LAYOUTS,
    content,
    fill,
    hashes,
    host_pool,
    slots,
)
from sglang.srt.mem_cache.buffer_only.storage_files import NixlParts  # noqa: E402
from sglang.srt.mem_cache.storage.nixl import hicache_nixl  # noqa: E402

os.environ["SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"] = "POSIX"


def backend(pool: Any, folder: str) -> Any:
    """A backend with an agent of its own, on the files in ``folder``."""
    os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = folder
    store = combined(hicache_nixl.HiCacheNixl, NixlParts)(config(pool))
    store.register_mem_pool_host(pool)
    return store


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def pages(kind: str, layout: str) -> None:
    """Written, found, read into other pages; a missing one in the middle is missing alone."""
    pool = host_pool(kind, layout)
    with tempfile.TemporaryDirectory() as folder:
        store = backend(pool, folder)
        first, gone, last = hashes(3)
        written = [content(pool, 4), content(pool, 1)]
        assert store.batch_set_v1([first, last], slots(4, 1)) == [True, True]
        before = open_files()
        fill(pool, seed=9)
        assert store.batch_exists([first, last, gone]) == 2
        assert store.batch_get_v1([first, gone, last], slots(2, 3, 5)) == [True, False, True]
        assert [content(pool, 2), content(pool, 5)] == written
        assert open_files() == before, "a transfer leaves files open"


def stock_pages(kind: str, layout: str) -> None:
    """A stock server's pages are found; K and V, or a latent, of any layout."""
    stock, ours = host_pool(kind, layout, stage=False), host_pool(kind, layout)
    fill(ours, seed=7)
    with tempfile.TemporaryDirectory() as folder:
        assert all(backend(stock, folder).batch_set_v1(hashes(2), slots(4, 1)))
        store = backend(ours, folder)
        assert store.batch_exists(hashes(3)) == 2
        assert store.batch_get_v1(hashes(2), slots(2, 3)) == [True, True]
        assert [content(ours, 2), content(ours, 3)] == [content(stock, 4), content(stock, 1)]


def cut_short() -> None:
    """A file that is shorter than the page is not there, and is written again."""
    pool = host_pool("mha", "page_first_direct")
    with tempfile.TemporaryDirectory() as folder:
        store = backend(pool, folder)
        keys = hashes(2)
        assert store.batch_set_v1(keys, slots(1, 2)) == [True, True]
        path = Path(folder, store.value_key(keys[0], store.page_values[1]))
        path.write_bytes(path.read_bytes()[:10])
        assert store.batch_exists(keys) == 0
        assert store.batch_get_v1(keys, slots(3, 4)) == [False, True]
        assert store.batch_set_v1(keys, slots(1, 2)) == [True, True]
        assert store.batch_exists(keys) == 2
        assert len(os.listdir(folder)) == 4


def removed() -> None:
    """A file that is removed between the look and the read, as by a server that clears the store,
    is not there; what the memory held before is not its content."""
    pool = host_pool("mha", "page_first_direct")
    with tempfile.TemporaryDirectory() as folder:
        store = backend(pool, folder)
        assert store.batch_set_v1(hashes(2), slots(1, 2)) == [True, True]
        look = store.has_values

        def look_and_lose(keys: list[str], sizes: list[int]) -> list[bool]:
            found: list[bool] = look(keys, sizes)
            for path in Path(folder).iterdir():
                path.unlink()
            return found

        store.has_values = look_and_lose
        assert store.batch_get_v1(hashes(2), slots(3, 4)) == [False, False]
        assert not os.listdir(folder)


def full() -> None:
    """A page that did not fit is not stored; its files are gone, and it can be written again."""
    pool = host_pool("mha", "page_first_direct")
    with tempfile.TemporaryDirectory() as folder:
        store = backend(pool, folder)
        transfer = store._transfer

        def half(direction: str, memory: list[Any], paths: list[str]) -> bool:
            """As NIXL 1.0: done. Later ones raise."""
            done: bool = transfer(direction, [view[: len(view) // 2] for view in memory], paths)
            return done

        store._transfer = half
        assert store.batch_set_v1(hashes(2), slots(1, 2)) == [False, False]
        store._transfer = transfer
        assert store.batch_exists(hashes(2)) == 0 and not os.listdir(folder)
        assert store.batch_set_v1(hashes(2), slots(1, 2)) == [True, True]
        assert store.batch_exists(hashes(2)) == 2


def refused() -> None:
    """A transfer that fails leaves no handle behind."""
    pool = host_pool("mha", "page_first_direct")
    with tempfile.TemporaryDirectory() as folder:
        store = backend(pool, folder)
        made: list[Any] = []
        agent = store.agent
        initialize, release = agent.initialize_xfer, agent.release_xfer_handle

        def raises(handle: Any) -> str:
            raise RuntimeError("the backend has failed")

        def remember(*arguments: Any) -> Any:
            made.append(initialize(*arguments))
            return made[-1]

        def forget(handle: Any) -> None:
            made.remove(handle)
            release(handle)

        agent.initialize_xfer, agent.transfer, agent.release_xfer_handle = remember, raises, forget
        before = open_files()
        try:
            store.batch_set_v1(hashes(1), slots(1))
            raise AssertionError("it says nothing")
        except RuntimeError:
            assert not made and open_files() == before and not os.listdir(folder)


SCENARIOS: dict[str, Callable[[], None]] = {
    "cut_short": cut_short, "removed": removed, "full": full, "refused": refused,
}  # fmt: skip
for _layout in LAYOUTS:
    for _kind in KINDS:
        SCENARIOS[f"pages_{_kind}_{_layout}"] = partial(pages, _kind, _layout)
    for _kind in ("mha", "mla"):
        SCENARIOS[f"stock_{_kind}_{_layout}"] = partial(stock_pages, _kind, _layout)


def main() -> None:
    """Run every scenario, whatever becomes of the others."""
    for name, scenario in SCENARIOS.items():
        try:
            scenario()
            print("PASSED", name, flush=True)
        except Exception:
            print("FAILED", name, traceback.format_exc(), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)

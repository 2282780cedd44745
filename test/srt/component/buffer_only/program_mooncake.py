"""Pages through a real Mooncake master and store on loopback; prints a line for each scenario.

Run by ``test_storage_mooncake.py``, whose tests document the scenarios. With the arguments
``hold PORTS`` it is another server instead: it writes two pages into its own memory and keeps
running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("MC_FORCE_TCP", "1")
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[4])]

from component.buffer_only.backends import (  # noqa: E402  # noqa: E402
    THROUGH_MOONCAKE,
    combined,
    config,
    content,
    fill,
    hashes,
    host_pool,
    slots,
)
from component.buffer_only.masters import SEGMENT, Master, end_with_parent, freeze  # noqa: E402
from sglang.srt.mem_cache.buffer_only.settings import StoreClientSettings  # noqa: E402
from sglang.srt.mem_cache.buffer_only.storage_backends import MooncakeParts  # noqa: E402
from sglang.srt.mem_cache.buffer_only.store_client import Fault, StoreClient  # noqa: E402
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import (  # noqa: E402
    MooncakeStore,
)

PAGE_BYTES = 12 << 10
"""Size of a page of the multi-head pool."""
DEADLINE = 3.0
"""Deadline of a call, in seconds."""


def backend(pool: Any, extra: dict[str, Any], tag: str = "") -> Any:
    """Return a server's backend with its own client; ``tag`` separates the pages of scenarios."""
    settings = extra | ({"extra_backend_tag": tag} if tag else {})
    store = combined(MooncakeStore, MooncakeParts)(config(pool, extra_config=settings), pool)
    store.register_mem_pool_host(pool)
    return store


def client_of(store: Any, deadline: float = DEADLINE) -> StoreClient:
    """Return a client of ``store`` with short timeouts."""
    settings = StoreClientSettings(deadline=deadline, first_retry=0.1, longest_retry=0.5)
    return StoreClient(store, "mooncake", settings)


def until(condition: Callable[[], bool], description: str, seconds: float = 40.0) -> None:
    """Wait until another process makes ``condition`` true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {description}"
        time.sleep(0.05)


def pages(master: Master, kind: str, layout: str, page: int) -> None:
    """Check that a server reads another one's pages, and misses a missing page."""
    ours, theirs = (host_pool(kind, layout, page=page) for _ in range(2))
    fill(theirs, seed=3)
    tag = f"{kind}-{layout}-{page}"
    slots_of = partial(slots, page=page)
    writer, reader = (backend(pool, master.extra_config, tag) for pool in (ours, theirs))
    first, gone, last = hashes(3)
    assert writer.batch_set_v1([first, last], slots_of(4, 1)) == [True, True]
    assert reader.batch_exists([first, last, gone]) == 2
    untouched = content(theirs, 0)
    assert reader.batch_get_v1([first, gone, last], slots_of(2, 3, 5)) == [True, False, True]
    assert [content(theirs, 2), content(theirs, 5)] == [content(ours, 4), content(ours, 1)]
    assert content(theirs, 0) == untouched
    assert reader.batch_set_v1([first, gone], slots_of(0, 3)) == [True, True]
    assert writer.batch_get_v1([first], slots_of(0)) == [True]
    assert content(ours, 0) == content(ours, 4), "a stored page is not written again"


def holder_hangs(master: Master) -> None:
    """Check that a read from a hung server's memory is abandoned, and writes late."""
    other = subprocess.Popen(
        [sys.executable, __file__, "hold", json.dumps(master.extra_config)],
        stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        until(lambda: "HOLDING" in other.stdout.readline(), "holding")  # type: ignore[union-attr]
        pool = host_pool("mha", "page_first_direct")
        expected = content(pool, 1)
        fill(pool, seed=8)
        client = client_of(backend(pool, master.extra_config, "held"))
        keys = hashes(2)
        assert client.query(keys).pages == 2
        freeze(other)
        outcome = client.read(keys, slots(2, 3))
        assert outcome.fault is Fault.DEADLINE and outcome.overdue is not None
        before = content(pool, 2)
        other.send_signal(signal.SIGCONT)
        outcome.overdue.result(30)
        assert content(pool, 2) == expected != before, "the late read writes into its pages"
        until(lambda: client.query(keys).fault is None, "up again")
        other.kill()
        other.wait(60)
        outcome = client.read(keys, slots(4, 5))
        assert outcome.pages == 0
    finally:
        other.kill()
        other.wait(60)


def full(master: Master) -> None:
    """Write three times the store's capacity. Refused pages must be failures and nothing else, and
    a page that is looked up now and then must not be evicted."""
    pool = host_pool("mha", "page_first_direct")
    client = client_of(backend(pool, master.extra_config, "full"), deadline=60.0)
    hot, cold, *others = (f"{number:064x}" for number in range(1, 3 * SEGMENT // PAGE_BYTES))
    assert client.write([hot, cold], slots(0, 1)).pages == 2
    written = content(pool, 0)
    for start in range(0, len(others), 6):
        assert client.query([hot]).pages == 1, "a page in use was evicted"
        batch = others[start : start + 6]
        outcome = client.write(batch, slots(*range(len(batch))))
        assert outcome.fault in (None, Fault.MISSING), outcome
    assert client.up and client.query([cold]).pages == 0
    fill(pool, seed=5)
    assert client.read([hot], slots(3)).pages == 1 and content(pool, 3) == written


def hold(extra: dict[str, Any]) -> None:
    """Run the other server of ``holder_hangs``."""
    pool = host_pool("mha", "page_first_direct")
    store = backend(pool, extra, "held")  # its memory is in the store while this process runs
    assert store.batch_set_v1(hashes(2), slots(1, 2)) == [True, True]
    print("HOLDING", flush=True)
    time.sleep(150)
    os._exit(0)


SCENARIOS: dict[str, Callable[[Master], None]] = {
    # First, while the store has no other memory than that of the server that hangs.
    "holder_hangs": holder_hangs,
    "full": full,
}
SCENARIOS |= {
    f"pages_{kind}_{layout}_{page}": partial(pages, kind=kind, layout=layout, page=page)
    for kind, layout, page in THROUGH_MOONCAKE
}


def main() -> None:
    """Run every scenario on its own master, even if another one fails."""
    for name, scenario in SCENARIOS.items():
        master = Master()
        start = time.monotonic()
        try:
            scenario(master)
            # One write, because libraries log in between.
            print(f"\nPASSED {name}\n", end="", flush=True)
        except Exception:
            print("FAILED", name, traceback.format_exc(), flush=True)
        finally:
            master.kill()
        print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hold"]:
        hold(json.loads(sys.argv[2]))
    main()
    os._exit(0)

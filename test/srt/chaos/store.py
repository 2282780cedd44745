"""Servers with a staging buffer of HiCache before a Mooncake store, and checks of them."""

from __future__ import annotations

import json
import time
from typing import Any

from benchmark.harness import metrics
from benchmark.harness.servers import Sizes
from component.buffer_only.masters import Master

STAGE_PAGES = 16
"""Minimum size of a stage in pages."""
STAGE_TOKENS = 512
"""Minimum size of a stage. Some of the bank's prompts fit; longer ones are staged in rounds."""
PREFILL_TOKENS = 2048
"""Room for two of the bank's longest prompts, and for half of all its tokens, so that prefill's
tree needs the store."""
DEADLINE_S = 2.0
ENV = {
    "SGLANG_HICACHE_STORE_DEADLINE": f"{DEADLINE_S:.0f}",
    "SGLANG_HICACHE_BUFFER_READ_TIMEOUT": "5",
    "SGLANG_HICACHE_BUFFER_ALWAYS_FETCH": "1",
    "MC_FORCE_TCP": "1",
}
METRICS_S = 2.5
"""The server updates its metrics once a second, and a scheduler that sleeps wakes once a second."""

_PREFIX = "sglang:hicache_buffer_"
_HELD = ("write_pages", "read_pages", "pending_intents")
_COUNTED = ("store_written_pages", "store_read_pages", "store_write_failures")


def prefill_with_stage(page_size: int, master: Master) -> dict[str, Any]:
    """Return the fields of a ``PairConfig`` for a prefill server with a stage."""
    arguments = (
        "--enable-hierarchical-cache",
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *_arguments(page_size, master),
    )
    sizes = Sizes(PREFILL_TOKENS, page_size=page_size, chunked_prefill_tokens=128)
    return {"prefill_sizes": sizes, "prefill_args": arguments, "prefill_env": ENV}


def decode_that_writes(page_size: int, master: Master) -> tuple[str, ...]:
    """Return the arguments of a decode server that writes the KV it computes to the same store."""
    return ("--disaggregation-decode-enable-offload-kvcache", *_arguments(page_size, master))


def _arguments(page_size: int, master: Master) -> tuple[str, ...]:
    extra = {**master.extra_config, "prefetch_threshold": page_size}
    return (
        *("--hicache-host-memory-mode", "buffer_only"),
        *("--hicache-buffer-pages", str(max(STAGE_PAGES, STAGE_TOKENS // page_size))),
        *("--hicache-storage-backend", "mooncake"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )


def stage(url: str) -> dict[str, float]:
    """Return a server's metrics of the stage, without their common prefix."""
    values = metrics.scrape(url)
    return {k.removeprefix(_PREFIX): v for k, v in values.items() if k.startswith(_PREFIX)}


def counted(url: str) -> dict[str, int]:
    """Return the pages and failures of a server's stage since the server started."""
    values = stage(url)
    return {name: int(values[f"{name}_total"]) for name in _COUNTED}


def wait_drained(url: str, timeout_s: float) -> None:
    """Wait until nothing is staged or queued to be written, and stays so.

    Raises:
        TimeoutError: pages are still staged or queued after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    empty_since = None
    while empty_since is None or time.monotonic() - empty_since < METRICS_S:
        now = stage(url)
        held = {name: int(now[name]) for name in _HELD if now[name]}
        if held:
            empty_since = None
        elif empty_since is None:
            empty_since = time.monotonic()
        if time.monotonic() > deadline:
            raise TimeoutError(f"an idle server's stage holds {held} after {timeout_s:.0f} s")
        time.sleep(0.2)

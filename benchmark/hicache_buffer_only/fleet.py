"""Two workers over one Mooncake store, as one object."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import Self

from benchmark.harness import metrics
from benchmark.harness.command import RunFailed
from benchmark.harness.fleet import Fleet
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import LEAN, ServerConfig, Sizes, aggregated
from benchmark.hicache_buffer_only.master import CAPACITY, Master
from benchmark.hicache_buffer_only.memory import Memory

HOST_TOKENS = "sglang:hicache_host_total_tokens"
CACHED, PROMPT = "sglang:cached_tokens_total", "sglang:prompt_tokens_total"
STAGE_IN_USE = tuple(f"sglang:hicache_buffer_{name}_pages" for name in ("read", "write"))
METRICS_S = 1.5
"""A little more than the time between two updates of these metrics."""

COMMON = (
    *LEAN,
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-backend", "mooncake"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)


@dataclass(frozen=True)
class FleetConfig:
    """One arm."""

    model: Path
    memory: Memory
    sizes: Sizes
    stock: bool
    """The stock release, else the patch set."""
    buffer_only: bool
    """Else SGLang's own mode."""
    ratio: float
    """``--hicache-ratio`` of SGLang's own mode."""
    lease_ms: int
    prefetch_threshold: int
    """Tokens of the smallest hit that is fetched from the store."""
    env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, master: Master) -> tuple[str, ...]:
        """Of each worker, beyond sizes and ports."""
        if self.buffer_only:
            mode = ("--hicache-host-memory-mode", "buffer_only")
            mode += ("--hicache-buffer-pages", str(self.memory.pool_pages))
        else:
            mode = ("--hicache-ratio", str(self.ratio))
        store = master.extra_config(self.memory.segment_bytes, self.prefetch_threshold)
        return (*COMMON, *mode, "--hicache-storage-backend-extra-config", store)

    def worker(self, master: Master) -> ServerConfig:
        http, nccl = allocate_ports(2)
        return aggregated(
            self.model,
            (http, nccl),
            self.sizes,
            stock=self.stock,
            extra_args=self.arguments(master),
            env={"MC_FORCE_TCP": "1", **self.env},  # Mooncake would look for RDMA devices
        )


class WorkersAndStore(Fleet):
    """Fresh workers and an empty store. A context manager, as every fleet."""

    def __init__(self, config: FleetConfig, log_folder: Path) -> None:
        self.config = config
        self.master = Master(config.lease_ms)
        super().__init__(
            [config.worker(self.master) for _ in range(config.memory.workers)], log_folder
        )
        self._store: ServerProcess | None = None

    def __enter__(self) -> Self:
        self._store = self.master.start(self._log_folder)
        try:
            self._store.wait_ready(30)
        except BaseException:
            self.stop()
            raise
        return super().__enter__()

    def stop(self) -> None:
        super().stop()
        if self._store is not None:
            self._store.stop()

    @property
    def workers(self) -> list[str]:
        """URLs."""
        return self.urls("aggregated")

    def hits(self) -> dict[str, float]:
        """Cached tokens of all workers so far, by tier."""
        return metrics.total(hits(metrics.page(url)) for url in self.workers)

    def counters(self) -> list[Mapping[str, float]]:
        """All metrics of each worker."""
        return self.scrape("aggregated")

    def check_memory(self) -> None:
        """After a first request: host pools are as large as planned, and so is the store.

        Raises:
            RunFailed: the arms would not have the same memory.
        """
        memory, page = self.config.memory, self.config.sizes.page_size
        for url, now in zip(self.workers, self.counters(), strict=True):
            if now.get(HOST_TOKENS) != memory.pool_pages * page:
                raise RunFailed(
                    f"{url} reports a host pool of {now.get(HOST_TOKENS)} tokens, planned were "
                    f"{memory.pool_pages * page}"
                )
        capacity = self.master.usage()[CAPACITY]
        if capacity != memory.store_bytes:
            raise RunFailed(
                f"the store has {capacity:.0f} bytes, planned were {memory.store_bytes}"
            )

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until all workers are idle, healthy, and have empty staging buffers.

        Raises:
            TimeoutError: pages are left in a staging buffer, or requests in a worker.
            ServerFailed: a worker died.
        """
        self.check(timeout_s)
        deadline = time.monotonic() + timeout_s
        quiet_since = None
        while quiet_since is None or time.monotonic() - quiet_since < METRICS_S:
            used = sum(now.get(name, 0.0) for now in self.counters() for name in STAGE_IN_USE)
            if used:
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{used:.0f} staging pages are in use on idle workers")
            time.sleep(0.2)


def hits(page: str) -> dict[str, float]:
    """Of a server's metrics page: prompt tokens of finished requests (``prompt``), and those of
    them found on the ``device``, on the ``host`` and in ``storage``.

    SGLang adds a request's cached-token details to a counter, with the source as a label, when the
    request has finished.

    Raises:
        ValueError: the server counts cached tokens without their source.
    """
    found = {"prompt": metrics.parse(page).get(PROMPT, 0.0)}
    found |= dict.fromkeys(("device", "host", "storage"), 0.0)
    for (source,), tokens in metrics.by_labels(page, CACHED, "cache_source").items():
        tier = "storage" if source.startswith("storage_") else source  # the backend's name follows
        if tier not in found:
            raise ValueError(f"{CACHED} has tokens of an unknown source: {source}")
        found[tier] += tokens
    return found

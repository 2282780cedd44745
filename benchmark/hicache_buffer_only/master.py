"""Mooncake's master with its metadata server. The memory of the store is given by its clients."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmark.harness import metrics
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import HOST

PROGRAM = Path(sys.executable).with_name("mooncake_master")
"""Beside the interpreter, where Mooncake's package puts it."""

ALLOCATED, CAPACITY, EVICTED = (
    "master_allocated_bytes",
    "master_total_capacity_bytes",
    "master_evicted_size_bytes_total",
)


class Master:
    """``lease_ms``: how long a key that was asked for is kept from eviction."""

    def __init__(self, lease_ms: int) -> None:
        self._rpc, self._http, self._metrics = allocate_ports(3)
        self._lease_ms = lease_ms

    def start(self, log_folder: Path) -> ServerProcess:
        """The process; a context manager that ends it."""
        command = [
            str(PROGRAM),
            f"--rpc_port={self._rpc}",
            f"--rpc_address={HOST}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_host={HOST}",
            f"--http_metadata_server_port={self._http}",
            f"--metrics_port={self._metrics}",
            f"--metrics_host={HOST}",
            f"--default_kv_lease_ttl={self._lease_ms}",
        ]
        ready = f"http://{HOST}:{self._metrics}/metrics"
        log = log_folder / "mooncake_master.log"
        return ServerProcess("mooncake_master", command, os.environ, log, ready)

    def extra_config(self, segment_bytes: int, prefetch_threshold: int) -> str:
        """``--hicache-storage-backend-extra-config`` of a worker that gives so much to the
        store."""
        return json.dumps(
            {
                "master_server_address": f"{HOST}:{self._rpc}",
                "metadata_server": f"http://{HOST}:{self._http}/metadata",
                "master_metrics_port": self._metrics,
                "local_hostname": HOST,
                "protocol": "tcp",
                "global_segment_size": segment_bytes,
                "prefetch_threshold": prefetch_threshold,
            }
        )

    def usage(self) -> dict[str, float]:
        """Bytes of the store: in use, in all, evicted so far."""
        now = metrics.scrape(f"http://{HOST}:{self._metrics}")
        return {name: now[name] for name in (ALLOCATED, CAPACITY, EVICTED)}

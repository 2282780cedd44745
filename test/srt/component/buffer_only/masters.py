"""A real Mooncake master on loopback, which can be stopped, continued, killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmark.harness.ports import allocate_ports

#: Mooncake's package installs it beside the interpreter.
PROGRAM = Path(sys.executable).with_name("mooncake_master")

SEGMENT = 32 << 20
"""Bytes that a client gives to the store."""


class Master:
    """One master with its metadata server; restarts keep its ports."""

    def __init__(self) -> None:
        self.rpc, self.http, self.metrics = allocate_ports(3)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def extra_config(self) -> dict[str, Any]:
        """Value of ``--hicache-storage-backend-extra-config`` for this master."""
        return {
            "master_server_address": f"127.0.0.1:{self.rpc}",
            "metadata_server": f"http://127.0.0.1:{self.http}/metadata",
            "master_metrics_port": self.metrics,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": SEGMENT,
        }

    def start(self) -> None:
        """Start the master, and wait until it can be reached."""
        self._process = subprocess.Popen(
            [
                str(PROGRAM), f"--rpc_port={self.rpc}", "--rpc_address=127.0.0.1",
                "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={self.http}", f"--metrics_port={self.metrics}",
                "--metrics_host=127.0.0.1",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for port in (self.rpc, self.http):
            _reachable(port)

    def freeze(self) -> None:
        """Stop the master, so that it answers nothing."""
        assert self._process is not None
        freeze(self._process)

    def thaw(self) -> None:
        """Continue the master."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the master, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


def freeze(process: subprocess.Popen[Any]) -> None:
    """Stop all threads of a process, and wait until they have stopped."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    while any(_state(task) != "T" for task in tasks.iterdir()):
        time.sleep(0.005)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def end_with_parent() -> None:
    """Make this child process end when its parent ends, for any reason."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _reachable(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"Mooncake's master does not listen on port {port}")

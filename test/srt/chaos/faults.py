"""Signals to a server that runs as a group of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from benchmark.harness.watchdog import group_members

SCHEDULER = b"sglang::scheduler"
"""Start of the title that SGLang gives to a scheduler process."""


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process, skipping processes that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stop_all(group: int) -> list[int]:
    """Stop every process of a group and return them; none runs on return.

    Repeats until no new process is found, because a process may fork while the signals are sent.
    """
    stopped: set[int] = set()
    while new := set(group_members(group)) - stopped:
        signal_all(new, signal.SIGSTOP)
        stopped |= new
    wait_stopped(stopped)
    return sorted(stopped)


def wait_stopped(pids: Iterable[int], timeout_s: float = 5.0) -> None:
    """Block until each process is stopped or gone.

    Raises:
        TimeoutError: a process still runs after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while (state := process_state(pid)) not in ("T", "t", "Z", "X", None):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} does not stop: state {state}")
            time.sleep(0.005)


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for a process's state (R, S, T, ...), or None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def scheduler_of(group: int, title: bytes = SCHEDULER) -> int:
    """Return the process id of a server's scheduler.

    Raises:
        LookupError: there is not exactly one process with that title.
    """
    pids = []
    for pid in group_members(group):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                pids.append(pid)
    if len(pids) != 1:
        raise LookupError(f"group {group} has {len(pids)} processes titled {title.decode()}")
    return pids[0]

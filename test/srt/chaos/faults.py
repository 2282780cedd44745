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
"""How the title of a scheduler process starts; SGLang sets it."""


def signal_all(pids: Iterable[int], what: signal.Signals) -> None:
    """Sends a signal to each process; those that have ended are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def stop_all(group: int) -> list[int]:
    """Stops every process of a group and returns them; none runs when it returns.

    A process may start another while the signals go out, hence the second look.
    """
    stopped: set[int] = set()
    while new := set(group_members(group)) - stopped:
        signal_all(new, signal.SIGSTOP)
        stopped |= new
    wait_stopped(stopped)
    return sorted(stopped)


def wait_stopped(pids: Iterable[int], timeout_s: float = 5.0) -> None:
    """Blocks until each process is stopped, or gone.

    Raises:
        TimeoutError: one still runs after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while (state := process_state(pid)) not in ("T", "t", "Z", "X", None):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} does not stop: state {state}")
            time.sleep(0.005)


def process_state(pid: int) -> str | None:
    """The kernel's letter for what a process does (R, S, T, ...); None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def scheduler_of(group: int, title: bytes = SCHEDULER) -> int:
    """The process id of a server's scheduler.

    Raises:
        LookupError: there is not exactly one process with that title.
    """
    found = []
    for pid in group_members(group):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                found.append(pid)
    if len(found) != 1:
        raise LookupError(f"group {group} has {len(found)} processes titled {title.decode()}")
    return found[0]

"""Ends server processes when the process that started them is gone, for any reason.

A small process watches a pipe that only its parent holds open. When the pipe closes (normal end,
Ctrl-C, SIGTERM, even SIGKILL), it kills every group that it guards. Therefore nothing here installs
signal handlers. PR_SET_PDEATHSIG would not do: it fires when the *thread* that started the server
ends, and servers are started in parallel by threads; nor does it reach the server's own children.

Servers have their own process groups but no own sessions. With ``sched_autogroup_enabled``, Linux
shares each core between sessions before it shares it between processes; a server that mostly waits
was then seen runnable for 30 s without running, beside one that spins.

Run as a script, this file is the watchdog itself: it uses only the standard library, so that it
starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: For ``subprocess.Popen``: start in a new process group.
NEW_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)


def group_members(group: int) -> list[int]:
    """Return process ids in the group and of all descendants of its members, without zombies."""
    parents: dict[int, int] = {}
    members = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        # The command name, in parentheses, may contain spaces: state, ppid, pgrp follow it.
        state, parent, pgrp = stat.rpartition(")")[2].split()[:3]
        if state in "ZX":
            continue
        parents[int(entry.name)] = int(parent)
        if int(pgrp) == group:
            members.add(int(entry.name))
    while below := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= below
    return sorted(members)


def kill_group(group: int, patience_s: float = 2.0) -> None:
    """Kill every process of the group, and return when none is left.

    Python's resource tracker is not killed before ``patience_s``, because it unlinks the semaphores
    in /dev/shm that the killed processes left, and then exits by itself.
    """
    deadline = time.monotonic() + patience_s
    while members := group_members(group):
        late = time.monotonic() > deadline
        for pid in members:
            if late or not _is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class Watchdog:
    """The parent's side: names the groups to guard. Starts its process on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def guard(self, group: int) -> None:
        self._send(f"+{group}\n")

    def release(self, group: int) -> None:
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    **NEW_GROUP,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _watch() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    guarded: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            guarded.add(group)
        else:
            guarded.discard(group)
    for group in guarded:
        kill_group(group)


if __name__ == "__main__":
    _watch()

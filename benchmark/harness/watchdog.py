"""Ends server processes when the process that started them is gone, however it went.

One small process watches a pipe that only its parent holds open. When the pipe closes (normal end,
Ctrl-C, SIGTERM, even SIGKILL), it kills every session it was told about. This is why nothing here
installs signal handlers, and why servers are not tied to their parent with PR_SET_PDEATHSIG: that
signal fires when the *thread* that started the server ends, and servers are started in parallel
by threads; nor would it reach the server's own children.

Run as a script it is the watchdog itself: standard library only, so that it starts in milliseconds.
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


def session_members(session: int) -> list[int]:
    """Process ids in the session, zombies left out."""
    members = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        # The command name, in parentheses, may hold spaces: state, ppid, pgrp, session follow it.
        state, _, _, sid = stat.rpartition(")")[2].split()[:4]
        if int(sid) == session and state not in "ZX":
            members.append(int(entry.name))
    return members


def kill_session(session: int, patience_s: float = 2.0) -> None:
    """Kills every process of the session and returns when none is left.

    Python's resource tracker goes last, by itself: it unlinks the semaphores in /dev/shm that the
    killed processes left behind, and ends once they are gone. After ``patience_s`` it is killed.
    """
    deadline = time.monotonic() + patience_s
    while members := session_members(session):
        late = time.monotonic() > deadline
        for pid in members:
            if late or not _is_resource_tracker(pid):
                _kill(pid)
        time.sleep(0.02)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Watchdog:
    """The parent's end: names sessions to guard. Starts its process on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def guard(self, session: int) -> None:
        self._tell(f"+{session}\n")

    def release(self, session: int) -> None:
        self._tell(f"-{session}\n")

    def _tell(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _watch() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    guarded: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        if line[0] == "+":
            guarded.add(session)
        else:
            guarded.discard(session)
    for session in guarded:
        kill_session(session)


if __name__ == "__main__":
    _watch()

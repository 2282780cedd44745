"""A server process with a log file, a readiness check, and an end that includes its children."""

from __future__ import annotations

import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmark.harness.watchdog import NEW_GROUP, Watchdog, kill_group

_watchdog = Watchdog()
VMSTAT = Path("/proc/vmstat")
"""The kernel's counters, of the whole machine also in a container."""

# Pattern in the log -> message for the user. The first match is used.
_DIAGNOSES: tuple[tuple[str, str], ...] = (
    (r"address already in use|Port \S+ is already in use|Errno 98", "a port is taken"),
    (
        r"Not enough memory|Cannot allocate memory|MemoryError|not enough memory|"
        r"OutOfMemoryError|can't allocate memory",
        "memory is short",
    ),
    (
        r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object file",
        "a system library is missing: {0}",
    ),
    (r"No module named '([\w.]+)'", "a Python package is missing: {0}"),
    (r"unrecognized arguments: (.+)", "the server does not know an argument: {0}"),
    (r"memory leak detected|Mem Leak Detected", "SGLang's memory check found a leak"),
    # SGLang then kills the whole server with SIGKILL.
    (
        r"Scheduler hit an exception: Traceback[\s\S]*?\n([\w.]*(?:Error|Exception)\b[^\n]*)",
        "its scheduler failed: {0}",
    ),
)


class ServerFailed(RuntimeError):
    """A server died or did not become ready. ``diagnosis`` is one line for the user."""

    def __init__(self, name: str, diagnosis: str, log: Path, tail: str) -> None:
        self.name, self.diagnosis, self.log, self.tail = name, diagnosis, log, tail
        super().__init__(f"{name}: {diagnosis} (log: {log})\n{tail}")


def oom_kills() -> int:
    """Return how many processes the kernel of this machine has killed because memory was short."""
    with suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE):
            return int(match[1])
    return 0


def diagnose(log_text: str, returncode: int | None, killed: int = 0) -> str:
    """Return one line on why a server ended, from its log and exit status (None: still running).

    ``killed``: rise of ``oom_kills()`` since the server started.
    """
    for pattern, message in _DIAGNOSES:
        if match := re.search(pattern, log_text):
            return message.format(*match.groups())
    if returncode is None:
        return "it did not become ready in time"
    how = f"by signal {-returncode}" if returncode < 0 else f"with status {returncode}"
    if returncode == -signal.SIGKILL and killed:
        how += f"; since it started, the kernel killed {killed} processes for lack of memory"
    lines = [line for line in log_text.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return f"it ended {how}" + (f": {lines[-1]}" if lines else "")


class ServerProcess:
    """One server in its own process group, so that its children can be found and ended too."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, ready_url: str
    ) -> None:
        self.name, self.log, self._ready_url = name, log, ready_url
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started_at = time.monotonic()
        self._oom_kills = oom_kills()
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                **NEW_GROUP,
            )
        _watchdog.guard(self.pid)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def failure(self) -> ServerFailed:
        """Return the error that describes this server's present state: dead or not ready."""
        text = self.log_text()
        tail = "\n".join(line[:300] for line in text.splitlines()[-25:])
        killed = oom_kills() - self._oom_kills
        return ServerFailed(self.name, diagnose(text, self._popen.poll(), killed), self.log, tail)

    def wait_ready(self, timeout_s: float = 240.0) -> float:
        """Block until the ready URL answers 200. Return the seconds since the start.

        Raises:
            ServerFailed: the process ended first, or ``timeout_s`` passed.
        """
        deadline = self.started_at + timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise self.failure()
            try:
                with urllib.request.urlopen(self._ready_url, timeout=30) as answer:
                    if answer.status == 200:
                        return time.monotonic() - self.started_at
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise self.failure()

    def stop(self) -> None:
        """End the server and all its children. Safe to call twice."""
        kill_group(self.pid)
        self._popen.wait()
        _watchdog.release(self.pid)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

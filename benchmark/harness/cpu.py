"""CPU time of this process, of the servers that it started, and of the rest of the machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.1
"""Smallest share of the machine's CPU time by others, and of the servers' runnable time without a
CPU, at which the machine is called busy. Servers that wait for each other only are not."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since a fixed moment."""

    wall: float
    machine: float
    """CPU time of all processes, and time that a hypervisor gave to other machines."""
    own: float
    """CPU time of this process and its descendants."""
    ran: float
    """CPU time of the descendants' threads."""
    waited: float
    """Time in which the descendants' threads were runnable and had no CPU."""


@dataclass(frozen=True)
class Contention:
    """Shares of a span of time."""

    waited: float
    """Share of the servers' runnable time in which they waited for a CPU."""
    others: float
    """Share of the machine's CPU time that other processes took."""

    @property
    def busy(self) -> bool:
        """True if the servers waited for a CPU, and other processes used it."""
        return min(self.waited, self.others) > BUSY_SHARE


def now() -> CpuTimes:
    """Return the present times. Needs Linux and psutil, as the servers of SGLang do."""
    import psutil

    me = psutil.Process()
    children = me.children(recursive=True)
    ran_ns = waited_ns = own = 0.0
    for process in (me, *children):
        with suppress(psutil.Error):
            times = process.cpu_times()
            own += times.user + times.system
    for child in children:
        ran, waited = scheduled(Path(f"/proc/{child.pid}/task"))
        ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    times = psutil.cpu_times()
    machine = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return CpuTimes(time.monotonic(), machine, own, ran_ns / 1e9, waited_ns / 1e9)


def scheduled(tasks: Path) -> tuple[int, int]:
    """Return the nanoseconds in which the threads of a process ran, and waited for a CPU; zeros if
    the kernel keeps no such statistics or the process ended."""
    ran = waited = 0
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError):  # the thread may have ended
                words = (task / "schedstat").read_text().split()
                ran, waited = ran + int(words[0]), waited + int(words[1])
    return ran, waited


def contention(before: CpuTimes, after: CpuTimes, cores: int | None = None) -> Contention:
    """Return the shares between two times."""
    ran, waited = after.ran - before.ran, after.waited - before.waited
    others = (after.machine - before.machine) - (after.own - before.own)
    whole = (cores or os.cpu_count() or 1) * (after.wall - before.wall)
    return Contention(
        max(0.0, waited) / (max(0.0, ran) + max(0.0, waited) or 1.0),
        max(0.0, others) / (whole or 1.0),
    )

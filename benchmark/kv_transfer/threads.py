"""CPU time of this process, thread by thread, from ``/proc``."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from benchmark.kv_transfer.records import ThreadUse

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_of(stat: str) -> float:
    """Seconds of user and system time in the text of a ``stat`` file.

    Its second field, in parentheses, is a name that may hold spaces; of the fields after it the
    twelfth and thirteenth are the times, in clock ticks (proc(5)).
    """
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def native_name(stat: str) -> str:
    """The kernel's name of the thread."""
    return stat.partition("(")[2].rpartition(")")[0]


def use_over(seconds: float) -> list[ThreadUse]:
    """What each thread uses while this one sleeps; most first. Threads that Python does not know
    are called ``native``, with the kernel's name for them."""
    before = _snapshot()
    time.sleep(seconds)
    after = _snapshot()
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    used = [
        ThreadUse(known.get(tid, f"native {name}"), cpu - before.get(tid, (name, 0.0))[1])
        for tid, (name, cpu) in after.items()
    ]
    return sorted(used, key=lambda use: -use.cpu_s)


def _snapshot() -> dict[int, tuple[str, float]]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except OSError:  # it has just ended
            continue
        found[int(task.name)] = (native_name(stat), cpu_of(stat))
    return found

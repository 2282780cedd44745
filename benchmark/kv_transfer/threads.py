"""CPU time of this process, thread by thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil

from benchmark.kv_transfer.records import ThreadUse


def use_over(seconds: float) -> list[ThreadUse]:
    """What each thread uses while this one sleeps; most first. Threads that Python does not know
    are called ``native``, with the kernel's name for them."""
    before = _snapshot()
    time.sleep(seconds)
    after = _snapshot()
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    used = [
        ThreadUse(known.get(tid) or f"native {_name(tid)}", cpu_s - before.get(tid, 0.0))
        for tid, cpu_s in after.items()
    ]
    return sorted(used, key=lambda use: -use.cpu_s)


def _snapshot() -> dict[int, float]:
    return {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}


def _name(tid: int) -> str:
    try:
        return Path(f"/proc/self/task/{tid}/comm").read_text().strip()
    except OSError:  # it has just ended
        return "?"

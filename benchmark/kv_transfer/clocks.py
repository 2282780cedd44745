"""CPU time of each thread, and the gaps of a scheduler: how long each turn of prefill's loop takes.

Between two turns a scheduler does Python work, so it needs the interpreter as often as a core. What
a turn takes beyond its own CPU time it waits: for a core (the kernel counts that), or for something
else, which is the interpreter's lock or a lock of the library's, and its own pause.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRIALS = 25


@dataclass(frozen=True)
class Turn:
    """One turn, from the end of the one before. Seconds."""

    took: float
    #: CPU time of the loop's thread.
    cpu: float
    #: It was ready to run and had no core.
    ready: float

    @property
    def blocked(self) -> float:
        """Neither: asleep, in its pause or waiting for a lock."""
        return max(0.0, self.took - self.cpu - self.ready)


class TurnClock:
    """Reads the clocks of the thread that makes it."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last = self._read()

    def _read(self) -> tuple[float, float, float]:
        # Time on a run queue, nanoseconds, is the second number of the kernel's sched-stats. The
        # first, CPU time, is as old as the last tick.
        ready = int(self._stat.read_text().split()[1]) * 1e-9
        return time.monotonic(), time.thread_time(), ready

    def turn(self) -> None:
        """A turn ends here, and the next begins."""
        now = self._read()
        self.turns.append(Turn(*(b - a for a, b in zip(self._last, now, strict=True))))
        self._last = now


class Work:
    """Python work of a known length: small objects made and dropped, as a scheduler does."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: on a core of its own. The amount is fixed here, not the time."""
        self._units = 0
        if seconds <= 0:
            return
        trials = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            _some(100)
            trials.append(time.perf_counter() - began)
        self._units = max(1, round(seconds / (min(trials) / 100)))

    def __call__(self) -> None:
        _some(self._units)


def _some(units: int) -> Any:
    table: dict[int, tuple[int, str]] = {}
    for number in range(units):
        table[number % 64] = (number, str(number))
    return table


@dataclass(frozen=True)
class ThreadUse:
    """CPU time of one thread over a while."""

    name: str
    cpu_s: float


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
    import psutil

    return {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}


def _name(tid: int) -> str:
    try:
        return Path(f"/proc/self/task/{tid}/comm").read_text().strip()
    except OSError:  # it has just ended
        return "?"

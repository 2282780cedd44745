"""Time as a scheduler sees it: it stands still while the scheduler does one long thing."""

from __future__ import annotations

import time
from collections.abc import Callable

#: What one turn of the scheduler's loop counts at most, seconds. An idle one sleeps no longer.
TURN_S = 1.0


class SchedulerTime:
    """Counts seconds of the scheduler's turns: written by its thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_at = clock()
        self._seconds = 0.0

    def turn(self) -> None:
        """The scheduler has taken the requests that had come to it."""
        now = self._clock()
        self._seconds += min(now - self._turned_at, TURN_S)
        self._turned_at = now

    def seconds(self) -> float:
        """Seconds so far. A turn that is under way does not count yet."""
        return self._seconds

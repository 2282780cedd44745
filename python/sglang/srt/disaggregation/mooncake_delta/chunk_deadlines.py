"""Until when each chunk of a Mooncake prefill rank has to be over: from ``send()`` to its end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class ChunkDeadlines:
    """Filled by the scheduler, emptied by the workers, looked at by the reader thread: a worker
    that is in a call of the engine cannot look at its watch."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds``: how long a chunk may take."""
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        #: By room, of its chunks that are not over, in order.
        self._due: dict[int, deque[float]] = {}
        #: Rooms that a worker is at, and the decode rank that it writes to.
        self._peers: dict[int, str] = {}

    def queued(self, room: int) -> None:
        """A chunk of ``room`` is put into its queue."""
        with self._lock:
            self._due.setdefault(room, deque()).append(self._clock() + self.seconds)

    def sending(self, room: int, peer: str) -> None:
        """The oldest chunk of ``room`` is written to the decode rank ``peer`` now."""
        with self._lock:
            if room in self._due:
                self._peers[room] = peer

    def over(self, room: int) -> None:
        """The oldest chunk of ``room`` is over, or dropped. Harmless for other rooms."""
        with self._lock:
            self._peers.pop(room, None)
            due = self._due.get(room)
            if due:
                due.popleft()
            if not due:
                self._due.pop(room, None)

    def forget(self, room: int) -> None:
        """Nobody waits for ``room`` any more."""
        with self._lock:
            self._due.pop(room, None)
            self._peers.pop(room, None)

    def take_overdue(self) -> list[tuple[int, str | None]]:
        """Rooms with a chunk that is late, each once, and the decode rank that it is written to;
        None while it waits in its queue."""
        now = self._clock()
        with self._lock:
            late = [room for room, due in self._due.items() if due[0] <= now]
            for room in late:
                del self._due[room]
            return [(room, self._peers.pop(room, None)) for room in late]

    def rooms(self) -> list[int]:
        """Rooms with chunks that are not over."""
        with self._lock:
            return sorted(self._due)

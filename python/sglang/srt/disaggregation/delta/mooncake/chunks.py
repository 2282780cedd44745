"""What waits in the queues of Mooncake's workers, and until when each chunk has to be over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from sglang.srt.disaggregation.delta.pages import Pages


class QueuedChunk(Protocol):
    """SGLang's ``TransferKVChunk``, and the room that it is of."""

    room: int
    #: Pages on this side, and their place among the room's destination pages.
    prefill_kv_indices: Pages
    index_slice: slice
    is_last_chunk: bool
    #: With the last chunk: metadata slot, and pages of state where the model has some.
    prefill_aux_index: int | None
    state_indices: list[int] | None
    #: Ours: what the room table tells the room from others of that number by. A room that ended
    #: while this waited is over at once, and its number may be used again before a worker comes
    #: to this chunk.
    life: object | None


class ChunkQueue(Protocol):
    """SGLang's ``FastQueue``: one waits for chunks, any thread puts them in."""

    def get(self) -> QueuedChunk:
        """The next one; waits for it."""

    def put(self, chunk: QueuedChunk) -> None:
        """Behind all others."""


class ChunkDeadlines:
    """Each chunk's, from ``send()`` to its end. Filled by the scheduler, emptied by the workers,
    looked at by the reader thread: a worker in a call of the engine cannot look at its watch."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds``: how long a chunk may take."""
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        #: Of each chunk that is not over, by its identity, in the order of ``queued``: the chunk,
        #: when it is due, and the decode rank that it is written to (None: it waits).
        self._due: dict[int, tuple[QueuedChunk, float, str | None]] = {}

    def queued(self, chunk: QueuedChunk) -> None:
        """It is put into its queue."""
        with self._lock:
            self._due[id(chunk)] = chunk, self._clock() + self.seconds, None

    def sending(self, chunk: QueuedChunk, peer: str) -> None:
        """It is written to the decode rank ``peer`` now."""
        with self._lock:
            if id(chunk) in self._due:
                _, due, _ = self._due[id(chunk)]
                self._due[id(chunk)] = chunk, due, peer

    def over(self, chunk: QueuedChunk) -> None:
        """It is over, or dropped. Harmless for one that is not in here."""
        with self._lock:
            self._due.pop(id(chunk), None)

    def take_overdue(self) -> list[tuple[QueuedChunk, str | None]]:
        """Take out the chunks that are late, and the decode rank that each is written to; None
        while it waits in its queue."""
        now, late = self._clock(), []
        with self._lock:
            for chunk, due, peer in self._due.values():
                if due > now:
                    break
                late.append((chunk, peer))
            for chunk, _ in late:
                del self._due[id(chunk)]
        return late

    def rooms(self) -> list[int]:
        """Rooms with chunks that are not over."""
        with self._lock:
            return sorted({chunk.room for chunk, _, _ in self._due.values()})

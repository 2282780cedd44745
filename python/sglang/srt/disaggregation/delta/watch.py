"""Following a room that was given up on decode, until prefill can write to its pages no more."""

from __future__ import annotations

from typing import Any, Protocol


class Progress(Protocol):
    """What the prefill ranks that write for one room have said so far."""

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""

    def is_quiet(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""


class RoomWatch:
    """Quiet once each writer has delivered everything, said that it stopped, or is gone.

    A remote write cannot be taken back by its target: pages that are given to another request while
    one is under way would be overwritten, and with a radix tree so would everybody who shares them.
    """

    def __init__(
        self, servers: Any, room: int, address: str, progress: Progress, writers: int
    ) -> None:
        self._servers = servers
        self._progress = progress
        #: Prefill ranks that write for the room.
        self.writers = writers
        self._gone = False
        self.room = room
        #: The prefill server, host:port of its bootstrap server.
        self.address = address

    @property
    def progress(self) -> Progress:
        """What arrived for the room, for the backend to keep up to date."""
        return self._progress

    def writer_is_gone(self) -> None:
        """The prefill processes that could write are certain not to exist any more."""
        self._gone = True

    def quiet(self) -> bool:
        """Whether the pages may be given to others; also reads what has arrived."""
        self._servers.collect_arrivals()
        return self._gone or self._progress.is_quiet(self.writers)

    def close(self) -> None:
        """Stop following the room."""
        self._servers.close_watch(self.room)

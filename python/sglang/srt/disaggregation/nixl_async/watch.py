"""Following a room that was given up on decode, until prefill can write to its pages no more."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.nixl_async import notifications


class RoomWatch:
    """Quiet once everything that prefill would write has arrived, or prefill said that it stopped.

    A NIXL write cannot be taken back by its target: pages that are given to another request while
    one is under way would be overwritten, and with a radix tree so would everybody who shares them.
    """

    def __init__(self, manager: Any, room: int, status: Any, num_writers: int) -> None:
        self._manager = manager
        self._status = status
        self._num_writers = num_writers
        self._refused = False
        self.room = room

    def take(self, note: notifications.Notification) -> None:
        """A notification of the room arrived."""
        if note.kind == "fail":
            self._refused = True
        else:
            notifications.apply(self._status, note, self._num_writers)

    def quiet(self) -> bool:
        """Whether the pages may be given to others; also reads what has arrived."""
        self._manager.update_transfer_status()
        return self._refused or bool(self._status.is_done())

    def close(self) -> None:
        """Stop following the room."""
        self._manager.watched_rooms.pop(self.room, None)

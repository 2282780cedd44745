"""What is put into a queue: one chunk of one room, for all the peers that get something of it."""

from __future__ import annotations

from typing import Any

import msgspec


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """Never changed once it was submitted: the scheduler's thread and a worker's both hold it."""

    room: int
    #: Names of the peers that it goes to. None of them is normal (a rank that sends nothing), and
    #: so is a peer to which no KV goes (a full prefix hit).
    peers: tuple[str, ...]
    #: The backend's own: page indices, destinations, metadata slot. Must not change either.
    payload: Any
    #: No other chunk of the room follows.
    is_last: bool
    #: When it must be settled, in the clock of ``enqueued_at``; the time in the queue counts.
    deadline: float
    #: ``time.monotonic()`` when it was submitted, in seconds.
    enqueued_at: float

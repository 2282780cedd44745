"""What transfer workers are given and attached to: chunks, and how their bytes move.

A third backend implements ``Backend`` and puts its own data into ``Chunk.payload``. Payload and
handles are ``Any``: they are the backend's own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from sglang.srt.disaggregation.delta.metrics import Reason


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


class State(enum.Enum):
    """What the transport says of a handle."""

    IN_PROGRESS = "in progress"
    DONE = "done"
    #: Not delivered. What was sent of it may still land: it counts as under way for a while.
    ERROR = "error"


class TransferError(Exception):
    """A backend's refusal with a reason of its own; any other exception means ``TRANSPORT``."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Backend(Protocol):
    """How bytes move. Called on worker threads only, and for one room only ever on one thread."""

    def post(self, chunk: Chunk, peer: str) -> Iterable[Any]:
        """Start moving what ``peer`` gets of ``chunk``, and give the handles to wait for.

        A backend that posts several transfers should be a generator which yields every handle as
        soon as it exists: what was yielded is waited for and released even if a later post raises.
        A list does for one that posts all or nothing. No handles is normal. Any exception fails
        the room: a ``TransferError`` with its reason, others with ``TRANSPORT``.
        """

    def state(self, handle: Any) -> State:
        """How far it is; ``DONE`` only where every byte is in the peer's memory. An exception
        counts as ``State.ERROR``."""

    def release(self, handle: Any) -> None:
        """Called exactly once for each handle, when all handles of its post are over."""

    def complete(self, chunk: Chunk) -> None:
        """Tell all peers of a room's last chunk that everything of the room is with them. Called
        once for a room, when all its handles are ``DONE`` and its room said yes; returns without
        waiting for anybody. An exception fails the room, as one of ``post`` does."""

"""What the workers are attached to: how bytes move, who may write, and who is told."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol

from sglang.srt.disaggregation.async_transfer.chunk import Chunk
from sglang.srt.disaggregation.delta.failures import Reason


class State(enum.Enum):
    """What the transport says of a handle."""

    IN_PROGRESS = "in progress"
    DONE = "done"
    #: Over, and not delivered.
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
        """How far it is. An exception counts as ``State.ERROR``: raise only where the transport
        does not work on the handle any more."""

    def release(self, handle: Any) -> None:
        """Called exactly once for each handle, when all handles of its post are over."""

    def after_done(self, chunk: Chunk, peer: str) -> Iterable[Any]:
        """Start what ``peer`` may only get once everything of the room up to and including
        ``chunk`` is with it; otherwise as ``post``. Not called once the room has ended."""


class Gate(Protocol):
    """Who may write: ``PrefillRooms.enter`` and ``RoomGate.leave`` have this meaning."""

    def enter(self, room: int) -> bool:
        """Called before every post. False: the room was stopped; nothing of it is posted again."""

    def leave(self, room: int) -> None:
        """Nothing that was posted under this room number is under way any more. Every ``enter``
        that answered True is followed by one ``leave``, which may answer several of them."""


class Observer(Protocol):
    """Who is told. Called on the room's worker, without locks; exceptions are logged."""

    def chunk_done(self, chunk: Chunk) -> None:
        """It is with all its peers, and so is every earlier chunk of the room. After the last
        chunk the room has ended well."""

    def room_failed(
        self, room: int, reason: Reason, text: str, error: BaseException | None
    ) -> None:
        """The room has ended here; called at most once, and not for a room that was cancelled.
        What was posted may still be under way. ``error``: the backend's exception, if it was one.
        """

    def room_buried(self, room: int) -> None:
        """The room has ended, and what is still under way of it missed its deadline: it may take
        for ever, so that the request should not wait for ``room_quiet``. At most once."""

    def room_quiet(self, room: int) -> None:
        """The room has ended, and nothing of it is under way: its source pages and its metadata
        slot are not read any more. Called exactly once for a room that ends, unless it is
        forgotten first."""

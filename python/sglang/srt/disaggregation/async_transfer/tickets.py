"""What the scheduler sees of a room's transfers: it asks, and is never called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.disaggregation.async_transfer.chunk import Chunk
from sglang.srt.disaggregation.delta.failures import Reason


@dataclass(eq=False)
class Ticket:
    """Of one room, written by its worker. Each field changes once, and never back."""

    #: It has failed or was given up, on whatever thread: nothing more is to be sent.
    stopped: bool = False
    #: Its last chunk, and so every other one, is with all its peers.
    delivered: bool = False
    #: It has ended, and nothing of it is under way.
    quiet: bool = False
    #: It has ended, and what is under way missed its deadline: not to be waited for.
    buried: bool = False
    #: What the workers said of its failure, and what the transport raised, if it did.
    failure: str | None = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the request may end: its pages are not read, or may be read for ever."""
        return self.quiet or self.buried

    def cause_of(self, failure: str) -> BaseException | None:
        """What the transport raised, if it is why the room failed: another cause may have come
        first."""
        return self.error if failure == self.failure else None


class Tickets:
    """The observer of a transfer pool (``interfaces.Observer``); one for each pool.

    ``open`` and ``close`` are the scheduler's, ``stop`` anybody's, the rest is the workers'.
    """

    def __init__(
        self,
        fail: Callable[[int, Reason, str], None],
        delivered: Callable[[int], None] = lambda room: None,
    ) -> None:
        """``fail(room, reason, text)`` tells decode that a room has failed here; ``delivered`` is
        called when a room's last chunk has arrived, before its ticket says so."""
        self._fail = fail
        self._delivered = delivered
        self._tickets: dict[int, Ticket] = {}

    def open(self, room: int) -> Ticket:
        """A request begins; a ticket that its number had before is void."""
        ticket = self._tickets[room] = Ticket()
        return ticket

    def stop(self, room: int) -> None:
        """The room has failed, for a reason that everybody else was told of."""
        ticket = self._tickets.get(room)
        if ticket is not None:
            ticket.stopped = True

    def close(self, room: int, ticket: Ticket) -> None:
        """The request of this ticket is done with. Harmless when it is closed."""
        if self._tickets.get(room) is ticket:
            del self._tickets[room]

    def rooms(self) -> list[int]:
        """Rooms with a ticket."""
        return sorted(self._tickets)

    # ---- interfaces.Observer ----

    def chunk_done(self, chunk: Chunk) -> None:
        """After the last chunk the room is delivered."""
        ticket = self._tickets.get(chunk.room)
        if chunk.is_last and ticket is not None:
            self._delivered(chunk.room)
            ticket.delivered = True

    def room_failed(
        self, room: int, reason: Reason, text: str, error: BaseException | None
    ) -> None:
        """Decode and the scheduler are told why."""
        ticket = self._tickets.get(room)
        if ticket is not None:
            ticket.failure, ticket.error = text, error
        self._fail(room, reason, text)

    def room_buried(self, room: int) -> None:
        """The request is let go, although something is under way."""
        ticket = self._tickets.get(room)
        if ticket is not None:
            ticket.buried = True

    def room_quiet(self, room: int) -> None:
        """The request's pages and its metadata slot are its own again."""
        ticket = self._tickets.get(room)
        if ticket is not None:
            ticket.quiet = True

"""What the scheduler sees of a room's transfers: it asks, and is never called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk


@dataclass(eq=False)
class Ticket:
    """Of one room, written by its worker. Each field changes once, and never back."""

    #: It has failed or was given up, on whatever thread: nothing more is to be sent.
    stopped: bool = False
    #: Its last chunk, and so every other one, is with all its peers.
    delivered: bool = False
    #: It has ended, and nothing of it is under way.
    quiet: bool = False
    #: It has failed, and what is under way is not to be waited for. Its pages and its metadata slot
    #: may be used again all the same: decode is never told that the room is complete, and so
    #: discards whatever is written from them.
    buried: bool = False
    #: What the workers said of its failure, and what the transport raised, if it did.
    failure: str | None = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the request may end: its pages are not read, or nobody uses what is read."""
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
        fail: Callable[[int, Reason, str], bool],
        delivered: Callable[[int], None] = lambda room: None,
    ) -> None:
        """``fail(room, reason, text)`` tells decode that a room has failed here, and answers False
        where it is complete already; ``delivered`` is called when a room's last chunk has arrived,
        before its ticket says so."""
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

    def abandon(self, room: int, reason: Reason, text: str) -> None:
        """Its worker does not go on: fail it, and let the request go, unless it is over."""
        ticket = self._tickets.get(room)
        if ticket is None or ticket.delivered or ticket.is_over:
            return
        if not ticket.stopped:
            self.room_failed(room, reason, text, None)
        ticket.buried = True  # after the gate was stopped

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
        if chunk.is_last:
            self._deliver(chunk.room)

    def _deliver(self, room: int) -> None:
        ticket = self._tickets.get(room)
        if ticket is not None:
            self._delivered(room)
            ticket.delivered = True

    def room_failed(
        self, room: int, reason: Reason, text: str, error: BaseException | None
    ) -> None:
        """Decode and the scheduler are told why; unless decode has all of it."""
        ticket = self._tickets.get(room)
        if ticket is not None:
            ticket.failure, ticket.error = text, error
        if not self._fail(room, reason, text):
            self._deliver(room)

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

"""The states of a room on a prefill rank, every step between them, their clock, and who is
notified.

A room is one request's transfer to its decode ranks, under a number that the client chose.
``TRANSITIONS`` has every step that there is; docs/design.md draws it. ``RoomTable`` takes them.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from sglang.srt.disaggregation.delta.metrics import Reason

#: ``peer_messages.DeltaTransferInfo`` of either backend. Any: rooms and their table do not read it.
Announcement: TypeAlias = Any


class State(enum.Enum):
    """Of a room."""

    #: Decode ranks listed their pages; its request has not come.
    ANNOUNCED = "announced"
    #: Its request is here, and nothing of it is under way.
    CLAIMED = "claimed"
    #: Writes are under way.
    SENDING = "sending"
    #: Every write has settled; its worker is telling decode so, and has not left it.
    COMPLETING = "completing"
    #: Every write has settled, and its worker has left it.
    COMPLETE = "complete"
    #: Given up, while writes are under way.
    STOPPED = "stopped"
    #: Given up, and the writes under way missed their deadline: its request does not wait for them.
    OVERDUE = "overdue"
    #: Given up, and nothing is under way.
    DRAINED = "drained"
    #: Its request is gone, while writes are under way.
    LINGERING = "lingering"
    #: Not in the table: never seen, or over.
    ENDED = "ended"

    # By identity, in C: Enum's is a call of Python's, and each step looks states up.
    __hash__ = object.__hash__


class Event(enum.Enum):
    """What may happen to a room."""

    #: A decode rank listed its pages.
    ANNOUNCE = "announce"
    #: Its request came.
    CLAIM = "claim"
    #: A worker is about to post a write.
    ENTER = "enter"
    #: A worker: nothing of it is under way.
    LEAVE = "leave"
    #: A worker: every write has settled.
    COMPLETE = "complete"
    #: A worker: decode could not be notified that it is complete; a failure follows.
    TAKE_BACK = "take back"
    #: It failed, was aborted or withdrawn.
    STOP = "stop"
    #: A worker: what is under way missed its deadline or was broken off.
    OVERDUE = "overdue"
    #: The scheduler is done with its request.
    FORGET = "forget"

    __hash__ = object.__hash__


#: Every step that there is. An event that is not listed for a state changes nothing.
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ENDED, Event.ANNOUNCE): State.ANNOUNCED,
    (State.ENDED, Event.CLAIM): State.CLAIMED,
    (State.ANNOUNCED, Event.CLAIM): State.CLAIMED,
    (State.ANNOUNCED, Event.STOP): State.ENDED,
    (State.CLAIMED, Event.ENTER): State.SENDING,
    (State.CLAIMED, Event.COMPLETE): State.COMPLETE,
    (State.CLAIMED, Event.STOP): State.DRAINED,
    (State.CLAIMED, Event.FORGET): State.ENDED,
    (State.SENDING, Event.ENTER): State.SENDING,
    (State.SENDING, Event.LEAVE): State.CLAIMED,
    (State.SENDING, Event.COMPLETE): State.COMPLETING,
    (State.SENDING, Event.STOP): State.STOPPED,
    (State.SENDING, Event.FORGET): State.LINGERING,
    (State.COMPLETING, Event.LEAVE): State.COMPLETE,
    (State.COMPLETING, Event.TAKE_BACK): State.SENDING,
    (State.COMPLETING, Event.FORGET): State.LINGERING,
    (State.COMPLETE, Event.TAKE_BACK): State.CLAIMED,
    (State.COMPLETE, Event.FORGET): State.ENDED,
    (State.STOPPED, Event.OVERDUE): State.OVERDUE,
    (State.STOPPED, Event.LEAVE): State.DRAINED,
    (State.STOPPED, Event.FORGET): State.LINGERING,
    (State.OVERDUE, Event.LEAVE): State.DRAINED,
    (State.OVERDUE, Event.FORGET): State.LINGERING,
    (State.DRAINED, Event.FORGET): State.ENDED,
    (State.LINGERING, Event.STOP): State.LINGERING,
    (State.LINGERING, Event.LEAVE): State.ENDED,
}

UNDER_WAY = {State.SENDING, State.COMPLETING, State.STOPPED, State.OVERDUE, State.LINGERING}
COMPLETE = {State.COMPLETING, State.COMPLETE}
GONE = {State.LINGERING, State.ENDED}
UNCLAIMED = {State.ANNOUNCED} | GONE
#: Its request may go, and with it the source pages and the metadata slot.
OVER = {State.OVERDUE, State.DRAINED} | GONE
STOPPED = {State.STOPPED} | OVER


@dataclass(eq=False)
class Room:
    """One request's transfer; a later one of its number is another ``Room``. Written by the table,
    read by anybody without its lock.

    The scheduler asks each request in each step: what it reads are plain attributes.
    """

    number: int
    state: State = State.ENDED
    #: Nothing more of it is to be sent, because it was given up or is gone.
    is_stopped: bool = False
    #: It was given up and its request may end: nothing reads its pages, or what still reads them is
    #: of no use to anybody.
    is_over: bool = False
    #: By decode rank.
    announcements: dict[str, Announcement] = field(default_factory=dict)
    #: How many decode ranks announce it here; 0: not known.
    needed: int = 0
    #: When the first of them came, in the scheduler's time.
    announced_at: float = 0.0
    #: Why it was given up: there before its state says so. The first failure counts.
    reason: str | None = None
    #: What the transport raised, where that is why.
    error: BaseException | None = None
    #: All its decode ranks were notified that it is complete.
    delivered: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether its decode ranks have all of it, or are being notified."""
        return self.state in COMPLETE or (self.state is State.LINGERING and self.delivered)

    @property
    def is_announced(self) -> bool:
        """Whether all its decode ranks have announced it."""
        return 0 < self.needed <= len(self.announcements)


class _Ended(NamedTuple):
    reason: str
    #: Its request has come.
    had_request: bool
    #: All its decode ranks have announced it, and were told.
    had_ranks: bool
    #: When it ended, in the scheduler's time.
    at: float


class EndedRooms:
    """Why rooms were given up that are over, for whoever of theirs comes late.

    A number may be used again at once, so nobody is refused of whom all have come. Who that is
    cannot always be known (decode may have refused a request itself, and never announces it), so
    decode ranks are refused for so long only as two halves of a request may be apart.
    """

    def __init__(self, limit: int, apart_s: float, now: Callable[[], float]) -> None:
        """``limit``: rooms that are remembered; ``now`` gives seconds of the scheduler's time."""
        self._limit = limit
        self._apart_s = apart_s
        self._now = now
        self._rooms: OrderedDict[int, _Ended] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, number: int) -> bool:
        return number in self._rooms

    def add(
        self, number: int, reason: str, *, had_request: bool = False, had_ranks: bool = False
    ) -> None:
        """A room is over. Which halves of it have come?"""
        self._rooms[number] = _Ended(reason, had_request, had_ranks, self._now())
        while len(self._rooms) > self._limit:
            self._rooms.popitem(last=False)

    def refuse_request(self, number: int) -> str | None:
        """A request comes: why it is refused, or None where that of the ended room had come. The
        room is forgotten."""
        ended = self._rooms.pop(number, None)
        return None if ended is None or ended.had_request else ended.reason

    def refuse_rank(self, number: int) -> str | None:
        """A decode rank announces the number: why it is refused, or None where it may, and opens a
        room. The ended one is forgotten then."""
        ended = self._rooms.get(number)
        if ended is None:
            return None
        if ended.had_request and (ended.had_ranks or self._now() - ended.at >= self._apart_s):
            del self._rooms[number]
            return None
        return ended.reason


#: What one turn of the scheduler's loop counts at most, seconds. An idle one sleeps no longer.
TURN_S = 1.0


class SchedulerTime:
    """Counts seconds of the scheduler's turns: it stands still while the scheduler does one long
    thing. Written by its thread, read by any."""

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


class Listener(Protocol):
    """Who is notified of rooms: the rank's manager. Called on the thread that made it so."""

    def fail_known(self, room: int, text: str) -> bool:
        """Set SGLang's status to failed, for a request that is here and has not ended; whether it
        was one. Called with the table's lock held: must not wait, nor call the table."""

    def room_delivered(self, room: int) -> None:
        """Decode has all of it; comes before ``Room.delivered``."""

    def room_stopped(self, room: Room, kind: Reason) -> None:
        """It failed: whoever has chunks of it in a queue drops them. May come more than once, and
        when its number is a later room's already."""

    def room_drained(self, room: int, reason: str, announcements: list[Announcement]) -> None:
        """It was given up, and nothing is written for it now and later: these decode ranks may
        have their pages back. Each is told once."""

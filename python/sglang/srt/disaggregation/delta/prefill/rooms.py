"""A prefill rank's rooms: one state machine each, in one table, under one lock.

A room is one request's transfer to its decode ranks, under a number that the router or the client
chose. A write to decode's pages cannot be taken back by decode, so decode keeps the pages of a room
that ended early until prefill says that it writes no more; and prefill must not use the source
pages again while a write reads them. Both are decided here, and nowhere else:

- Nothing is posted for a room unless ``enter`` said yes. A room is *under way* from then until
  ``leave``: when nothing that was posted for it is under way any more.
- Complete or given up is one step, taken once: after ``complete`` no failure changes the room, and
  after a failure ``complete`` is never granted, whatever still lands.
- A room that was given up is *drained* when nothing of it is under way. Only then are its decode
  ranks told, and only then (or when its writes are overdue, so that waiting for them has no end:
  decode is never told that such a room is complete) may its request and its pages go.

Whoever has a ``Room`` names it by the object: a later room of its number is another one. The
scheduler reads it without the lock. Nobody is called with the lock held but ``Statuses``.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, Announced, now, record
from sglang.srt.disaggregation.delta.rank import Statuses
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: ``peer_messages.DeltaTransferInfo`` of either backend. Any: rooms and their table do not read it.
Announcement: TypeAlias = Any

#: So many rooms that were given up are remembered, for decode ranks and requests that are late.
_REMEMBERED = 4096


class RoomState(enum.Enum):
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


class RoomEvent(enum.Enum):
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


#: Every step that there is (docs/design.md draws it). An event that is not listed changes nothing.
TRANSITIONS: dict[tuple[RoomState, RoomEvent], RoomState] = {
    (RoomState.ENDED, RoomEvent.ANNOUNCE): RoomState.ANNOUNCED,
    (RoomState.ENDED, RoomEvent.CLAIM): RoomState.CLAIMED,
    (RoomState.ANNOUNCED, RoomEvent.CLAIM): RoomState.CLAIMED,
    (RoomState.ANNOUNCED, RoomEvent.STOP): RoomState.ENDED,
    (RoomState.CLAIMED, RoomEvent.ENTER): RoomState.SENDING,
    (RoomState.CLAIMED, RoomEvent.COMPLETE): RoomState.COMPLETE,
    (RoomState.CLAIMED, RoomEvent.STOP): RoomState.DRAINED,
    (RoomState.CLAIMED, RoomEvent.FORGET): RoomState.ENDED,
    (RoomState.SENDING, RoomEvent.ENTER): RoomState.SENDING,
    (RoomState.SENDING, RoomEvent.LEAVE): RoomState.CLAIMED,
    (RoomState.SENDING, RoomEvent.COMPLETE): RoomState.COMPLETING,
    (RoomState.SENDING, RoomEvent.STOP): RoomState.STOPPED,
    (RoomState.SENDING, RoomEvent.FORGET): RoomState.LINGERING,
    (RoomState.COMPLETING, RoomEvent.LEAVE): RoomState.COMPLETE,
    (RoomState.COMPLETING, RoomEvent.TAKE_BACK): RoomState.SENDING,
    (RoomState.COMPLETING, RoomEvent.FORGET): RoomState.LINGERING,
    (RoomState.COMPLETE, RoomEvent.TAKE_BACK): RoomState.CLAIMED,
    (RoomState.COMPLETE, RoomEvent.FORGET): RoomState.ENDED,
    (RoomState.STOPPED, RoomEvent.OVERDUE): RoomState.OVERDUE,
    (RoomState.STOPPED, RoomEvent.LEAVE): RoomState.DRAINED,
    (RoomState.STOPPED, RoomEvent.FORGET): RoomState.LINGERING,
    (RoomState.OVERDUE, RoomEvent.LEAVE): RoomState.DRAINED,
    (RoomState.OVERDUE, RoomEvent.FORGET): RoomState.LINGERING,
    (RoomState.DRAINED, RoomEvent.FORGET): RoomState.ENDED,
    (RoomState.LINGERING, RoomEvent.STOP): RoomState.LINGERING,
    (RoomState.LINGERING, RoomEvent.LEAVE): RoomState.ENDED,
}

UNDER_WAY = {
    RoomState.SENDING,
    RoomState.COMPLETING,
    RoomState.STOPPED,
    RoomState.OVERDUE,
    RoomState.LINGERING,
}
COMPLETE = {RoomState.COMPLETING, RoomState.COMPLETE}
#: More decode ranks may announce it.
OPEN = {RoomState.ANNOUNCED, RoomState.CLAIMED, RoomState.SENDING}
GONE = {RoomState.LINGERING, RoomState.ENDED}
UNCLAIMED = {RoomState.ANNOUNCED} | GONE
#: Its request may go, and with it the source pages and the metadata slot.
OVER = {RoomState.OVERDUE, RoomState.DRAINED} | GONE
STOPPED = {RoomState.STOPPED} | OVER


@dataclass(eq=False)
class Room:
    """One request's transfer. Written by the table, read by anybody without its lock."""

    number: int
    state: RoomState = RoomState.ENDED
    #: Nothing more of it is to be sent, because it was given up or is gone.
    is_stopped: bool = False
    #: It was given up and its request may end: nothing reads its pages, or what still reads them is
    #: of no use to anybody.
    is_over: bool = False
    #: By decode rank.
    announcements: dict[str, Announcement] = field(default_factory=dict)
    #: How many decode ranks announce it here; 0: not known.
    needed: int = 0
    #: When the first of them came.
    announced_at: float = 0.0
    #: Why it was given up: there before its state says so. The first failure counts.
    reason: str | None = None
    #: What the transport raised, where that is why.
    error: BaseException | None = None
    #: All its decode ranks were notified that it is complete.
    delivered: bool = False

    @property
    def is_announced(self) -> bool:
        """Whether all its decode ranks have announced it."""
        return 0 < self.needed <= len(self.announcements)


class RoomTable:
    """One for each prefill rank. Used by the scheduler, transfer workers and the reader thread."""

    def __init__(
        self,
        statuses: Statuses,
        clock: Callable[[], float] = time.monotonic,
        remembered: int = _REMEMBERED,
    ) -> None:
        self._statuses = statuses
        self._clock = clock
        self._remembered = remembered
        #: Called, on the thread that made it so, when a room has failed (whoever has chunks of it
        #: in a queue drops them), and once more when it is overdue.
        self.on_stopped: Callable[[Room, Reason], None] = lambda room, kind: None
        #: The same when nothing is written for a room that was given up, now and later: these
        #: decode ranks may have their pages back. Each is told once. (number, reason, whom)
        self.on_drained: Callable[[int, str, list[Announcement]], None] = lambda *told: None
        #: When each decode rank announced a room last. The reader thread's.
        self.last_announced: dict[str, float] = {}
        self._lock = threading.Lock()
        self._rooms: dict[int, Room] = {}
        #: Why rooms were given up (empty: all have come, and the number may be used again), and
        #: whether their requests have come.
        self._ended: OrderedDict[int, tuple[str, bool]] = OrderedDict()
        self._claim_s = environment.CLAIM_TIMEOUT.read()
        self._lease_s = environment.QUARANTINE_TIMEOUT.read() / 2
        self._ticked_at = clock()

    def room(self, number: int) -> Room | None:
        """The one that has the number now."""
        return self._rooms.get(number)

    def all(self) -> list[Room]:
        """Those of now."""
        with self._lock:
            return list(self._rooms.values())

    def _move(self, room: Room, event: RoomEvent) -> bool:
        """Take one step of ``TRANSITIONS``; False, and nothing changes, where there is none."""
        before, after = room.state, TRANSITIONS.get((room.state, event))
        if after is None:
            return False
        room.state = after
        if after in STOPPED:
            room.is_stopped, room.is_over = True, after in OVER
        if before is RoomState.ENDED:
            self._rooms[room.number] = room
        elif after is RoomState.ENDED:
            del self._rooms[room.number]
            has_request = before is not RoomState.ANNOUNCED
            if room.reason is not None:
                has_both = has_request and room.is_announced
                self._remember(room.number, "" if has_both else room.reason, has_request)
        return True

    def _remember(self, number: int, reason: str, has_request: bool) -> None:
        self._ended.setdefault(number, (reason, has_request))
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)

    # ---- the scheduler ----

    def claim(self, number: int) -> Room:
        """The request of a room is here: its room. One that has failed already, and is not in the
        table, where decode withdrew it before, or where another request has the number: until the
        scheduler is done with that one and no write is under way."""
        with self._lock:
            room = self._rooms.get(number)
            reason, has_request = self._ended.pop(number, ("", True))
            if room is None:
                room = Room(number)
            elif room.state is not RoomState.ANNOUNCED:
                reason = room.reason or f"room {number}: an earlier transfer still uses its number"
                has_request = False
            if has_request:
                self._move(room, RoomEvent.CLAIM)
                self._start_if_announced(room)
                return room
        _count(number, Reason.ABORTED, reason)
        return Room(number, is_stopped=True, is_over=True, reason=reason)

    def _start_if_announced(self, room: Room) -> None:
        """A room starts when its request is here and all its decode ranks have announced it,
        whichever comes last."""
        if room.is_announced and room.reason is None:
            self._statuses.advance(room.number, KVPoll.WaitingForInput)

    def forget(self, room: Room) -> None:
        """The request of ``room`` is done with. What is under way is still waited for."""
        with self._lock:
            if room.state in COMPLETE:
                room.announcements.clear()  # they have been told
            holder = self._rooms.get(room.number)
            if holder is None or holder is room or holder.state in UNCLAIMED:
                self._statuses.forget(room.number)
            self._move(room, RoomEvent.FORGET)

    # ---- anybody ----

    def fail(self, room: Room, kind: Reason, text: str, error: BaseException | None = None) -> bool:
        """Give one room up: nothing more is posted for it, and its decode ranks are notified when
        what was posted has settled. The first failure of a room counts; later ones change nothing.
        False if the room is complete: decode is being notified, and no failure changes that."""
        with self._lock:
            if room.state in COMPLETE:
                return False
            if room.reason is not None or room.state is RoomState.ENDED:
                return True
            is_here = room.state not in UNCLAIMED
            room.reason, room.error = text, error
            self._move(room, RoomEvent.STOP)
            told = [] if room.state in UNDER_WAY else list(room.announcements.values())
            if is_here:
                self._statuses.fail_known(room.number, text)
        if is_here:
            _count(room.number, kind, text)
        if told:
            self.on_drained(room.number, text, told)
        self.on_stopped(room, kind)
        return True

    def abandon(self, room: Room, kind: Reason, text: str) -> None:
        """Its worker does not go on: fail it, and let its request go."""
        if not room.delivered:
            self.room_failed(room, kind, text)
            self.room_overdue(room)

    # ---- decode ranks ----

    def announce(self, number: int, peer: str, announcement: Announcement, needed: int = 0) -> bool:
        """A decode rank listed its pages. False if they will not be filled, and it is notified.

        ``needed``: how many decode ranks announce the room here; 0: it does not say.

        A decode rank may announce a room after it failed here: it is notified at once. But where
        something is under way, maybe to these very pages, it is notified when that has settled. One
        that uses a number whose room is not over, or has all its decode ranks, is told at once too.

        A second announcement by one decode rank fails the room: chunks may have gone to the pages
        of the first one, and decode would take the second one's as written.
        """
        refused, is_second = "", False
        with self._lock:
            room = self._rooms.get(number)
            if room is None:
                refused, _ = self._ended.get(number, ("", True))
                if not refused:  # a later room of the number, with an end of its own
                    self._ended.pop(number, None)
                room = Room(number, announced_at=self._clock())
            elif room.reason is not None:
                refused = room.reason if room.state is RoomState.DRAINED else ""
            elif peer in room.announcements and room.state in OPEN:
                is_second = True
            elif room.is_announced or room.state not in OPEN:
                refused = (
                    f"room {number}: other decode ranks have announced it already, or an earlier "
                    "request with its number has not ended on this prefill rank yet"
                )
            if not refused and not is_second:
                self._move(room, RoomEvent.ANNOUNCE)  # of one that was not here
                room.announcements[peer], room.needed = announcement, needed
                self.last_announced[peer] = self._clock()
                self._start_if_announced(room)
        if refused:
            self.on_drained(number, refused, [announcement])
        elif is_second:
            text = f"room {number}: decode rank {peer} announced it a second time"
            self.fail(room, Reason.MISMATCH, text)
        elif room.is_announced and room.reason is None:
            record("prefill", lambda: Announced(at=now(), room=number))
        return not refused and not is_second

    def withdraw(self, number: int, text: str) -> None:
        """Decode gives a room up, maybe before it or its request gets here."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None:
                self._remember(number, text, has_request=False)
        if room is not None:
            self.fail(room, Reason.ABORTED, text)

    # ---- transfer workers. What is raised here costs the room, and no other one. ----

    def enter(self, room: Room) -> bool:
        """Whether a write may be posted now; if so, ``leave`` follows once nothing is under way."""
        self.check_suspension()
        with self._lock:
            return self._move(room, RoomEvent.ENTER)

    def leave(self, room: Room) -> None:
        """Nothing that was posted for it is under way. Changes nothing when nothing was posted."""
        with self._lock:
            is_drained = self._move(room, RoomEvent.LEAVE) and room.reason is not None
        if is_drained:
            self.on_drained(room.number, room.reason or "", list(room.announcements.values()))

    def complete(self, room: Room) -> bool:
        """Every write of the room has settled: whether decode may be notified. If so nothing can
        fail it any more but ``take_back``; if not, decode is never told."""
        with self._lock:
            return self._move(room, RoomEvent.COMPLETE)

    def take_back(self, room: Room) -> None:
        """Decode could not be notified that the room is complete: it may fail after all."""
        with self._lock:
            self._move(room, RoomEvent.TAKE_BACK)

    def deliver(self, room: Room) -> None:
        """Decode was notified that the room is complete."""
        if room.state in COMPLETE:
            self._statuses.advance(room.number, KVPoll.Success)
            room.delivered = True

    def room_failed(
        self, room: Room, kind: Reason, text: str, error: BaseException | None = None
    ) -> None:
        """Its worker gave it up, maybe while something is under way; unless decode has all."""
        if not self.fail(room, kind, text, error):
            self.deliver(room)

    def room_overdue(self, room: Room) -> None:
        """Its request is let go, although something is under way: it missed its deadline or was
        broken off, and may take for ever."""
        with self._lock:
            is_overdue = self._move(room, RoomEvent.OVERDUE)
        if is_overdue:
            self.on_stopped(room, Reason.TIMEOUT)

    # ---- time ----

    def tick(self) -> None:
        """Called every second or so by the reader thread: fail rooms whose request never came."""
        self.check_suspension()
        self._ticked_at = self._clock()
        for room in self.all():
            waited = self._ticked_at - room.announced_at
            if room.state is RoomState.ANNOUNCED and waited >= self._claim_s:
                self.fail(  # its request may just be coming
                    room,
                    Reason.TIMEOUT,
                    f"no request for it reached this prefill rank within {self._claim_s:.0f} s "
                    "(SGLANG_DISAGGREGATION_CLAIM_TIMEOUT)",
                )

    def check_suspension(self) -> None:
        """If this process did not run for long, decode may have given its pages to others."""
        gap = self._clock() - self._ticked_at
        for room in self.all() if gap >= self._lease_s else ():
            if room.announcements:
                text = f"this prefill process did not run for {gap:.0f} s"
                self.fail(room, Reason.PEER_LOST, text)


def _count(room: int, kind: Reason, text: str) -> None:
    """A request has failed."""
    STATS.count("kv_transfer_failed", reason=kind.value)
    log = logger.info if kind is Reason.ABORTED else logger.error
    log("KV transfer of room %s failed: %s", room, text)

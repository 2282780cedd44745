"""A prefill rank's rooms: one state machine each, in one table, under one lock.

A room is one request's transfer to its decode ranks, under a number that the router or the client
chose. Decode cannot stop a write to its pages, so it keeps the pages of a room that ended early
until prefill says that it writes no more; and prefill must not reuse the source pages while a write
reads them. Both are decided here, and nowhere else:

- Nothing is posted for a room unless ``enter`` returned True. The room is *under way* from then
  until ``leave``, when nothing that was posted for it is under way any more.
- Complete or given up is one step, taken once: after ``complete`` no failure changes the room, and
  after a failure ``complete`` is never granted, whatever still lands.
- A room that was given up is *drained* when nothing of it is under way. Only then are its decode
  ranks notified. Only then, or when its writes are overdue, may its request and its pages go: an
  overdue room is never complete on decode, so late writes reach pages that decode discards.

Contract: used by the scheduler, the transfer workers and the reader thread. The table's lock guards
every change of a ``Room``. The scheduler reads ``Room`` without it, and compares rooms by identity,
because room numbers are reused. Only ``Statuses`` is called with the lock held.
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

#: ``peer_messages.DeltaTransferInfo`` of either backend. Any: the table does not read it.
Announcement: TypeAlias = Any

#: Number of ended rooms to remember, for decode ranks and requests that are late.
_MAX_REMEMBERED = 4096


class RoomState(enum.Enum):
    """The state of a room."""

    #: Decode ranks listed their pages; the request has not come.
    ANNOUNCED = "announced"
    #: The request is here, and no write is under way.
    CLAIMED = "claimed"
    #: Writes are under way.
    SENDING = "sending"
    #: Every write has settled; the worker is notifying decode, and has not left the room.
    COMPLETING = "completing"
    #: Every write has settled, and the worker has left the room.
    COMPLETE = "complete"
    #: Given up, while writes are under way.
    STOPPED = "stopped"
    #: Given up, and the writes under way missed their deadline: the request waits no longer.
    OVERDUE = "overdue"
    #: Given up, and nothing is under way.
    DRAINED = "drained"
    #: The request is gone, while writes are under way.
    LINGERING = "lingering"
    #: Not in the table: never seen, or over.
    ENDED = "ended"

    # Hash by identity, because Enum's hash is a Python call and each step looks states up.
    __hash__ = object.__hash__


class RoomEvent(enum.Enum):
    """An event in the life of a room."""

    #: A decode rank listed its pages.
    ANNOUNCE = "announce"
    #: The request came.
    CLAIM = "claim"
    #: A worker is about to post a write.
    ENTER = "enter"
    #: A worker: nothing of the room is under way.
    LEAVE = "leave"
    #: A worker: every write has settled.
    COMPLETE = "complete"
    #: A worker: decode could not be notified of the completion; a failure follows.
    TAKE_BACK = "take back"
    #: The room failed, or was aborted or withdrawn.
    STOP = "stop"
    #: A worker: the writes under way missed their deadline or were broken off.
    OVERDUE = "overdue"
    #: The scheduler is done with the request.
    FORGET = "forget"

    __hash__ = object.__hash__


#: All transitions (docs/design.md draws them). Other events change nothing.
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
#: States in which more decode ranks may announce the room.
OPEN = {RoomState.ANNOUNCED, RoomState.CLAIMED, RoomState.SENDING}
GONE = {RoomState.LINGERING, RoomState.ENDED}
UNCLAIMED = {RoomState.ANNOUNCED} | GONE
#: States in which the request may go, with its source pages and metadata slot.
OVER = {RoomState.OVERDUE, RoomState.DRAINED} | GONE
STOPPED = {RoomState.STOPPED} | OVER


@dataclass(eq=False)
class Room:
    """One request's transfer. Written by the table, read by any thread without the lock."""

    number: int
    state: RoomState = RoomState.ENDED
    #: Nothing more is sent, because the room was given up or is gone.
    is_stopped: bool = False
    #: It was given up, and its request may end: no write that matters reads its pages.
    is_over: bool = False
    #: Announcements by decode rank.
    announcements: dict[str, Announcement] = field(default_factory=dict)
    #: Number of decode ranks that announce the room here; 0 if unknown.
    needed: int = 0
    #: When the first announcement came.
    announced_at: float = 0.0
    #: Why the room was given up; set before ``state`` shows it. The first failure counts.
    reason: str | None = None
    #: The exception of the transport, if that was the reason.
    error: BaseException | None = None
    #: All its decode ranks were notified of the completion.
    delivered: bool = False

    @property
    def is_announced(self) -> bool:
        """True if all its decode ranks have announced it."""
        return 0 < self.needed <= len(self.announcements)


class RoomTable:
    """The rooms of one prefill rank."""

    def __init__(
        self,
        statuses: Statuses,
        clock: Callable[[], float] = time.monotonic,
        remembered: int = _MAX_REMEMBERED,
    ) -> None:
        self._statuses = statuses
        self._clock = clock
        self._remembered = remembered
        #: Called when a room has failed, to drop its chunks, and again when it is overdue.
        self.on_stopped: Callable[[Room, Reason], None] = lambda room, kind: None
        #: Called with (number, reason, announcements) when no write of a failed room is or will be
        #: under way: these decode ranks may reuse their pages. Each is notified once.
        self.on_drained: Callable[[int, str, list[Announcement]], None] = lambda *told: None
        #: When each decode rank announced a room last. Used by the reader thread only.
        self.last_announced: dict[str, float] = {}
        self._lock = threading.Lock()
        self._rooms: dict[int, Room] = {}
        #: Rooms that ended early, by number: the reason (empty if request and announcements have
        #: all come, so that the number may be reused), and True if the request has come.
        self._ended: OrderedDict[int, tuple[str, bool]] = OrderedDict()
        self._claim_s = environment.CLAIM_TIMEOUT.read()
        self._lease_s = environment.QUARANTINE_TIMEOUT.read() / 2
        self._ticked_at = clock()

    def room(self, number: int) -> Room | None:
        """Return the room that has ``number`` now, or None."""
        return self._rooms.get(number)

    def all(self) -> list[Room]:
        """Return all rooms."""
        with self._lock:
            return list(self._rooms.values())

    def _move(self, room: Room, event: RoomEvent) -> bool:
        """Apply ``event``. Return False, and change nothing, if there is no such transition."""
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
        """Return the room of a request that arrived.

        If decode withdrew the room before, or an earlier request still uses the number (until the
        scheduler is done with it and no write is under way), the result is a failed room that is
        not in the table.
        """
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
        """Advance the status once the request is here and all decode ranks have announced it."""
        if room.is_announced and room.reason is None:
            self._statuses.advance(room.number, KVPoll.WaitingForInput)

    def forget(self, room: Room) -> None:
        """End the request of ``room``. Writes under way are still waited for."""
        with self._lock:
            if room.state in COMPLETE:
                room.announcements.clear()  # these ranks were notified
            holder = self._rooms.get(room.number)
            if holder is None or holder is room or holder.state in UNCLAIMED:
                self._statuses.forget(room.number)
            self._move(room, RoomEvent.FORGET)

    # ---- any thread ----

    def fail(self, room: Room, kind: Reason, text: str, error: BaseException | None = None) -> bool:
        """Give one room up: nothing more is posted, and its decode ranks are notified when all that
        was posted has settled. Later failures of the room change nothing. Return False if the room
        is complete: decode is being notified, and no failure changes that."""
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
        """Fail a room whose worker is stuck, and release its request."""
        if not room.delivered:
            self.room_failed(room, kind, text)
            self.room_overdue(room)

    # ---- decode ranks ----

    def announce(self, number: int, peer: str, announcement: Announcement, needed: int = 0) -> bool:
        """Record the pages that a decode rank listed. Return False if they will not be filled; the
        decode rank is notified. ``needed``: number of decode ranks that announce the room here, 0
        if unknown.

        A late announcement of a failed room is refused at once, unless a write is under way, maybe
        to these very pages: then the decode rank is notified when that has settled. A number whose
        room is not over, or already has all its decode ranks, is refused at once too. A second one
        by the same decode rank fails the room: chunks may have gone to the pages of the first.
        """
        refused, is_second = "", False
        with self._lock:
            room = self._rooms.get(number)
            if room is None:
                refused, _ = self._ended.get(number, ("", True))
                if not refused:  # a later room with the same number, with an end of its own
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
                self._move(room, RoomEvent.ANNOUNCE)  # changes only a new room
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
        """Give a room up for decode, maybe before its announcement or its request arrives."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None:
                self._remember(number, text, has_request=False)
        if room is not None:
            self.fail(room, Reason.ABORTED, text)

    # ---- transfer workers; an exception of these methods fails the room only ----

    def enter(self, room: Room) -> bool:
        """Return True if a write may be posted; ``leave`` then follows when all have settled."""
        self.check_suspension()
        with self._lock:
            return self._move(room, RoomEvent.ENTER)

    def leave(self, room: Room) -> None:
        """Record that no posted write is under way. Changes nothing if none was posted."""
        with self._lock:
            is_drained = self._move(room, RoomEvent.LEAVE) and room.reason is not None
        if is_drained:
            self.on_drained(room.number, room.reason or "", list(room.announcements.values()))

    def complete(self, room: Room) -> bool:
        """Return True if decode may be notified, now that every write has settled."""
        with self._lock:
            return self._move(room, RoomEvent.COMPLETE)

    def take_back(self, room: Room) -> None:
        """Let a complete room fail after all, because decode could not be notified."""
        with self._lock:
            self._move(room, RoomEvent.TAKE_BACK)

    def deliver(self, room: Room) -> None:
        """Record that decode was notified of the completion."""
        if room.state in COMPLETE:
            self._statuses.advance(room.number, KVPoll.Success)
            room.delivered = True

    def room_failed(
        self, room: Room, kind: Reason, text: str, error: BaseException | None = None
    ) -> None:
        """Fail a room for its worker, maybe while writes are under way, unless decode has it."""
        if not self.fail(room, kind, text, error):
            self.deliver(room)

    def room_overdue(self, room: Room) -> None:
        """Release the request although writes are under way, because these may never settle."""
        with self._lock:
            is_overdue = self._move(room, RoomEvent.OVERDUE)
        if is_overdue:
            self.on_stopped(room, Reason.TIMEOUT)

    # ---- time ----

    def tick(self) -> None:
        """Fail rooms whose request never came. Called about once a second by the reader thread."""
        self.check_suspension()
        self._ticked_at = self._clock()
        for room in self.all():
            waited = self._ticked_at - room.announced_at
            if room.state is RoomState.ANNOUNCED and waited >= self._claim_s:
                self.fail(  # not ``_move``, because the request may arrive at this moment
                    room,
                    Reason.TIMEOUT,
                    f"no request for it reached this prefill rank within {self._claim_s:.0f} s "
                    "(SGLANG_DISAGGREGATION_CLAIM_TIMEOUT)",
                )

    def check_suspension(self) -> None:
        """Fail announced rooms after a suspension, because decode may have reused its pages."""
        gap = self._clock() - self._ticked_at
        for room in self.all() if gap >= self._lease_s else ():
            if room.announcements:
                text = f"this prefill process did not run for {gap:.0f} s"
                self.fail(room, Reason.PEER_LOST, text)


def _count(room: int, kind: Reason, text: str) -> None:
    """Count and log a request that has failed."""
    STATS.count("kv_transfer_failed", reason=kind.value)
    log = logger.info if kind is Reason.ABORTED else logger.error
    log("KV transfer of room %s failed: %s", room, text)

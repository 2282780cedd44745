"""The owner of a prefill rank's rooms: one state machine for each, under one lock.

A room is one request's transfer to its decode ranks, under a number that the client chose. A write
to decode's pages cannot be taken back by decode, so decode keeps the pages of a room that ended
early until prefill says that it writes no more; and prefill must not use the source pages again
while a write reads them. Both are decided here, and nowhere else:

- Nothing is posted for a room unless ``enter`` said yes. A room is *under way* from then until
  ``leave``: when nothing that was posted under its number is under way any more.
- Complete or given up is one step, taken once: after ``complete`` no failure changes the room, and
  after a failure ``complete`` is never granted, whatever still lands.
- A room that was given up is *drained* when nothing of it is under way. Only then are its decode
  ranks told, and only then (or when its writes are overdue, so that waiting for them has no end:
  decode is never told that such a room is complete) may its request and its pages go.

The states and steps are those of ``room.TRANSITIONS``. The scheduler reads the ``Room`` that
``claim`` gave it without the lock. Nobody is called with the lock held but ``Listener.fail_known``,
which sets SGLang's own status of the room in the same step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.prefill.room import (
    COMPLETE,
    OVER,
    STOPPED,
    TRANSITIONS,
    UNCLAIMED,
    UNDER_WAY,
    Announcement,
    EndedRooms,
    Event,
    Listener,
    Room,
    SchedulerTime,
    State,
)
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: Rooms that were given up are remembered so far back, for decode ranks and requests that are late.
_REMEMBERED = 4096


class RoomTable:
    """One for each prefill rank. Used by the scheduler, transfer workers and the reader thread."""

    def __init__(
        self,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
        remembered: int = _REMEMBERED,
    ) -> None:
        self._listener = listener
        self._clock = clock
        #: When each decode rank announced a room last. The reader thread's.
        self.last_announced: dict[str, float] = {}
        self._lock = threading.Lock()
        self._rooms: dict[int, Room] = {}
        self._claim_s = environment.CLAIM_TIMEOUT.read()
        self._lease_s = max(environment.QUARANTINE_TIMEOUT.read() / 2, 1.0)
        self._ticked_at = clock()
        #: How long an announcement waits for its request: a scheduler that compiles or loads
        #: something takes no requests, and rooms must not be over when it looks again.
        self.scheduler_time = SchedulerTime(clock)
        self._ended = EndedRooms(remembered, self._claim_s, self.scheduler_time.seconds)

    def _move(self, room: Room, event: Event) -> bool:
        """Take one step of ``TRANSITIONS``; False, and nothing changes, where there is none."""
        before, after = room.state, TRANSITIONS.get((room.state, event))
        if after is None:
            return False
        room.state = after
        if after in STOPPED:
            room.is_stopped, room.is_over = True, after in OVER
        if before is State.ENDED:
            self._rooms[room.number] = room
        elif after is State.ENDED:
            del self._rooms[room.number]
            if room.reason is not None:
                had_request = before is not State.ANNOUNCED
                self._ended.add(
                    room.number, room.reason, had_request=had_request, had_ranks=room.is_announced
                )
        return True

    # ---- the scheduler ----

    def claim(self, number: int) -> tuple[Room, str | None]:
        """The request of a room is here: its room, and why it must fail at once, or None.

        Decode may withdraw a room before its request gets here. A number may be used again when the
        scheduler is done with its request and no write is under way. Before that another request
        of the number is refused, with a room of its own that is not in the table.
        """
        with self._lock:
            room = self._rooms.get(number)
            if room is None:
                reason = self._ended.refuse_request(number)
                room = Room(number)
                self._move(room, Event.CLAIM)
                return room, reason
            if room.state is not State.ANNOUNCED:
                reason = room.reason or (
                    f"room {number}: an earlier transfer still uses its number"
                )
                STATS.count(
                    "kv_transfer_failed", reason=Reason.ABORTED.value
                )  # ``fail`` counts none of another request's
                refused = Room(number, State.DRAINED, is_stopped=True, is_over=True, reason=reason)
                return refused, reason
            self._move(room, Event.CLAIM)
            return room, None

    def forget(self, room: Room) -> None:
        """The request of ``room`` is done with. What is under way is still waited for."""
        with self._lock:
            if self._rooms.get(room.number) is room:
                if room.state in COMPLETE:
                    room.announcements.clear()  # they have been told
                self._move(room, Event.FORGET)

    # ---- anybody ----

    def fail(
        self,
        number: int,
        kind: Reason,
        text: str,
        error: BaseException | None = None,
        meant: Room | None = None,
    ) -> bool:
        """Give one room up: nothing more is posted for it, and its decode ranks are notified when
        what was posted has settled. The first failure of a room counts; later ones change nothing.
        False if the room is complete: decode is being notified, and no failure changes that.

        ``meant``: the room, where its number may be a later one's by now. Such a failure is
        nobody's any more, and changes nothing.
        """
        with self._lock:
            room = self._rooms.get(number)
            if meant is not None and room is not meant:
                return True
            if room is not None and room.state in COMPLETE:
                return False
            told = self._stop(number, room, text, error)
            is_here = self._listener.fail_known(number, text)
        if is_here:
            STATS.count("kv_transfer_failed", reason=kind.value)
            log = logger.info if kind is Reason.ABORTED else logger.error
            log("KV transfer of room %s failed: %s", number, text)
        if told is not None:
            self._listener.room_drained(number, text, told)
        if room is not None:
            self._listener.room_stopped(room, kind)
        return True

    def _stop(
        self, number: int, room: Room | None, reason: str, error: BaseException | None
    ) -> list[Announcement] | None:
        """Whom to tell that it is drained; None where it is not, or was before."""
        if room is None:
            if number not in self._ended:
                self._ended.add(number, reason)
            return []
        if room.reason is not None:
            return None
        room.reason, room.error = reason, error
        self._move(room, Event.STOP)
        return None if room.state in UNDER_WAY else list(room.announcements.values())

    def abandon(self, number: int, kind: Reason, text: str) -> None:
        """Its worker does not go on: fail it, and let its request go."""
        room = self._rooms.get(number)
        if room is None or room.delivered or room.is_over:
            return
        if not room.is_stopped:
            self.room_failed(room, kind, text, None)
        self.room_overdue(number)

    # ---- decode ranks ----

    def announce(self, number: int, peer: str, announcement: Announcement, needed: int = 0) -> bool:
        """A decode rank listed its pages. False if they will not be filled, and it is notified.

        ``needed``: how many decode ranks announce the room here; 0: it does not say.

        A decode rank may announce a room after it failed here: it is notified at once. But where
        something is under way, maybe to these very pages, it is notified when that has settled. One
        that uses the number of a complete room again, before the scheduler is done with that one's
        request, or of a room that other decode ranks have announced, is told at once too.

        A second announcement by one decode rank fails the room: chunks may have gone to the pages
        of the first one, and decode would take the second one's as written.
        """
        with self._lock:
            room = self._rooms.get(number)
            refused = self._ended.refuse_rank(number) if room is None else None
            if room is not None and room.state is State.DRAINED:
                refused = room.reason
            elif room is not None and (
                room.is_complete or (room.state is State.LINGERING and room.reason is None)
            ):  # nobody would be told when the latter is left
                refused = (
                    f"room {number}: an earlier request with its number has not ended on this "
                    "prefill rank yet"
                )
            elif (
                room
                and room.reason is None
                and room.is_announced
                and (peer not in room.announcements)
            ):
                refused = f"room {number}: other decode ranks have announced it already"
            if refused is None:
                if room is None:
                    room = Room(number, announced_at=self.scheduler_time.seconds())
                    self._move(room, Event.ANNOUNCE)
                is_second = peer in room.announcements and room.reason is None
                if not is_second:
                    room.announcements[peer], room.needed = announcement, needed
                    self.last_announced[peer] = self._clock()
                    return True
        if refused is not None:
            self._listener.room_drained(number, refused, [announcement])
        else:
            text = f"room {number}: decode rank {peer} announced it a second time"
            self.fail(number, Reason.MISMATCH, text, meant=room)
        return False

    # ---- transfer workers. What is raised here costs the room, and no other one. ----

    def enter(self, room: Room) -> bool:
        """Whether a write may be posted now; if so, ``leave`` follows once nothing is under way.

        Asked for the room that the chunk is of, and not by number: a room is drained, and its
        number used again, before its worker has heard of that and dropped what is in its queue.
        """
        self._check_suspension()
        with self._lock:
            return self._move(room, Event.ENTER)

    def leave(self, number: int) -> None:
        """Nothing that was posted under this number is under way. Changes nothing when nothing was
        posted."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or not self._move(room, Event.LEAVE) or room.reason is None:
                return
            announcements = list(room.announcements.values())
        self._listener.room_drained(number, room.reason, announcements)

    def complete(self, room: Room) -> bool:
        """Every write of the room has settled: whether decode may be notified. If so nothing can
        fail it any more but ``take_back``; if not, decode is never told."""
        with self._lock:
            return self._move(room, Event.COMPLETE)

    def take_back(self, number: int) -> None:
        """Decode could not be notified that the room is complete: it may fail after all."""
        with self._lock:
            room = self._rooms.get(number)
            if room is not None:
                self._move(room, Event.TAKE_BACK)

    def chunk_done(self, chunk: Chunk) -> None:
        """A chunk and all before it are with all their peers; after the last one so is the room."""
        if chunk.is_last:
            self.deliver(chunk.room)

    def deliver(self, number: int) -> None:
        """Decode was notified that the room is complete."""
        room = self._rooms.get(number)
        if room is not None and room.state in COMPLETE:
            self._listener.room_delivered(number)
            room.delivered = True

    def room_failed(self, room: Room, kind: Reason, text: str, error: BaseException | None) -> None:
        """Its worker gave it up, maybe while something is under way; unless decode has all of it.
        ``error``: the backend's, if it was one."""
        if not self.fail(room.number, kind, text, error, meant=room):
            self.deliver(room.number)

    def room_overdue(self, number: int) -> None:
        """Its request is let go, although something is under way: it missed its deadline or was
        broken off, and may take for ever."""
        with self._lock:
            room = self._rooms.get(number)
            if room is not None:
                self._move(room, Event.OVERDUE)

    # ---- questions; those about one room need no lock ----

    def room(self, number: int) -> Room | None:
        """The one that has the number now."""
        return self._rooms.get(number)

    def destinations(self, number: int) -> list[Announcement]:
        """What the decode ranks of a room announced so far."""
        with self._lock:
            room = self._rooms.get(number)
            return list(room.announcements.values()) if room else []

    def stopped(self, number: int) -> str | None:
        """Why nothing more is posted for a room; None while it is open or unknown."""
        room = self._rooms.get(number)
        return room.reason if room is not None else None

    def is_under_way(self, number: int) -> bool:
        """Whether something that was posted for a room may still land."""
        room = self._rooms.get(number)
        return room is not None and room.state in UNDER_WAY

    def numbers(self, peer: str | None = None) -> list[int]:
        """Rooms in the table, or those of them that ``peer`` announced."""
        with self._lock:
            return [
                number
                for number, room in self._rooms.items()
                if peer is None or peer in room.announcements
            ]

    def peers(self) -> set[str]:
        """Decode ranks that announced a room of the table."""
        with self._lock:
            return {peer for room in self._rooms.values() for peer in room.announcements}

    def claimed(self) -> list[int]:
        """Rooms whose request is here."""
        with self._lock:
            rooms = self._rooms.items()
            return [number for number, room in rooms if room.state not in UNCLAIMED]

    def lingering(self) -> list[int]:
        """Rooms that were given up and whose request is gone, with writes that may still land: they
        missed their deadline or were broken off."""
        with self._lock:
            return [
                number
                for number, room in self._rooms.items()
                if room.state is State.LINGERING and room.reason is not None
            ]

    def unclaimed(self, for_s: float = 0.0) -> list[int]:
        """Rooms that were announced so many seconds ago and whose request did not come."""
        now = self.scheduler_time.seconds()
        with self._lock:
            return [
                number
                for number, room in self._rooms.items()
                if room.state is State.ANNOUNCED and now - room.announced_at >= for_s
            ]

    # ---- time ----

    def tick(self) -> None:
        """Called every second or so by the reader thread: fail rooms whose request never came."""
        self._check_suspension()
        self._ticked_at = self._clock()
        for number in self.unclaimed(self._claim_s):
            self.fail(  # its request may just be coming
                number,
                Reason.TIMEOUT,
                f"no request for it reached this prefill rank within {self._claim_s:.0f} s of "
                "scheduler time (SGLANG_DISAGGREGATION_CLAIM_TIMEOUT)",
            )

    def _check_suspension(self) -> None:
        """If this process did not run for long, decode may have given its pages to others."""
        gap = self._clock() - self._ticked_at
        if gap < self._lease_s:
            return
        for number in self.numbers():
            if self.destinations(number):
                self.fail(
                    number, Reason.PEER_LOST, f"this prefill process did not run for {gap:.0f} s"
                )

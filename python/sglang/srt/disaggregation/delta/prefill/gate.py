"""Which rooms a prefill rank may still write for, and who is told when one is quiet.

A write to decode's pages cannot be taken back by decode. So decode keeps the pages of a room that
ended early until prefill says that it has stopped, and this is where prefill knows: the gate is
entered before a write is posted and left when it has settled, and it can be stopped at any time.

Whether a room was completed or given up is decided here, in one step and for good. Decode is told
that a room is complete only after ``complete``; from then on ``stop`` changes nothing. After
``bar`` or ``stop`` no ``complete`` is granted, so decode can never take such a room, whatever lands
later.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Room:
    """One room that is known here. ``destinations``: the announcement of each decode rank."""

    destinations: dict[str, Any] = field(default_factory=dict)
    has_sender: bool = False
    #: When the first decode rank announced it.
    announced_at: float = 0.0
    busy: bool = False
    #: Its request is done with, while something that was posted is still under way.
    forgotten: bool = False
    stopped: str | None = None
    #: It is being given up, and ``stop`` follows.
    barred: bool = False
    #: Every write has settled, and decode is being told, or was.
    completed: bool = False


@dataclass(frozen=True)
class _Ended:
    """Why a room was stopped, for announcements and requests that come after that."""

    reason: str
    had_sender: bool


class RoomGate:
    """Used by the scheduler (or transfer workers) and by the thread that reads peers' messages.

    ``clock`` gives the age of announcements, in seconds.
    ``on_quiet(room, reason, destinations)`` is called once for a stopped room, when nothing that
    was posted for it is under way any more; without the lock, on the thread that made it so.
    """

    def __init__(
        self,
        on_quiet: Callable[[int, str, list[Any]], None],
        *,
        remembered: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_quiet = on_quiet
        self._clock = clock
        self._lock = threading.Lock()
        self._rooms: dict[int, _Room] = {}
        self._ended: OrderedDict[int, _Ended] = OrderedDict()
        self._limit = remembered

    def open(self, room: int) -> str | None:
        """A request for ``room`` arrived here. Why it must fail at once, or None.

        Decode may withdraw a room before its request gets here. But a room that failed here before
        is a number that a new request uses again.
        """
        with self._lock:
            ended = self._ended.pop(room, None)
            self._rooms.setdefault(room, _Room()).has_sender = True
        return ended.reason if ended is not None and not ended.had_sender else None

    def announce(self, room: int, peer: str, announcement: Any) -> str | None:
        """A decode rank listed its pages. Why they will not be filled, or None.

        A decode rank may announce a room after it failed here: it is to be told at once.
        """
        with self._lock:
            known = self._rooms.get(room)
            if known is None:
                ended = self._ended.get(room)
                if ended is not None:
                    return ended.reason
                known = self._rooms[room] = _Room(announced_at=self._clock())
            if known.stopped is not None and not known.busy:
                return known.stopped
            # Stopped while something is under way, maybe to these very pages: told when it settled.
            known.destinations[peer] = announcement
        return None

    def destinations(self, room: int) -> list[Any]:
        """What the decode ranks of ``room`` announced so far."""
        with self._lock:
            known = self._rooms.get(room)
            return list(known.destinations.values()) if known else []

    def enter(self, room: int) -> bool:
        """Whether a write may be posted for ``room``. If so it must be left when it has settled."""
        with self._lock:
            known = self._rooms.get(room)
            if known is None or known.barred or known.stopped is not None:
                return False
            known.busy = True
            return True

    def complete(self, room: int) -> bool:
        """Every write of ``room`` has settled: whether decode may be told so. If so the room is
        complete, and nothing can stop it any more but ``take_back``."""
        with self._lock:
            known = self._rooms.get(room)
            if known is None or known.barred or known.stopped is not None:
                return False
            known.completed = True
            return True

    def take_back(self, room: int) -> None:
        """Decode could not be told that ``room`` is complete: it may be stopped again."""
        with self._lock:
            known = self._rooms.get(room)
            if known is not None:
                known.completed = False

    def bar(self, room: int) -> bool:
        """``room`` is given up, and ``stop`` follows: from now on nothing is posted for it, and
        it is never complete. False, and nothing changes, if it is complete."""
        with self._lock:
            known = self._rooms.get(room)
            if known is not None:
                if known.completed:
                    return False
                known.barred = True
            return True

    def leave(self, room: int) -> None:
        """All that was posted for ``room`` has settled. Harmless when nothing was."""
        with self._lock:
            known = self._rooms.get(room)
            if known is None or not known.busy:
                return
            known.busy = False
            reason, destinations = known.stopped, list(known.destinations.values())
            if known.forgotten:
                self._drop(room, known)
        if reason is not None:
            self._on_quiet(room, reason, destinations)

    def stop(self, room: int, reason: str) -> bool:
        """Let nothing more be posted for ``room``; whether it is quiet. The first reason counts.
        A complete room stays complete."""
        with self._lock:
            known = self._rooms.get(room)
            if known is None:
                if room not in self._ended:
                    self._remember(room, _Ended(reason, had_sender=False))
                destinations: list[Any] = []
            elif known.stopped is not None or known.completed:
                return not known.busy
            else:
                known.stopped = reason
                destinations = list(known.destinations.values())
                if not known.has_sender:
                    del self._rooms[room]
                    self._remember(room, _Ended(reason, had_sender=False))
                if known.busy:
                    return False
        self._on_quiet(room, reason, destinations)
        return True

    def stopped(self, room: int) -> str | None:
        """Why nothing more is posted for ``room``; None while it is open or unknown."""
        with self._lock:
            known = self._rooms.get(room)
            return known.stopped if known is not None else None

    def forget(self, room: int) -> None:
        """The request of ``room`` is done with. What is under way is still waited for."""
        with self._lock:
            known = self._rooms.get(room)
            if known is None:
                return
            if known.busy:
                known.forgotten = True
            else:
                self._drop(room, known)

    def rooms(self, peer: str | None = None) -> list[int]:
        """Rooms that are known here, or those of them that ``peer`` announced."""
        with self._lock:
            return [
                room
                for room, known in self._rooms.items()
                if peer is None or peer in known.destinations
            ]

    def unclaimed(self, for_s: float = 0.0) -> list[int]:
        """Rooms announced ``for_s`` seconds ago or earlier whose request did not come."""
        now = self._clock()
        with self._lock:
            return [
                room
                for room, known in self._rooms.items()
                if not known.has_sender and now - known.announced_at >= for_s
            ]

    def _drop(self, room: int, known: _Room) -> None:
        del self._rooms[room]
        if known.stopped is not None:
            self._remember(room, _Ended(known.stopped, had_sender=True))

    def _remember(self, room: int, ended: _Ended) -> None:
        self._ended[room] = ended
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

"""A worker's records: rooms, their chunks, and what goes of a chunk to one peer.

Which waiting parcel is posted next: first in, first out for a peer, taking turns between peers.

A parcel waits in the lane of its peer. A peer whose quota is used up is passed over, so that what
waits for it holds nobody else up; and since all chunks of a room for a peer are in one lane, the
order within a room is kept.

Overdue transfers take places in their peer's quota, so that a stopped peer does not get more and
more of them; but one place is always left to try, and a transfer that is delivered shows that the
peer is back, whatever became of those before it: their places are free again.

What is due when: add, discard and ask for what has passed, each in logarithmic time.

Parcels that did not settle by their deadline: still waited for, apart, and only so many.

How soon a transfer that is under way is looked at again.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Of a parcel."""

    #: In its peer's lane.
    WAITING = "queued"
    #: Handles of ``Backend.post`` are under way.
    POSTED = "posted"
    #: Delivered, failed or dropped.
    OVER = "over"


@dataclass(eq=False)
class Room:
    """One life of a room number on its worker, from ``open`` to ``forget``."""

    number: int
    #: Chunks that are not done, in order.
    shipments: deque[Shipment] = field(default_factory=deque)
    #: Parcels that were posted and are not over.
    posted: int = 0
    #: Those of them that are not waited for.
    buried: int = 0
    #: Everything is with all peers, and they were told so.
    completed: bool = False
    #: Nothing more is posted. Never taken back.
    ended: bool = False
    said_overdue: bool = False
    #: The room table is told nothing more.
    forgotten: bool = False

    @property
    def has_landed(self) -> bool:
        """All its chunks were submitted, and are with all their peers."""
        chunks = self.shipments
        return bool(chunks) and chunks[-1].chunk.is_last and not any(s.parcels for s in chunks)


@dataclass(eq=False)
class Shipment:
    """One chunk on its way."""

    chunk: Chunk
    room: Room
    #: The parcels that are not over.
    parcels: list[Parcel] = field(default_factory=list)


@dataclass(eq=False)
class Parcel:
    """What goes of one chunk to one peer."""

    shipment: Shipment
    peer: str
    phase: Phase = Phase.WAITING
    #: Handles of the last post that are still to be released.
    handles: list[Any] = field(default_factory=list)
    #: Those of them that are not over.
    open: list[Any] = field(default_factory=list)
    #: Where the transport broke one off: when what it had sent of it counts as over.
    settles_at: float = 0.0
    #: When its last post returned, and when it is looked at next.
    posted_at: float = 0.0
    look_at: float = 0.0
    #: It missed its deadline or was broken off: its room does not wait for it.
    buried: bool = False

    @property
    def room(self) -> Room:
        """The room that it belongs to."""
        return self.shipment.room

    @property
    def chunk(self) -> Chunk:
        """The chunk that it belongs to."""
        return self.shipment.chunk


@dataclass
class _Lane:
    waiting: OrderedDict[Parcel, None] = field(default_factory=OrderedDict)
    #: Parcels that were posted and are neither over nor buried.
    posted: int = 0
    #: Buried ones that take a place.
    overdue: set[Parcel] = field(default_factory=set)


class Lanes:
    """Of one worker. ``window``, ``quota``: as in ``Settings``."""

    def __init__(self, window: int, quota: int) -> None:
        self._window = window
        self._quota = quota
        self._lanes: dict[str, _Lane] = {}
        #: Peers with waiting parcels, whose turn is next first.
        self._turns: OrderedDict[str, None] = OrderedDict()
        self._waiting = 0
        #: Posted parcels that take a place in the window.
        self._in_window = 0
        #: Nothing was found to post, and nothing has changed since then.
        self._stuck = False

    @property
    def waiting(self) -> int:
        """Parcels that wait."""
        return self._waiting

    @property
    def in_window(self) -> int:
        """Posted parcels that are neither over nor buried."""
        return self._in_window

    @property
    def peers(self) -> int:
        """Peers for which anything waits or is under way."""
        return len(self._lanes)

    def add(self, parcel: Parcel) -> None:
        """It waits, behind all others for its peer."""
        self._lanes.setdefault(parcel.peer, _Lane()).waiting[parcel] = None
        self._turns.setdefault(parcel.peer)
        self._waiting += 1
        self._stuck = False

    def drop(self, parcel: Parcel) -> None:
        """It waits no more, and is not posted."""
        del self._lanes[parcel.peer].waiting[parcel]
        self._shorter(parcel.peer)

    def take(self) -> Parcel | None:
        """The next parcel to post, which takes its places; None where nothing may be posted."""
        if self._stuck:
            return None
        window_full = self._in_window >= self._window
        for peer in self._turns:
            lane = self._lanes[peer]
            places = max(1, self._quota - len(lane.overdue))
            if lane.posted >= places or (window_full and lane.posted):
                continue
            parcel, _ = lane.waiting.popitem(last=False)
            lane.posted += 1
            self._in_window += 1
            self._turns.move_to_end(peer)
            self._shorter(peer)
            return parcel
        self._stuck = True
        return None

    def bury(self, parcel: Parcel) -> None:
        """It keeps its place in the peer's quota, but not the one in the window."""
        lane = self._lanes[parcel.peer]
        lane.posted -= 1
        lane.overdue.add(parcel)
        self._in_window -= 1
        self._stuck = False

    def finish(self, parcel: Parcel, delivered: bool = False) -> None:
        """A posted parcel is over, or not waited for any more. Harmless for one that is."""
        lane = self._lanes.get(parcel.peer)
        if lane is None:
            return
        if parcel.buried:
            lane.overdue.discard(parcel)
        else:
            lane.posted -= 1
            self._in_window -= 1
            if delivered:
                lane.overdue.clear()
        self._stuck = False
        self._tidy(parcel.peer, lane)

    def _shorter(self, peer: str) -> None:
        lane = self._lanes[peer]
        self._waiting -= 1
        self._stuck = False
        if not lane.waiting:
            del self._turns[peer]
        self._tidy(peer, lane)

    def _tidy(self, peer: str, lane: _Lane) -> None:
        if not lane.waiting and not lane.posted and not lane.overdue:
            del self._lanes[peer]


Item = TypeVar("Item")

#: Discarded entries that are let lie before the heap is built anew.
_SLACK = 64


class Deadlines(Generic[Item]):
    """Items (hashable by identity) with a time each. Holds no item that was discarded or passed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._items: dict[int, Item] = {}
        self._tickets: dict[Item, int] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, at: float, item: Item) -> None:
        """``item`` is due at ``at``; an item is added once."""
        ticket = next(self._count)
        self._items[ticket] = item
        self._tickets[item] = ticket
        heapq.heappush(self._heap, (at, ticket))

    def discard(self, item: Item) -> None:
        """``item`` is not waited for any more; harmless when it is not in here."""
        ticket = self._tickets.pop(item, None)
        if ticket is None:
            return
        del self._items[ticket]
        if len(self._heap) > 2 * len(self._items) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[Item]:
        """Take out everything that was due at ``now`` or before, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            item = self._items.pop(heapq.heappop(self._heap)[1], None)
            if item is not None:
                del self._tickets[item]
                due.append(item)
        return due

    def next_at(self) -> float | None:
        """When the next item is due; None where there is none."""
        while self._heap and self._heap[0][1] not in self._items:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


#: Handles that are given up. A transfer that is under way can neither be taken back nor released,
#: and some bindings release in the destructor: these live as long as the process.
KEPT: list[Any] = []


def keep(parcel: Parcel) -> None:
    """Give the handles of a parcel up: never looked at, never released."""
    KEPT.extend(parcel.handles)


class Graveyard:
    """Of one worker; at most ``limit`` parcels."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parcels: OrderedDict[Parcel, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, parcel: Parcel) -> Parcel | None:
        """Take one in. If that is one too many: the oldest, which is not waited for any more."""
        self._parcels[parcel] = None
        logger.error(
            "room %d: a transfer to %s did not settle by its deadline; it is still waited for "
            "(%d such transfers), and decode's pages stay held until then, or for its "
            "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
            parcel.room.number,
            parcel.peer,
            len(self._parcels),
        )
        if len(self._parcels) <= self._limit:
            return None
        oldest, _ = self._parcels.popitem(last=False)
        logger.critical(
            "room %d: a transfer to %s is given up: it never settled, and %d later ones did not "
            "either. Its handle is never released, and nobody is told that it is quiet",
            oldest.room.number,
            oldest.peer,
            self._limit,
        )
        return oldest

    def discard(self, parcel: Parcel) -> None:
        """It has settled after all; harmless for a parcel that is not in here."""
        self._parcels.pop(parcel, None)


#: The shortest pause, in seconds; every other one is a power of two times as long.
SHORTEST_S = 50e-6
#: The longest (0.8 ms) for a transfer that may settle any moment.
_LONGEST = 2**4
#: The pause (1.6 ms) for one that has taken longer than ``_LONG_AFTER_S``, and the pause (25.6 ms)
#: after ``_SLOW_AFTER_S``, when its peer may as well be stopped.
_LONG = 2**5
_LONG_AFTER_S = 1.0
_SLOW = 2**9
_SLOW_AFTER_S = 10.0
#: The pause (0.2 s) for one that missed its deadline.
_BURIED = 2**12
#: Of the time under way, the part that looking too late may add.
_FRACTION = 1 / 16


def next_look(now: float, age: float, buried: bool = False) -> float:
    """When to look again at a transfer that has been under way for ``age`` seconds.

    All such times lie on one grid, the coarser pauses on a part of its lines. So a worker with many
    transfers wakes up for all of them at once, and never more often than every ``SHORTEST_S``.
    """
    if buried:
        pause = _BURIED
    elif age >= _SLOW_AFTER_S:
        pause = _SLOW
    elif age >= _LONG_AFTER_S:
        pause = _LONG
    else:
        pause = 1
        while pause < _LONGEST and 2 * pause * SHORTEST_S <= age * _FRACTION:
            pause *= 2
    line = pause * SHORTEST_S
    # A thousandth of a pause covers what rounding does to the time of a line: it is not met twice.
    return (math.floor(now / line + 1e-3) + 1) * line

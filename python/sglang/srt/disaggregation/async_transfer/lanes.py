"""Which waiting parcel is posted next: first in, first out for a peer, taking turns between peers.

A parcel waits in the lane of its peer. A peer whose quota is used up is passed over, so that what
waits for it holds nobody else up; and since all chunks of a room for a peer are in one lane, the
order within a room is kept.

Overdue transfers take places in their peer's quota, so that a stopped peer does not get more and
more of them; but one place is always left to try, and a transfer that is delivered shows that the
peer is back, whatever became of those before it: their places are free again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang.srt.disaggregation.async_transfer.parcels import Parcel


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

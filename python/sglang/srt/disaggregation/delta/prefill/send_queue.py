"""What a transfer worker has to do: records of what is queued and posted, and what is next.

``SendQueue`` says which waiting transfer (one chunk to one peer) is posted next: first in, first
out for a peer, taking turns between peers. A peer whose quota is used up is passed over, so that
what waits for it holds nobody else up; and since all chunks of a room for a peer are in one queue,
the order within a room is kept.

Overdue transfers take places in their peer's quota, so that a stopped peer does not get more and
more of them; but one place is always left to try, and a transfer that is delivered shows that the
peer is back, whatever became of those before it: their places are free again.
``next_poll`` says when the transport is asked about a transfer again.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any  # Any: handles are the backend's own

from sglang.srt.disaggregation.delta.prefill.rooms import Room
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk


@dataclass(eq=False)
class RoomQueue:
    """A room on its worker, from ``open`` to ``forget``."""

    #: The room table's: a later room of its number is another one.
    room: Room
    #: Chunks that are not done, in order.
    sends: deque[ChunkSend] = field(default_factory=deque)
    #: Transfers that were posted and are not over.
    posted: int = 0
    #: Those of them that are overdue: nobody waits for them.
    overdue: int = 0
    #: Everything is with all peers, and they were notified.
    completed: bool = False
    #: Nothing more is posted. Never taken back.
    ended: bool = False

    @property
    def number(self) -> int:
        """The room's."""
        return self.room.number


@dataclass(eq=False)
class ChunkSend:
    """One chunk on its way."""

    chunk: Chunk
    room: RoomQueue
    #: The transfers that are not over.
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(eq=False)
class Transfer:
    """One chunk to one peer."""

    send: ChunkSend
    peer: str
    #: It is not in its peer's queue any more.
    is_posted: bool = False
    #: Handles of the last post that are still to be released.
    handles: list[Any] = field(default_factory=list)
    #: Those of them that are not over.
    open: list[Any] = field(default_factory=list)
    #: Where the transport broke one off: when what it had sent of it counts as over.
    settles_at: float = 0.0
    #: A part of it was never begun: it says nothing about its peer.
    is_dropped: bool = False
    #: When its last post returned, and when it is polled next.
    posted_at: float = 0.0
    poll_at: float = 0.0
    #: It missed its deadline or was broken off: its room does not wait for it.
    is_overdue: bool = False


@dataclass
class _PeerQueue:
    waiting: OrderedDict[Transfer, None] = field(default_factory=OrderedDict)
    #: Transfers that were posted and are neither over nor overdue.
    posted: int = 0
    #: Overdue ones that take a place.
    overdue: set[Transfer] = field(default_factory=set)


class SendQueue:
    """Of one worker. ``window``, ``quota``: as in ``TransferSettings``."""

    def __init__(self, window: int, quota: int) -> None:
        self._window = window
        self._quota = quota
        self._queue: dict[str, _PeerQueue] = {}
        #: Peers with waiting transfers, whose turn is next first.
        self._turns: OrderedDict[str, None] = OrderedDict()
        #: Transfers that wait.
        self.waiting = 0
        #: Posted transfers that are neither over nor overdue: they take a place in the window.
        self.in_window = 0
        #: Nothing was found to post, and nothing has changed since: a worker asks in each step, and
        #: there may be hundreds of peers.
        self._stuck = False

    def __len__(self) -> int:
        """Peers for which anything waits or is under way."""
        return len(self._queue)

    def add(self, transfer: Transfer) -> None:
        """It waits, behind all others for its peer."""
        self._queue.setdefault(transfer.peer, _PeerQueue()).waiting[transfer] = None
        self._turns.setdefault(transfer.peer)
        self._changed(transfer.peer, 1)

    def drop(self, transfer: Transfer) -> None:
        """It waits no more, and is not posted."""
        del self._queue[transfer.peer].waiting[transfer]
        self._changed(transfer.peer, -1)

    def take(self) -> Transfer | None:
        """The next transfer to post, which takes its slots; None where nothing may be posted."""
        if self._stuck:
            return None
        window_full = self.in_window >= self._window
        for peer in self._turns:
            queue = self._queue[peer]
            places = max(1, self._quota - len(queue.overdue))
            if queue.posted >= places or (window_full and queue.posted):
                continue
            transfer, _ = queue.waiting.popitem(last=False)
            queue.posted += 1
            self.in_window += 1
            self._turns.move_to_end(peer)
            self._changed(peer, -1)
            return transfer
        self._stuck = True
        return None

    def mark_overdue(self, transfer: Transfer) -> None:
        """It keeps its slot in the peer's quota, but not the one in the window."""
        queue = self._queue[transfer.peer]
        queue.posted -= 1
        queue.overdue.add(transfer)
        self.in_window -= 1
        self._changed(transfer.peer)

    def finish(self, transfer: Transfer, delivered: bool = False) -> None:
        """A posted transfer is over, or not waited for any more. Harmless for one that is."""
        queue = self._queue.get(transfer.peer)
        if queue is None:
            return
        if transfer.is_overdue:
            queue.overdue.discard(transfer)
        else:
            queue.posted -= 1
            self.in_window -= 1
            if delivered:
                queue.overdue.clear()
        self._changed(transfer.peer)

    def _changed(self, peer: str, waiting: int = 0) -> None:
        queue = self._queue[peer]
        self.waiting += waiting
        self._stuck = False
        if not queue.waiting:
            self._turns.pop(peer, None)
            if not queue.posted and not queue.overdue:
                del self._queue[peer]


#: The shortest pause, in seconds; every other one is a power of two times as long.
SHORTEST_S = 50e-6
#: The longest (1.6 ms) for a transfer that may settle any moment, and the pause (25.6 ms) for one
#: that has taken longer than ``_SLOW_AFTER_S``: its peer may as well be stopped.
_LONGEST = 2**5
_SLOW = 2**9
_SLOW_AFTER_S = 10.0
#: The pause (0.2 s) for one that missed its deadline.
_OVERDUE = 2**12
#: Of the time under way, the part that polling too late may add.
_FRACTION = 1 / 16


def next_poll(now: float, age: float, is_overdue: bool = False) -> float:
    """When to poll a transfer again that has been under way for ``age`` seconds.

    All such times lie on one grid, the coarser pauses on a part of its lines. So a worker with many
    transfers wakes up for all of them at once, and never more often than every ``SHORTEST_S``.
    """
    if is_overdue:
        pause = _OVERDUE
    elif age >= _SLOW_AFTER_S:
        pause = _SLOW
    else:  # the largest power of two that is neither more than its part of the age nor the longest
        wanted = min(int(age * (_FRACTION / SHORTEST_S)), _LONGEST)
        pause = 1 << wanted.bit_length() >> 1 or 1
    line = pause * SHORTEST_S
    # A thousandth of a pause covers what rounding does to the time of a line: it is not met twice.
    return (math.floor(now / line + 1e-3) + 1) * line

"""The queue of a transfer worker: records of waiting and posted transfers, and which is next.

``SendQueue`` picks the waiting transfer to post next; ``next_poll`` returns when to poll a posted
one again.

Contract: used by the thread of one worker only.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any  # Any: handles are the backend's own

from sglang.srt.disaggregation.delta.prefill.rooms import Room
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk


@dataclass(eq=False)
class RoomTransfers:
    """A room on its worker, from ``open`` to ``forget``."""

    #: The object, because room numbers are reused.
    room: Room
    #: Transfers that are not over, in the order of their chunks.
    transfers: dict[Transfer, None] = field(default_factory=dict)
    #: The last chunk of the room, once it was submitted.
    last: Chunk | None = None
    #: Number of transfers that were posted and are not over.
    posted: int = 0
    #: Number of those that are overdue: the request does not wait for them.
    overdue: int = 0
    #: Everything is with all peers, and the room table agreed to say so.
    is_complete: bool = False
    #: Nothing more is posted. Never reverted.
    ended: bool = False


@dataclass(eq=False)
class Transfer:
    """One chunk to one peer."""

    chunk: Chunk
    peer: str
    room: RoomTransfers
    #: True once it has left its peer's queue.
    is_posted: bool = False
    #: Handles of its post that are still to be released.
    handles: list[Any] = field(default_factory=list)
    #: Handles that are not over.
    open: list[Any] = field(default_factory=list)
    #: If the transport broke one off: when everything that was sent of it counts as over.
    settles_at: float = 0.0
    #: A part of it was never begun, so it proves nothing about its peer.
    is_dropped: bool = False
    #: When its post returned, and when it is polled next.
    posted_at: float = 0.0
    poll_at: float = 0.0
    #: True if it missed its deadline or was broken off, so its room does not wait for it.
    is_overdue: bool = False

    @property
    def is_live(self) -> bool:
        """True until it is over or dropped."""
        return self in self.room.transfers


@dataclass
class _PeerQueue:
    waiting: OrderedDict[Transfer, None] = field(default_factory=OrderedDict)
    #: Number of transfers that were posted and are neither over nor overdue.
    posted: int = 0
    #: Overdue transfers that take a place in the quota.
    overdue: set[Transfer] = field(default_factory=set)


class SendQueue:
    """Waiting transfers of one worker: first in, first out for a peer, and peers in turns.

    A peer whose quota is used up is skipped, so it delays no other peer. All chunks of a room for a
    peer are in one queue, so they stay in order. Overdue transfers take places in their peer's
    quota, because a stopped peer would otherwise get more and more of them. One place is always
    left, and a transfer that is delivered proves that the peer is back and frees the others.
    """

    def __init__(self, window: int, quota: int) -> None:
        """``window``, ``quota``: as in ``TransferSettings``."""
        self._window = window
        self._quota = quota
        self._queue: dict[str, _PeerQueue] = {}
        #: Peers with waiting transfers, in the order of their turns.
        self._turns: OrderedDict[str, None] = OrderedDict()
        #: Number of waiting transfers.
        self.waiting = 0
        #: Number of posted transfers that are neither over nor overdue: the window in use.
        self.in_window = 0
        #: True if the last search found nothing and nothing has changed since. Every step
        #: searches, and there may be hundreds of peers.
        self._stuck = False

    def __len__(self) -> int:
        """Return the number of peers with waiting or posted transfers."""
        return len(self._queue)

    def add(self, transfer: Transfer) -> None:
        """Append ``transfer`` to the queue of its peer."""
        self._queue.setdefault(transfer.peer, _PeerQueue()).waiting[transfer] = None
        self._turns.setdefault(transfer.peer)
        self._changed(transfer.peer, 1)

    def drop(self, transfer: Transfer) -> None:
        """Remove a waiting transfer."""
        del self._queue[transfer.peer].waiting[transfer]
        self._changed(transfer.peer, -1)

    def take(self) -> Transfer | None:
        """Return the next transfer to post, which takes its slots; None if none may be posted."""
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
        """Free the slot in the window, and keep the one in the peer's quota."""
        queue = self._queue[transfer.peer]
        queue.posted -= 1
        queue.overdue.add(transfer)
        self.in_window -= 1
        self._changed(transfer.peer)

    def finish(self, transfer: Transfer, delivered: bool = False) -> None:
        """Free the slots of a transfer that is over or abandoned."""
        queue = self._queue.get(transfer.peer)
        if queue is None:
            return  # it was overdue, and a delivered transfer has freed its place
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


# ---- the pauses between polls ----

#: The shortest pause, in seconds; all others are this times a power of two.
SHORTEST_S = 50e-6
#: The longest pause (1.6 ms) while a transfer may settle any moment, in units of ``SHORTEST_S``.
_LONGEST = 2**5
#: The pause (25.6 ms) after ``_SLOW_AFTER_S`` seconds: the peer may have stopped.
_SLOW = 2**9
_SLOW_AFTER_S = 10.0
#: The pause (0.2 s) of a transfer that missed its deadline.
_OVERDUE = 2**12
#: Largest part of the time under way that a late poll may add.
_MAX_DELAY_RATIO = 1 / 16


def next_poll(now: float, age: float, is_overdue: bool = False) -> float:
    """Return when to poll a transfer again that has been under way for ``age`` seconds.

    The time is a multiple of the pause, and every pause is ``SHORTEST_S`` times a power of two, so
    that transfers are due together and a worker wakes up at most once every ``SHORTEST_S``.
    """
    if is_overdue:
        pause = _OVERDUE
    elif age >= _SLOW_AFTER_S:
        pause = _SLOW
    else:  # the largest power of two that exceeds neither its part of the age nor the longest
        wanted = min(int(age * (_MAX_DELAY_RATIO / SHORTEST_S)), _LONGEST)
        pause = 1 << wanted.bit_length() >> 1 or 1
    line = pause * SHORTEST_S
    # Add a thousandth of a pause, because rounding could otherwise return the same line twice.
    return (math.floor(now / line + 1e-3) + 1) * line

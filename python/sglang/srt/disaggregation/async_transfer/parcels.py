"""A worker's records: rooms, their chunks, and what goes of a chunk to one peer."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.disaggregation.async_transfer.chunk import Chunk


class Phase(enum.Enum):
    """Of a parcel. Only those in ``UNDER_WAY`` have handles."""

    #: In its peer's lane.
    WAITING = "queued"
    #: Handles of ``Backend.post`` are under way.
    POSTED = "posted"
    #: They are done; it waits for earlier chunks of the room to the same peer.
    LANDED = "landed"
    #: Handles of ``Backend.after_done`` are under way.
    FOLLOWED = "followed up"
    #: Delivered, failed or dropped.
    OVER = "over"


UNDER_WAY = (Phase.POSTED, Phase.FOLLOWED)


@dataclass(eq=False)
class Room:
    """One life of a room number on its worker, from ``open`` to ``forget``."""

    number: int
    #: Chunks that are not done, in order.
    shipments: deque[Shipment] = field(default_factory=deque)
    #: By peer: parcels that were posted and are not over, in order.
    lines: dict[str, deque[Parcel]] = field(default_factory=dict)
    #: Parcels in ``lines``.
    posted: int = 0
    #: Those of them that missed their deadline.
    buried: int = 0
    #: Nothing more is posted. Never taken back.
    ended: bool = False
    said_buried: bool = False
    said_quiet: bool = False
    #: The observer is told nothing more.
    forgotten: bool = False

    def line_up(self, parcel: Parcel) -> None:
        """It is being posted, after all others of this room to its peer."""
        self.lines.setdefault(parcel.peer, deque()).append(parcel)
        self.posted += 1

    def step_out(self, parcel: Parcel) -> None:
        """It is over."""
        line = self.lines[parcel.peer]
        line.remove(parcel)
        if not line:
            del self.lines[parcel.peer]
        self.posted -= 1
        self.buried -= parcel.buried


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
    #: When its last post returned, and when it is looked at next.
    posted_at: float = 0.0
    look_at: float = 0.0
    #: It missed its deadline, and is looked at rarely.
    buried: bool = False

    @property
    def room(self) -> Room:
        """The room that it belongs to."""
        return self.shipment.room

    @property
    def chunk(self) -> Chunk:
        """The chunk that it belongs to."""
        return self.shipment.chunk

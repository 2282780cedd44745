"""A worker's records: rooms, their chunks, and what goes of a chunk to one peer."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.disaggregation.async_transfer.chunk import Chunk


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
    said_buried: bool = False
    said_quiet: bool = False
    #: The observer is told nothing more.
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

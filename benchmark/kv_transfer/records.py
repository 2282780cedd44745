"""What crosses between the benchmark and its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmark.kv_transfer.clocks import Turn
from benchmark.kv_transfer.shapes import Shape

#: ``radix`` is ours with decode as the flag of the radix cache makes it: it says how many pages it
#: has, and takes the metadata in a note. ``ours-spin`` is ours with workers that look at what is
#: under way without a pause.
ARMS = ("stock", "ours", "radix", "ours-spin")
BACKENDS = ("nixl", "mooncake")

#: Page indices into a pool, as SGLang keeps them.
Pages = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RoomPlan:
    """One room: which pages go where."""

    room: int
    #: Index of the decode peer.
    peer: int
    source: Pages
    destination: Pages
    #: Metadata slot, on both sides.
    slot: int
    chunks: int = 1

    def parts(self) -> list[Pages]:
        """The source pages of each chunk."""
        return np.array_split(self.source, self.chunks)


def by_peer(plans: Sequence[RoomPlan], peers: int) -> list[list[RoomPlan]]:
    """The rooms of each peer."""
    return [[plan for plan in plans if plan.peer == peer] for peer in range(peers)]


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """One arm's processes."""

    arm: str
    backend: str
    shape: Shape
    page_size: int
    #: Pages of each pool.
    pool_pages: int
    #: Metadata slots of each process.
    slots: int
    peers: int = 1
    #: One of ``fleet.TRANSPORTS``.
    transport: str = "tcp"
    #: ``cpu`` or ``cuda``.
    device: str = "cpu"
    #: Seconds between two looks at what is under way: of the prefill loop, and of decode's.
    prefill_pause_s: float = 0.0002
    decode_pause_s: float = 0.001
    #: Python work in each turn of the prefill loop, which then sends one room a turn; 0: none, and
    #: all rooms at once.
    prefill_work_s: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Setup(FleetConfig):
    """What one of them is."""

    #: ``prefill`` or ``decode``.
    role: str
    bootstrap_port: int
    dist_port: int


@dataclass(frozen=True)
class Peer:
    """How a decode process is reached and named."""

    name: str
    pid: int


@dataclass
class RoomTimes:
    """A room as prefill's loop saw it; times in seconds of the machine's monotonic clock."""

    room: int
    peer: int
    #: When the loop turned to the rooms that were sent together with this one: who comes later
    #: among them waits for the ``send`` calls of the others.
    began: float = 0.0
    ended: float = 0.0
    #: What each call of ``send`` took.
    sends: list[float] = field(default_factory=list)
    #: What of that was CPU time of the calling thread: the rest, it waited (for a lock, a core).
    send_cpus: list[float] = field(default_factory=list)
    #: ``done``, ``failed`` or ``stuck`` (no end before the limit).
    outcome: str = "stuck"
    error: str = ""
    #: When decode saw it complete; 0 where it did not.
    arrived: float = 0.0

    @property
    def total(self) -> float:
        """From ``began`` until prefill sees that it is done."""
        return self.ended - self.began


@dataclass
class Round:
    """Rooms that were sent together."""

    rooms: list[RoomTimes]
    wall_s: float
    #: CPU time of the prefill process, all its threads.
    cpu_s: float
    moved_bytes: int
    #: CPU time of the decode processes together.
    peer_cpu_s: float = 0.0
    #: Of the prefill loop, where it was asked to work.
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A reply: the process could not do what it was asked."""

    text: str

"""The runs with their loads, and the rooms that are sent, with their outcomes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmark.kv_transfer.shapes import Shape

#: Environment of each arm. ``radix``: decode with its radix cache, which reports its pages and
#: receives metadata in a notification. ``queues-N``: N transfer threads.
ARMS: dict[str, dict[str, str]] = {
    "stock": {"SGLANG_PATCHSET": "0"},
    "ours": {},
    "radix": {},
    **{f"queues-{n}": {"SGLANG_DISAGGREGATION_QUEUE_SIZE": str(n)} for n in (1, 2, 4)},
}
BACKENDS = ("nixl", "mooncake")
#: ``--transport`` -> variables for UCX.
TRANSPORTS = {
    "tcp": {"UCX_TLS": "tcp,self"},
    "shm": {"UCX_TLS": "sm,tcp,self"},
    "auto": {},
}

#: Page indices into a pool, in SGLang's type.
Pages = npt.NDArray[np.int32]
_numbers = itertools.count(1000)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: ``rooms`` rooms of each size in ``tokens``, ``in_flight`` of them at once."""

    question: str
    arms: tuple[str, ...] = ("stock", "ours")
    tokens: tuple[int, ...] = (1024,)
    rooms: int
    in_flight: int
    peers: int = 1
    page_size: int = 16
    #: Measured rounds of each size in each pass, after one that opens the connections.
    rounds: int = 5
    #: Number of times that every arm is started again.
    passes: int = 2
    transport: str = "shm"
    #: Pause between two polls of decode's loop.
    decode_pause_s: float = 1e-3
    #: Python work in each turn of prefill's loop. If set, the loop is timed and sends one room a
    #: turn.
    work_s: float = 0.0
    #: Deadline of a transfer. If set, one of the peers is stopped in further rounds.
    deadline_s: float = 0.0
    #: Time for which the idle prefill process is observed.
    idle_s: float = 0.0

    @property
    def rooms_a_peer(self) -> int:
        """Maximum number of a peer's rooms in a round."""
        return -(-self.rooms // self.peers)

    @property
    def pool_pages(self) -> int:
        """Pages of each pool. Rooms of one peer do not share pages. Prefill's pool has the size of
        a peer's, since rooms of different peers may send the same pages."""
        return self.rooms_a_peer * -(-max(self.tokens) // self.page_size) + 1


_BUSY: dict[str, Any] = {"rooms": 64, "in_flight": 64, "peers": 4, "rounds": 3}
_ALL = ("stock", "ours", "radix")
RUNS = {
    "send": Run(
        question="How long does a call of send take the scheduler's thread?",
        tokens=(2048,),
        page_size=1,
        rooms=20,
        in_flight=4,
    ),
    "fleet": Run(question="How fast are many rooms?", arms=_ALL, **_BUSY),
    "gap": Run(
        question="How long does prefill's loop stall under load?",
        arms=_ALL,
        work_s=5e-4,
        **_BUSY,
    ),
    "delay": Run(
        question="How late does decode see a small room, with this pause of NIXL's own thread?",
        arms=("ours",),
        tokens=(16,),
        rooms=50,
        in_flight=1,
        decode_pause_s=5e-5,
    ),
    "stall": Run(
        question="Do the rooms of other peers complete if one peer stops?",
        transport="tcp",  # shared memory arrives even if the peer is stopped
        deadline_s=5.0,
        passes=1,
        **_BUSY,
    ),
    "idle": Run(
        question="How much CPU does an idle prefill process use?",
        rooms=4,
        in_flight=4,
        rounds=1,
        passes=1,
        idle_s=10.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One arm of a run."""

    run: Run
    arm: str
    backend: str
    transport: str
    shape: Shape
    #: ``cpu`` or ``cuda``.
    device: str
    #: Ports of the bootstrap server, and of each process's group of ranks.
    ports: list[int]


@dataclass
class Room:
    """A room's pages, and the times that prefill's loop saw, on the monotonic clock."""

    number: int
    #: Index of the decode peer.
    peer: int
    source: Pages
    destination: Pages
    #: Metadata slot, on both sides.
    slot: int
    #: Time at which the loop began to send the rooms that were sent together with this one; later
    #: rooms of these wait for the ``send`` calls of earlier ones.
    began: float = 0.0
    ended: float = 0.0
    #: Duration of the ``send`` call, and the CPU time of its thread; the difference is waiting.
    send_s: float = 0.0
    send_cpu_s: float = 0.0
    #: ``done``, ``failed`` or ``stuck`` (no end before the limit).
    outcome: str = "stuck"
    error: str = ""
    #: Time at which decode saw it complete; 0 if it did not.
    arrived: float = 0.0


@dataclass
class Round:
    """Rooms that were sent together."""

    rooms: list[Room]
    wall_s: float
    #: CPU time of all threads of the prefill process.
    cpu_s: float
    moved_bytes: int
    #: One row for each turn of prefill's loop: seconds, CPU seconds of its thread, and seconds for
    #: which it was ready to run but had no core. None if the loop had no Python work.
    turns: npt.NDArray[np.float64] | None = None
    #: Total CPU time of the decode processes.
    peer_cpu_s: float = 0.0
    tokens: int = 0
    #: Name of the peer that was stopped.
    stopped: str = ""


def deal(run: Run, tokens: int) -> list[Room]:
    """Return a round of rooms with new numbers, dealt to the peers in turn.

    Rooms of one peer share no page on either side. Page 0 is not used, because SGLang's pools keep
    it for padding.
    """
    count = -(-tokens // run.page_size)
    all_pages = np.arange(1, run.rooms_a_peer * count + 1, dtype=np.int32)
    # Use another order on each side, because pages adjacent on both sides would be merged.
    sources, destinations = (
        np.random.default_rng(seed).permutation(all_pages).reshape(-1, count) for seed in (0, 1)
    )
    dealt = [divmod(i, run.peers) for i in range(run.rooms)]
    return [
        Room(next(_numbers), peer, sources[slot], destinations[slot], slot) for slot, peer in dealt
    ]

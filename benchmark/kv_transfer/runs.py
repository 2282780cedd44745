"""What is sent: the runs with their loads, and rooms with what became of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmark.kv_transfer.shapes import Shape

#: Environment of each arm. ``radix``: decode with its radix cache, which reports its pages and
#: takes metadata in a note. ``queues-N``: N transfer threads.
ARMS: dict[str, dict[str, str]] = {
    "stock": {"SGLANG_PATCHSET": "0"},
    "ours": {},
    "radix": {},
    **{f"queues-{n}": {"SGLANG_DISAGGREGATION_QUEUE_SIZE": str(n)} for n in (1, 2, 4)},
}
BACKENDS = ("nixl", "mooncake")
#: ``--transport`` -> UCX's choice.
TRANSPORTS = {
    "tcp": {"UCX_TLS": "tcp,self"},
    "shm": {"UCX_TLS": "sm,tcp,self"},
    "auto": {},
}

#: Page indices into a pool, as SGLang keeps them.
Pages = npt.NDArray[np.int32]
_numbers = itertools.count(1000)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: ``rooms`` rooms of each of these sizes, ``in_flight`` of them at once."""

    question: str
    arms: tuple[str, ...] = ("stock", "ours")
    tokens: tuple[int, ...] = (1024,)
    rooms: int
    in_flight: int
    peers: int = 1
    page_size: int = 16
    #: Measured rounds of each size in each pass, after one that opens the connections.
    rounds: int = 5
    #: Times that every arm is started afresh.
    passes: int = 2
    transport: str = "shm"
    #: Between two polls of decode's loop.
    decode_pause_s: float = 1e-3
    #: Python work in each turn of prefill's loop, which then sends one room a turn and is timed.
    work_s: float = 0.0
    #: Of a transfer; one of the peers is stopped in further rounds.
    deadline_s: float = 0.0
    #: For so long the prefill process has nothing to do.
    idle_s: float = 0.0

    @property
    def rooms_a_peer(self) -> int:
        """The most that one peer gets of a round."""
        return -(-self.rooms // self.peers)

    @property
    def pool_pages(self) -> int:
        """Of each pool. Every room of a peer has pages of its own; prefill's pool is as large as a
        peer's, since rooms of different peers may send the same pages."""
        return self.rooms_a_peer * -(-max(self.tokens) // self.page_size) + 1


_BUSY: dict[str, Any] = {"rooms": 64, "in_flight": 64, "peers": 4, "rounds": 3}
_ALL = ("stock", "ours", "radix")
RUNS = {
    "send": Run(
        question="What does a call of send cost the scheduler's thread?",
        tokens=(2048,),
        page_size=1,
        rooms=20,
        in_flight=4,
    ),
    "fleet": Run(question="How fast are many rooms?", arms=_ALL, **_BUSY),
    "gap": Run(
        question="How long does prefill's loop stand still under load?",
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
        question="What becomes of the other rooms if one peer stops?",
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
    #: Of the bootstrap server, and of each process's group of ranks.
    ports: list[int]


@dataclass
class Room:
    """Which pages go where, and what prefill's loop saw; times are of the monotonic clock."""

    number: int
    #: Index of the decode peer.
    peer: int
    source: Pages
    destination: Pages
    #: Metadata slot, on both sides.
    slot: int
    #: When the loop turned to the rooms that were sent together with this one: who comes later
    #: among them waits for the ``send`` calls of the others.
    began: float = 0.0
    ended: float = 0.0
    #: What the call of ``send`` took, and the CPU time of its thread in it: the rest, it waited.
    send_s: float = 0.0
    send_cpu_s: float = 0.0
    #: ``done``, ``failed`` or ``stuck`` (no end before the limit).
    outcome: str = "stuck"
    error: str = ""
    #: When decode saw it complete; 0 where it did not.
    arrived: float = 0.0


@dataclass
class Round:
    """Rooms that were sent together."""

    rooms: list[Room]
    wall_s: float
    #: CPU time of the prefill process, all its threads.
    cpu_s: float
    moved_bytes: int
    #: A row for each turn of prefill's loop: seconds, CPU seconds of its thread, and seconds for
    #: which it was ready to run and had no core. None where the loop was not asked to work.
    turns: npt.NDArray[np.float64] | None = None
    #: CPU time of the decode processes together.
    peer_cpu_s: float = 0.0
    tokens: int = 0
    #: The name of a peer that did not run meanwhile.
    stopped: str = ""


def deal(run: Run, tokens: int) -> list[Room]:
    """A round of rooms with numbers that no room of this process had, dealt to the peers in turn;
    those of one peer share no page on either side, and none has page 0 (SGLang's pools keep it for
    padding)."""
    count = -(-tokens // run.page_size)
    every = np.arange(1, run.rooms_a_peer * count + 1, dtype=np.int32)
    # Another order on each side: neighbours by chance on both sides would be merged.
    sources, destinations = (
        np.random.default_rng(seed).permutation(every).reshape(-1, count) for seed in (0, 1)
    )
    dealt = [divmod(i, run.peers) for i in range(run.rooms)]
    return [
        Room(next(_numbers), peer, sources[slot], destinations[slot], slot) for slot, peer in dealt
    ]

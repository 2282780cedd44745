"""Loads, and how they are run: every arm in turn, in fresh processes, with the same rooms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from benchmark.kv_transfer.fleet import ArmFailed, Fleet
from benchmark.kv_transfer.patterns import RoomPlan, pages_for
from benchmark.kv_transfer.records import FleetConfig, Round
from benchmark.kv_transfer.shapes import Shape

_rooms = itertools.count(1000)


@dataclass(frozen=True)
class Case:
    """One load: ``rooms`` rooms of ``tokens`` tokens, ``in_flight`` of them at once."""

    tokens: int
    page_size: int = 16
    pattern: str = "scattered"
    rooms: int = 1
    in_flight: int = 1
    peers: int = 1
    chunks: int = 1

    @property
    def pages(self) -> int:
        """Pages of a room."""
        return -(-self.tokens // self.page_size)

    @property
    def rooms_a_peer(self) -> int:
        """The most that one peer gets of a round."""
        return -(-self.rooms // self.peers)

    @property
    def pool_tokens(self) -> int:
        """Of all pools: every room under way at a peer has destination pages of its own; prefill's
        pool is as large as a peer's, since rooms of different peers may send the same pages."""
        return (self.peers + 1) * self.rooms_a_peer * self.tokens

    def plans(self, seed: int) -> list[RoomPlan]:
        """A round of it, with numbers that no room had: rooms are dealt to the peers in turn; those
        of one peer share no page on either side."""
        if self.chunks > self.pages:
            raise ValueError(f"--chunks {self.chunks}: a room has only {self.pages} pages")
        first, *_ = itertools.islice(_rooms, self.rooms)
        # Another order on each side: neighbours by chance on both sides would be merged.
        sources, destinations = (
            pages_for(self.pattern, self.pages, self.rooms_a_peer, seed + side) for side in (0, 1)
        )
        dealt = [divmod(i, self.peers) for i in range(self.rooms)]
        return [
            RoomPlan(first + i, peer, sources[slot], destinations[slot], slot, self.chunks)
            for i, (slot, peer) in enumerate(dealt)
        ]


@dataclass(frozen=True)
class Options:
    """What all runs have in common."""

    backend: str
    shape: Shape
    arms: Sequence[str]
    transport: str
    device: str
    #: Times that every arm is started afresh.
    passes: int
    #: Measured rounds of each case in each pass, after one that is only checked.
    rounds: int
    limit_s: float
    pause_s: float
    #: Python work of prefill's loop in each turn (run ``gap``).
    work_s: float
    max_bytes: int
    #: Of decode's loop between two looks.
    decode_pause_s: float
    seed: int
    console: Console = field(repr=False)
    #: What the run writes to its file: a JSON object a line.
    lines: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def write(self, kind: str, arm: str, case: Case, **more: Any) -> None:
        """One line."""
        self.lines.append({"kind": kind, "arm": arm, **asdict(case), **more})

    def bytes_of(self, case: Case) -> int:
        """Of all pools that a case needs."""
        return case.pool_tokens * self.shape.token_bytes

    def check_memory(self, cases: Sequence[Case]) -> None:
        """Raises ValueError where a case needs more than ``max_bytes``."""
        for case in cases:
            if (wanted := self.bytes_of(case)) > self.max_bytes:
                raise ValueError(
                    f"{case.rooms} rooms of {case.tokens:,} tokens on {case.peers} peers take "
                    f"{wanted / 1e9:.1f} GB of pools, and --max-bytes is "
                    f"{self.max_bytes / 1e9:.1f} GB: fewer --layers, --tokens or --rooms"
                )


@contextmanager
def arm_of(
    options: Options, arm: str, cases: Sequence[Case], env: dict[str, str] | None = None
) -> Iterator[Fleet]:
    """The processes of one arm, with pools for the largest of these cases, which have one page size
    and one number of peers."""
    (page_size,) = {case.page_size for case in cases}
    (peers,) = {case.peers for case in cases}
    config = FleetConfig(
        arm=arm,
        backend=options.backend,
        shape=options.shape,
        page_size=page_size,
        pool_pages=max(case.rooms_a_peer * case.pages for case in cases) + 1,
        slots=max(case.rooms_a_peer for case in cases),
        peers=peers,
        transport=options.transport,
        device=options.device,
        prefill_pause_s=options.pause_s,
        prefill_work_s=options.work_s,
        decode_pause_s=options.decode_pause_s,
        env=env or {},
    )
    with Fleet(config) as fleet:
        yield fleet


def run_case(fleet: Fleet, options: Options, case: Case, rounds: int | None = None) -> list[Round]:
    """One round that makes the connections and is checked for its contents, then the measured ones.

    Raises:
        ArmFailed: pages arrived wrong, or a room failed in the first round.
    """
    first = _round(fleet, options, case, check=True)
    for times in first.rooms:
        if times.outcome != "done":
            raise ArmFailed(
                f"{fleet.config.arm}, {case}: room {times.room} {times.outcome}: {times.error}"
            )
    measured = options.rounds if rounds is None else rounds
    return [_round(fleet, options, case) for _ in range(measured)]


def _round(fleet: Fleet, options: Options, case: Case, check: bool = False) -> Round:
    plans = case.plans(options.seed)
    return fleet.round(plans, in_flight=case.in_flight, limit_s=options.limit_s, check=check)


Measured = dict[tuple[str, Case], list[Round]]


def run_cases(options: Options, cases: Sequence[Case]) -> Measured:
    """Every case on every arm, ``passes`` times, each time in fresh processes; arms take turns."""
    options.check_memory(cases)
    measured: Measured = {(arm, case): [] for case in cases for arm in options.arms}
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.page_size, case.peers), []).append(case)
    for number in range(options.passes):
        for group in groups.values():
            # Who is first changes, since the machine may warm up or tire.
            turn = number % len(options.arms)
            for arm in [*options.arms[turn:], *options.arms[:turn]]:
                options.console.print(f"pass {number + 1}, [bold]{arm}[/]: {len(group)} loads")
                with arm_of(options, arm, group) as fleet:
                    for case in group:
                        try:
                            rounds = run_case(fleet, options, case)
                        except ArmFailed as failure:
                            error = str(failure).splitlines()[0]
                            options.console.print(f"[red]{arm}: {error}[/]")
                            options.write("failure", arm, case, error=error)
                            if not fleet.alive:
                                break
                            continue
                        measured[arm, case] += rounds
    return measured

"""A study as a file: arms, trace, loads, rounds, and what a request should take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from benchmark.agentic.fleet.spec import Above, Arm, Positive, Setup, Slo
from benchmark.agentic.load.run import Window
from benchmark.agentic.load.sessions import Made

FOLDER = Path(__file__).parent
START_S, TAIL_S = 25.0, 2.0
"""Of an arm's servers on two cores, and of a load from the end of its window to the last answer."""


class TraceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent."""

    file: str | None = None
    """In Mooncake's format; None: generated, with the shape of agentic traffic."""
    skip_invalid: bool = False
    """Leave out lines of the file that cannot be read, and say how many."""
    requests: Positive | None = 90
    """About: sampling keeps whole sessions of its densest ten minutes. None: the whole trace."""
    max_single_turn: float = 0.3
    """Most of the sessions that may have a single turn."""
    generated: Positive = 20_000
    """Requests of a generated trace, before it is sampled."""
    generated_per_s: Above | None = None
    """Its rate; None: of the traffic that it resembles, about 29. More or fewer people, who are
    as fast."""


class LoadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How it is sent; each entry is a load of its own."""

    sessions: tuple[Positive, ...] = ()
    """So many sessions at once; each sends its next turn ``think_s`` after its answer."""
    speed: tuple[Above, ...] = ()
    """Or: the trace's own times, so many seconds of it in a second."""
    think_s: float | None = 0.2
    """None: the recorded gap, at the speed of the load."""
    timeout_s: float = 60.0
    """Of a request; one that fails counts as taking so long."""
    window: Window | None = None
    """Of a steady load: what begins in it counts. None: the whole trace, from its first request to
    its last answer."""

    def __post_init__(self) -> None:
        if bool(self.sessions) == bool(self.speed):
            raise ValueError("give one of `sessions` and `speed`")

    @property
    def unit(self) -> str:
        """What a level counts."""
        return "sessions at once" if self.sessions else "times the trace's speed"


Quantity = Literal["ttft", "tpot", "e2e"]
QUANTITIES: tuple[str, ...] = get_args(Quantity)


class Point(msgspec.Struct, frozen=True):
    """A load of a study: how much is sent, and which fields of ``made`` are otherwise."""

    load: float
    over: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        return ", ".join((f"{self.load:g}", *(f"{name} {value:g}" for name, value in self.over)))

    def made(self, made: Made) -> Made:
        kinds = {field.name: field.type for field in msgspec.structs.fields(made)}
        there = {name: kinds[name](value) for name, value in self.over}
        return msgspec.structs.replace(made, **there)


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bound on a ratio of two arms, or on a number of one arm."""

    text: str
    arm: str
    of: Literal["ttft", "tpot", "e2e", "itl", "goodput", "requests", "computed"]
    """``requests``: requests/s, in time or not. ``computed``: prompt tokens that servers computed
    over new ones."""
    over: str | None = None
    """The arm that it is divided by; None: the bound is on the number itself."""
    at: float | None = None
    """The load; None: each one."""
    at_most: float | None = None
    at_least: float | None = None
    request_class: str | None = msgspec.field(name="class", default=None)
    theirs: str = ""
    """The number as published, and where."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    title: str
    question: str
    arms: dict[str, Arm]
    """By name, in the page's order; the first is what the others are held against."""
    load: LoadSpec
    trace: TraceSpec = TraceSpec()
    made: Made | None = None
    """Sessions made of numbers, instead of the trace."""
    grid: dict[str, tuple[float, ...]] = {}
    """Fields of ``made``: each combination of these values, at each load."""
    claims: tuple[Claim, ...] = ()
    rounds: Positive = 3
    """Of all arms, in turn. Fewer than three give no verdict."""
    by: Quantity = "e2e"
    """The quantity by whose mean arms are ranked."""
    slo: Slo = Slo()
    rig: dict[str, Any] = {}
    """Of the rig, instead of the fleet file's; see ``fleet.spec.Rig``."""
    every_setup: bool = False
    """By address: also those setups of the fleet that no arm names."""

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("`arms` is empty")
        if self.made is not None and self.load.window is None:
            raise ValueError("`made` needs `load: {window: ...}`, as its sessions have no end")
        if unknown := set(self.grid) - set(Made.__struct_fields__):
            raise ValueError(f"`grid`: `made` has no {', '.join(sorted(unknown))}")
        if self.grid and self.made is None:
            raise ValueError("`grid` needs `made`")
        for claim in self.claims:
            if claim.arm not in self.arms or claim.over not in (None, *self.arms):
                raise ValueError(f"`claims`: no arm {claim.arm!r} or {claim.over!r}")
            if claim.request_class and claim.of not in QUANTITIES:
                raise ValueError(f"`claims`: {claim.of} is of all requests, not of a class")
            if claim.request_class and claim.over is None:
                raise ValueError("`claims`: `class` needs `over`")

    @property
    def load_s(self) -> float:
        """That each load takes at most, with its part of the start of servers; NaN without a
        window, where it takes as long as the trace."""
        limit_s = self.load.window.limit_s if self.load.window else math.nan
        return START_S / len(self.points) + limit_s + TAIL_S

    @property
    def points(self) -> list[Point]:
        """All loads, in the order in which they are sent."""
        named = [[(name, float(value)) for value in of] for name, of in self.grid.items()]
        levels = self.load.sessions or self.load.speed
        return [Point(float(at), over) for over in product(*named) for at in levels]

    def at(self, setups: dict[str, Setup]) -> tuple[dict[str, Arm], list[str]]:
        """Its arms with the servers of a fleet by address, and the names of those that it lacks.

        Raises:
            ValueError: it has none.
        """
        arms = {name: arm for name, arm in self.arms.items() if (arm.setup or name) in setups}
        missing = [name for name in self.arms if name not in arms]
        if self.every_setup:
            used = {arm.setup or name for name, arm in arms.items()}
            arms |= {name: Arm(title=name) for name in setups if name not in used}
        for name, arm in arms.items():
            there = setups[arm.setup or name]
            counts = {role: len(getattr(there, role)) for role in arm.servers}
            arms[name] = msgspec.structs.replace(arm, **counts)
        if not arms:
            raise ValueError(
                f"the fleet has setups {', '.join(setups)}, and the study asks for "
                f"{', '.join(dict.fromkeys(arm.setup or n for n, arm in self.arms.items()))}"
            )
        return arms, missing


def titles(arms: Mapping[str, Arm]) -> dict[str, str]:
    """What each is called on the page; by name too where the servers of two read the same."""
    shown = {name: arm.shown for name, arm in arms.items()}
    said = list(shown.values())
    return {n: f"{text} ({n})" if said.count(text) > 1 else text for n, text in shown.items()}


def find(name: str) -> Path:
    """A study by path, or by the name of one that comes with the suite."""
    path = Path(name)
    if path.exists():
        return path
    shipped = FOLDER / f"{path.stem}.yaml"
    if shipped.exists():
        return shipped
    names = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
    raise ValueError(f"no study {name!r}; there are: {names}")

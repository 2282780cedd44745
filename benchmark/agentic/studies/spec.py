"""A study as a file: arms, trace, loads, rounds, and the SLO."""

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
TAIL_S = 2.0
"""Assumed time from the end of a window to the last answer."""


class TraceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trace to send."""

    file: str | None = None
    """Path, in Mooncake's format; None: generated, with the shape of agentic traffic."""
    skip_invalid: bool = False
    """Skip lines of the file that cannot be read, and report their number."""
    requests: Positive | None = 90
    """Approximate number: sampling keeps whole sessions of the densest ten minutes. None: all."""
    max_single_turn: float = 0.3
    """Maximum share of sessions with a single turn."""
    generated: Positive = 20_000
    """Requests of a generated trace, before it is sampled."""
    generated_per_s: Above | None = None
    """Its requests/s; None: about 29, as in the recorded traffic. Another rate changes the number
    of users, not their speed."""


class LoadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loads; each entry of ``sessions``, ``speed`` or ``requests_per_s`` is one."""

    sessions: tuple[Positive, ...] = ()
    """Concurrent sessions; each sends its next turn ``think_s`` after its answer."""
    speed: tuple[Above, ...] = ()
    """Or: the trace's own times, accelerated by this factor."""
    requests_per_s: tuple[Above, ...] = ()
    """Or, for ``made``: sessions that begin at random times (Poisson), as many as send this number
    of requests a second. They begin with their first turn, so ``warm_up`` has to cover a session's
    length."""
    think_s: float | None = 0.2
    """None: the recorded gap, at the speed of the load."""
    timeout_s: float = 60.0
    """Time limit of a request, and the time that a failed one counts as."""
    window: Window | None = None
    """Measured part of a steady load. None: the whole trace, from the first request to the last
    answer."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.sessions, self.speed, self.requests_per_s))) != 1:
            raise ValueError("give one of `sessions`, `speed` and `requests_per_s`")

    @property
    def unit(self) -> str:
        """Unit of a level."""
        if self.requests_per_s:
            return "requests/s sent"
        return "sessions at once" if self.sessions else "times the trace's speed"


Quantity = Literal["ttft", "tpot", "e2e"]
QUANTITIES: tuple[str, ...] = get_args(Quantity)


class Point(msgspec.Struct, frozen=True):
    """A load of a study: its level, and the fields of ``made`` that the grid sets."""

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
    """``requests``: requests/s, within the SLO or not. ``computed``: prompt tokens that servers
    computed, over new tokens."""
    over: str | None = None
    """The arm to divide by; None: the bound is on the number itself."""
    at: float | None = None
    """The load; None: all loads."""
    at_most: float | None = None
    at_least: float | None = None
    request_class: str | None = msgspec.field(name="class", default=None)
    theirs: str = ""
    """The published number, and its source."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    title: str
    question: str
    arms: dict[str, Arm]
    """By name, in the page's order; the others are compared with the first."""
    load: LoadSpec
    trace: TraceSpec = TraceSpec()
    made: Made | None = None
    """Sessions made from sizes, instead of the trace."""
    grid: dict[str, tuple[float, ...]] = {}
    """Fields of ``made``: all combinations of these values are measured, at each load."""
    claims: tuple[Claim, ...] = ()
    rounds: Positive = 3
    """Rounds of all arms. Fewer than three give no verdict."""
    by: Quantity = "e2e"
    """Quantity whose mean ranks the arms."""
    slo: Slo = Slo()
    fleet: str | None = None
    """Fleet file that it is made for, beside the study; None: the CPU rig. ``--fleet`` replaces
    it."""
    rig: dict[str, Any] = {}
    """Fields of the rig that replace those of the fleet file; see ``fleet.spec.Rig``."""
    every_setup: bool = False
    """In a fleet by address: measure also setups that no arm names."""

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("`arms` is empty")
        if self.made is not None and self.load.window is None:
            raise ValueError("`made` needs `load: {window: ...}`, as its sessions have no end")
        if unknown := set(self.grid) - set(Made.__struct_fields__):
            raise ValueError(f"`grid`: `made` has no {', '.join(sorted(unknown))}")
        if self.grid and self.made is None:
            raise ValueError("`grid` needs `made`")
        if self.load.requests_per_s and self.made is None:
            raise ValueError("`requests_per_s` needs `made`; a trace has `speed`")
        for claim in self.claims:
            if claim.arm not in self.arms or claim.over not in (None, *self.arms):
                raise ValueError(f"`claims`: no arm {claim.arm!r} or {claim.over!r}")
            if claim.request_class and claim.of not in QUANTITIES:
                raise ValueError(f"`claims`: {claim.of} has no classes: it covers all requests")
            if claim.request_class and claim.over is None:
                raise ValueError("`claims`: `class` needs `over`")

    def load_s(self, start_s: float) -> float:
        """Return the maximum seconds of a load, with its part of ``start_s``, the start of the
        servers; NaN without a window, because the load then takes as long as the trace."""
        limit_s = self.load.window.limit_s if self.load.window else math.nan
        return start_s / len(self.points) + limit_s + TAIL_S

    @property
    def points(self) -> list[Point]:
        """All loads, in the order of sending."""
        named = [[(name, float(x)) for x in values] for name, values in self.grid.items()]
        levels = self.load.sessions or self.load.speed or self.load.requests_per_s
        return [Point(float(level), over) for over in product(*named) for level in levels]

    def at(self, setups: dict[str, Setup]) -> tuple[dict[str, Arm], list[str]]:
        """Return its arms with the servers of a fleet by address, and the names of missing arms.

        Raises:
            ValueError: the fleet has none of its arms.
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
    """Return the arms' titles on the page, with the name appended to equal titles."""
    shown = {name: arm.shown for name, arm in arms.items()}
    texts = list(shown.values())
    return {n: f"{text} ({n})" if texts.count(text) > 1 else text for n, text in shown.items()}


def find(name: str) -> Path:
    """Return the path of a study, given by path or by the name of a study of the suite."""
    path = Path(name)
    if path.exists():
        return path
    shipped = FOLDER / f"{path.stem}.yaml"
    if shipped.exists():
        return shipped
    names = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
    raise ValueError(f"no study {name!r}; there are: {names}")

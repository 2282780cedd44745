"""The requests and faults of a chaos run, with their times: a pure function of the seed.

Times are planned, not outcomes: an abort ``after_s`` may find its request queued, in transfer,
generating or answered. Server faults follow one another, so that each starts with a working pair;
a fault that takes longer than planned (a restart) delays the next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec


class How(str, Enum):
    """How a client takes its request back."""

    DISCONNECT = "disconnect"
    ABORT_DECODE = "abort on decode"
    ABORT_PREFILL = "abort on prefill"
    ABORT_BOTH = "abort on both"


class FaultKind(str, Enum):
    """A kind of fault of a server."""

    KILL_PREFILL = "kill prefill"
    KILL_DECODE = "kill decode"
    STOP_PREFILL = "stop prefill"
    STOP_PREFILL_SCHEDULER = "stop prefill scheduler"
    STOP_STORE = "stop store"
    KILL_STORE = "kill store"
    ABORT_ALL_DECODE = "abort all on decode"
    ABORT_ALL_PREFILL = "abort all on prefill"
    FLUSH_DECODE = "flush decode"
    PAUSE_DECODE = "pause decode"
    RETRACT_DECODE = "pause decode, retract all"
    NEW_WEIGHTS = "new weights on both"

    @property
    def role(self) -> str:
        """The server that the fault affects, or "both"."""
        roles = (role for role in ("decode", "prefill", "store") if role in self.value)
        return next(roles, "both")


HEAVY = (
    FaultKind.KILL_PREFILL,
    FaultKind.STOP_PREFILL,
    FaultKind.STOP_PREFILL_SCHEDULER,
    FaultKind.KILL_DECODE,
)
STORE = (FaultKind.STOP_STORE, FaultKind.KILL_STORE)
"""Faults of the store behind prefill's HiCache, in arms that have one. None may fail a request."""
WEIGHTS = (FaultKind.NEW_WEIGHTS,)
"""An update to the weights of the next bank, between requests. None may fail a request."""
LIGHT = (FaultKind.ABORT_ALL_DECODE, FaultKind.ABORT_ALL_PREFILL)
PAUSES = {FaultKind.PAUSE_DECODE: "in_place", FaultKind.RETRACT_DECODE: "retract"}
"""The mode of the pause."""
LOCAL = (FaultKind.FLUSH_DECODE, *PAUSES)
"""Operations on a decode server that computes turns itself. None may fail a request."""

FIRST_HEAVY_S = 8.0
HEAVY_EVERY_S = 25.0
"""A restart takes about half of this on a busy machine of two cores; the rest is time to
recover."""
CURRENT_EVERY_S = 60.0
"""The same for servers that start more slowly: SGLang 0.5.23, and families of models."""
STOP_S = {
    FaultKind.STOP_PREFILL: (13.0, 18.0),
    FaultKind.STOP_PREFILL_SCHEDULER: (5.0, 14.0),
    FaultKind.STOP_STORE: (4.0, 12.0),
    FaultKind.KILL_STORE: (0.5, 6.0),
    FaultKind.PAUSE_DECODE: (0.5, 3.0),
    FaultKind.RETRACT_DECODE: (0.5, 3.0),
}
"""Shortest and longest stop or pause, or downtime of a killed store. Decode declares a stopped
prefill server dead after two heartbeats of 2 s with 3 s to answer each; a stopped scheduler does
not affect heartbeats. A stopped store misses its deadline of 2 s."""
SEND_EVERY_S = 0.4
BURST = 5
BURST_SHARE = 0.06
LEAVE_SHARE = 0.25
LEAVE_AFTER_S = (0.02, 8.0)


class Leave(msgspec.Struct, frozen=True):
    """The client's abort or disconnect ``after_s`` seconds after it sent the request."""

    how: How
    after_s: float


class Send(msgspec.Struct, frozen=True, tag="send"):
    """One request, ``at`` seconds after the start. ``question``: an index into the bank."""

    at: float
    number: int
    question: int
    leave: Leave | None = None


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """A fault of a server; a stopped server stays stopped for ``for_s`` seconds."""

    at: float
    kind: FaultKind
    for_s: float = 0.0


class Faults(NamedTuple):
    """Kinds of faults of an arm; each interval has one heavy and one light fault."""

    heavy: tuple[FaultKind, ...] = HEAVY
    light: tuple[FaultKind, ...] = LIGHT


class Plan(msgspec.Struct, frozen=True):
    """One arm: a pair of fresh servers, for ``seconds``."""

    seed: int
    arm: int
    seconds: float
    sends: tuple[Send, ...]
    faults: tuple[Fault, ...]

    def actions(self) -> list[Send | Fault]:
        """Return all requests and faults in the order of their times."""
        return sorted([*self.sends, *self.faults], key=lambda action: action.at)


def make_plans(
    seed: int,
    arms: Sequence[Faults],
    seconds: float,
    threads: Sequence[int],
    every_s: float = HEAVY_EVERY_S,
) -> list[Plan]:
    """Return a plan of ``seconds`` for each arm, with one heavy and one light fault in ``every_s``.

    Arms with equal faults share out their kinds. ``threads`` is the number of questions of each
    conversation of the bank, whose questions are numbered through. Most turns of a conversation are
    sent in order, because otherwise the decode tree is of no use.
    """
    kinds = {
        faults: (
            _blocks(random.Random(f"{seed} kinds"), faults.heavy),
            _blocks(random.Random(f"{seed} lights"), faults.light),
        )
        for faults in arms
    }
    ways = _blocks(random.Random(f"{seed} ways"), tuple(How))
    plans = []
    for arm, of_arm in enumerate(arms):
        rng = random.Random(f"{seed} {arm}")
        sends = tuple(_sends(rng, seconds, threads, ways))
        faults = tuple(_faults(rng, seconds, *kinds[of_arm], every_s))
        plans.append(Plan(seed, arm, seconds, sends, faults))
    return plans


def _blocks(rng: random.Random, kinds: Sequence[FaultKind | How]) -> Iterator[FaultKind | How]:
    """Yield random permutations of the kinds, so that each kind comes up regularly."""
    while True:
        yield from rng.sample(kinds, len(kinds))


def _faults(
    rng: random.Random,
    seconds: float,
    kinds: Iterator[FaultKind | How],
    lights: Iterator[FaultKind | How],
    every_s: float,
) -> Iterator[Fault]:
    at_s = FIRST_HEAVY_S
    while at_s < seconds - 5.0:
        light, kind = FaultKind(next(lights)), FaultKind(next(kinds))
        yield Fault(round(at_s - rng.uniform(0.5, 4.0), 3), light, _length(rng, light))
        for_s = _length(rng, kind)
        yield Fault(round(at_s + rng.uniform(0.0, 2.0), 3), kind, for_s)
        at_s += every_s


def _length(rng: random.Random, kind: FaultKind) -> float:
    """Return the seconds that a fault lasts, or 0.0 for an instantaneous one."""
    return round(rng.uniform(*STOP_S[kind]), 3) if kind in STOP_S else 0.0


def _sends(
    rng: random.Random, seconds: float, threads: Sequence[int], ways: Iterator[FaultKind | How]
) -> Iterator[Send]:
    firsts = [sum(threads[:i]) for i in range(len(threads))]
    turns = [0] * len(threads)
    at_s, number = 0.0, 0
    while (at_s := at_s + rng.expovariate(1 / SEND_EVERY_S)) < seconds:
        thread = rng.randrange(len(threads))
        for _ in range(BURST if rng.random() < BURST_SHARE else 1):
            leave = None
            if rng.random() < LEAVE_SHARE:
                after = math.exp(rng.uniform(*map(math.log, LEAVE_AFTER_S)))
                leave = Leave(How(next(ways)), round(after, 3))
            question = firsts[thread] + turns[thread]
            yield Send(round(at_s, 3), number, question, leave)
            number += 1
        # Every request of a burst sends the same question; the next send continues the
        # conversation.
        turns[thread] = (turns[thread] + 1) % threads[thread]

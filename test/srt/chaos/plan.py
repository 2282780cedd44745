"""What a chaos run does and when: a pure function of the seed.

Moments are planned, not outcomes: an abort ``after_s`` may find its request queued, in transfer,
generating, or answered. Faults of servers follow one another, so that each meets a pair that works;
one that takes longer than planned (a restart) delays the next.
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
    """What happens to a server."""

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
        """The server that it happens to, or "both"."""
        roles = (role for role in ("decode", "prefill", "store") if role in self.value)
        return next(roles, "both")


HEAVY = (
    FaultKind.KILL_PREFILL,
    FaultKind.STOP_PREFILL,
    FaultKind.STOP_PREFILL_SCHEDULER,
    FaultKind.KILL_DECODE,
)
STORE = (FaultKind.STOP_STORE, FaultKind.KILL_STORE)
"""What happens to the store behind prefill's HiCache, where there is one. No request may fail of
it."""
WEIGHTS = (FaultKind.NEW_WEIGHTS,)
"""An update between requests, to the weights of the next bank. No request may fail of it."""
LIGHT = (FaultKind.ABORT_ALL_DECODE, FaultKind.ABORT_ALL_PREFILL)
PAUSES = {FaultKind.PAUSE_DECODE: "in_place", FaultKind.RETRACT_DECODE: "retract"}
"""How the generation is paused."""
LOCAL = (FaultKind.FLUSH_DECODE, *PAUSES)
"""What an operator asks of a decode server that computes turns itself. No request may fail of
it."""

FIRST_HEAVY_S = 8.0
HEAVY_EVERY_S = 25.0
"""A restart takes about half of it on a busy machine of two cores; the rest is time to recover."""
CURRENT_EVERY_S = 60.0
"""The same where servers start more slowly: on SGLang 0.5.23, and with families of models."""
STOP_S = {
    FaultKind.STOP_PREFILL: (13.0, 18.0),
    FaultKind.STOP_PREFILL_SCHEDULER: (5.0, 14.0),
    FaultKind.STOP_STORE: (4.0, 12.0),
    FaultKind.KILL_STORE: (0.5, 6.0),
    FaultKind.PAUSE_DECODE: (0.5, 3.0),
    FaultKind.RETRACT_DECODE: (0.5, 3.0),
}
"""Shortest and longest stop or pause; a killed store is down for so long. Decode gives a stopped
prefill server up after two heartbeats of 2 s with 3 s to answer each; a stopped scheduler leaves
heartbeats alone. A store that is stopped misses its deadline, which is 2 s."""
SEND_EVERY_S = 0.4
BURST = 5
BURST_SHARE = 0.06
LEAVE_SHARE = 0.25
LEAVE_AFTER_S = (0.02, 8.0)


class Leave(msgspec.Struct, frozen=True):
    """A request that is taken back ``after_s`` seconds after it was sent."""

    how: How
    after_s: float


class Send(msgspec.Struct, frozen=True, tag="send"):
    """One request, ``at`` seconds after the start. ``question``: an index into the bank."""

    at: float
    number: int
    question: int
    leave: Leave | None = None


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """Something that happens to a server; ``for_s`` is how long a stopped one stays stopped."""

    at: float
    kind: FaultKind
    for_s: float = 0.0


class Faults(NamedTuple):
    """Kinds of faults of an arm, which follow in random orders: in each interval one of each."""

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
        """Everything, in the order of time."""
        return sorted([*self.sends, *self.faults], key=lambda action: action.at)


def make_plans(
    seed: int,
    arms: Sequence[Faults],
    seconds: float,
    threads: Sequence[int],
    every_s: float = HEAVY_EVERY_S,
) -> list[Plan]:
    """Return a plan of ``seconds`` for each arm. Arms with equal faults share out their kinds; one
    heavy and one light fault in ``every_s``.

    ``threads``: the number of questions of each conversation of the bank, whose questions are
    numbered through. Turns of a conversation are mostly asked in order, as only then the decode
    tree is of use.
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
    """All kinds in a random order, then again in another: none is left out for long."""
    while True:
        yield from rng.sample(kinds, len(kinds))


def _faults(
    rng: random.Random,
    seconds: float,
    kinds: Iterator[FaultKind | How],
    lights: Iterator[FaultKind | How],
    every_s: float,
) -> Iterator[Fault]:
    at = FIRST_HEAVY_S
    while at < seconds - 5.0:
        light, kind = FaultKind(next(lights)), FaultKind(next(kinds))
        yield Fault(round(at - rng.uniform(0.5, 4.0), 3), light, _length(rng, light))
        for_s = _length(rng, kind)
        yield Fault(round(at + rng.uniform(0.0, 2.0), 3), kind, for_s)
        at += every_s


def _length(rng: random.Random, kind: FaultKind) -> float:
    """Seconds for which a fault lasts; 0.0 of one that is over at once."""
    return round(rng.uniform(*STOP_S[kind]), 3) if kind in STOP_S else 0.0


def _sends(
    rng: random.Random, seconds: float, threads: Sequence[int], ways: Iterator[FaultKind | How]
) -> Iterator[Send]:
    firsts = [sum(threads[:i]) for i in range(len(threads))]
    turns = [0] * len(threads)
    at, number = 0.0, 0
    while (at := at + rng.expovariate(1 / SEND_EVERY_S)) < seconds:
        thread = rng.randrange(len(threads))
        for _ in range(BURST if rng.random() < BURST_SHARE else 1):
            leave = None
            if rng.random() < LEAVE_SHARE:
                after = math.exp(rng.uniform(*map(math.log, LEAVE_AFTER_S)))
                leave = Leave(How(next(ways)), round(after, 3))
            question = firsts[thread] + turns[thread]
            yield Send(round(at, 3), number, question, leave)
            number += 1
        # A burst asks one question; else the conversation goes on, or starts again.
        turns[thread] = (turns[thread] + 1) % threads[thread]

"""Seeded traffic as a trace, for machines with no trace at hand.

A prompt is an instruction of the product (few, popular, all day), then a context that a family of
sessions shares, then what is the session's own. A family is one task or project: a few sessions,
begun within minutes of each other, over the same files. Each turn's prompt is all that was said
before, the answer, and what a tool or a person adds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from benchmark.traces.record import BLOCK_TOKENS, Record, blocks


class LogNormal(NamedTuple):
    """A length in tokens, or a time in seconds."""

    median: float
    spread: float
    """Standard deviation of the logarithm."""


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, times in seconds. The defaults are a published two hours of a production
    cluster that serves coding agents (GLM-5.1; 2.1 million requests)."""

    families_per_s: float = 9.8
    """Poisson."""
    instruction_blocks: tuple[int, ...] = (8, 5, 12, 3, 24, 8, 2, 16)
    """Blocks of each popular instruction, the i-th used in proportion to 1 / i."""
    lonely: float = 0.42
    """Share of families of one session."""
    mean_members: float = 2.6
    """Sessions of the other families: at least two, geometrically distributed."""
    gap_s: float = 40.0
    """Mean time from one session's beginning to the next one's in its family, exponential."""
    context: LogNormal = LogNormal(5_200, 1.82)
    """Shared by a family."""
    own: LogNormal = LogNormal(1_950, 1.5)
    """A session's first turn, without what it shares."""
    one_turn: float = 0.928
    """Share of sessions of one turn."""
    turns: LogNormal = LogNormal(4.0, 1.1)
    """Turns of the others beyond the second."""
    addition: LogNormal = LogNormal(800, 1.2)
    """What a turn adds to the prompt beside the last answer."""
    answer: LogNormal = LogNormal(80, 1.88)
    pause_s: LogNormal = LogNormal(8, 1.2)
    """From one request of a session to its next."""
    longest: int = 200_000
    """A prompt's most tokens: first turns are cut to it, sessions end before it."""
    longest_answer: int = 32_000
    block_tokens: int = BLOCK_TOKENS


AGENTIC = Shape()


def generate(requests: int, seed: int = 0, shape: Shape = AGENTIC) -> Iterator[Record]:
    """The first ``requests`` requests, by time, with session and turn.

    The same arguments give the same trace, and a shorter trace is the start of a longer one. Only
    families that have begun and not ended are in memory.
    """
    waiting: list[tuple[float, int, Record, Iterator[Record]]] = []  # next request of each session
    serial = count()
    families = _Traffic(random.Random(seed), shape).families()
    began, family = next(families)
    for _ in range(requests):
        # Whatever is due before the next family begins is known by then.
        while not waiting or waiting[0][0] > began * 1000:
            for session in family:
                first = next(session)
                heapq.heappush(waiting, (first.timestamp, next(serial), first, session))
            began, family = next(families)
        _, order, record, session = waiting[0]
        if (later := next(session, None)) is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (later.timestamp, order, later, session))
        yield record


def at_rate(shape: Shape, requests_per_s: float, seed: int = 0) -> Shape:
    """More or fewer people, who are as fast: about so many requests a second."""
    few = list(generate(20_000, seed, shape))
    seconds = (few[-1].timestamp - few[0].timestamp) / 1000
    return replace(shape, families_per_s=shape.families_per_s * requests_per_s * seconds / len(few))


class _Traffic:
    """Draws of one trace; block ids and sessions are numbered through."""

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self._rng = rng
        self._shape = shape
        self._ids = count()
        self._sessions = count()

    def families(self) -> Iterator[tuple[float, list[Iterator[Record]]]]:
        """When each begins, in seconds, and its sessions. Without end."""
        shape, rng = self._shape, self._rng
        instructions = [self._new(n) for n in shape.instruction_blocks]
        popularity = [1 / (i + 1) for i in range(len(instructions))]
        mean = shape.mean_members - 2  # beyond two: geometric, from 0
        at = 0.0
        while True:
            at += rng.expovariate(shape.families_per_s)
            start = rng.choices(instructions, popularity)[0] if instructions else ()
            context = (*start, *self._new(self._tokens(shape.context) // shape.block_tokens))
            context = context[: shape.longest // shape.block_tokens]
            more = 0
            if rng.random() >= shape.lonely:
                more = 1 + int(math.log(1 - rng.random()) / math.log(mean / (1 + mean)))
            begins = [at]
            for _ in range(more):
                begins.append(begins[-1] + rng.expovariate(1 / shape.gap_s))
            yield at, [self._session(begin, context) for begin in begins]

    def _session(self, at: float, shared: tuple[int, ...]) -> Iterator[Record]:
        """The requests of one session; each prompt is all that was said before, and an addition."""
        shape, rng, block = self._shape, self._rng, self._shape.block_tokens
        name = f"s{next(self._sessions)}"
        full = list(shared)  # ids of the blocks that can no longer change
        said = min(shape.longest, len(full) * block + self._tokens(shape.own))
        turns = 1 if rng.random() < shape.one_turn else 2 + int(self._draw(shape.turns))
        for turn in range(turns):
            full += self._new(said // block - len(full))
            partial = self._new(blocks(said, block) - len(full))
            answer = min(shape.longest_answer, self._tokens(shape.answer))
            yield Record(round(at * 1000), said, answer, (*full, *partial), name, turn)
            said += answer + self._tokens(shape.addition)
            if said > shape.longest:
                return
            at += self._draw(shape.pause_s)

    def _new(self, blocks: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(blocks))

    def _draw(self, of: LogNormal) -> float:
        return self._rng.lognormvariate(math.log(of.median), of.spread)

    def _tokens(self, length: LogNormal) -> int:
        return max(1, round(self._draw(length)))

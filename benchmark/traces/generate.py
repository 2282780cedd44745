"""Seeded synthetic traffic as a trace, for machines without a trace.

A prompt is an instruction of the product (few, popular, all day), then a context that a family of
sessions shares, then the session's own text. A family is one task or project: a few sessions over
the same files that begin within minutes. Each turn's prompt is the previous prompt, its answer, and
an addition by a tool or a user.
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
    """Distribution of a length in tokens, or of a time in seconds."""

    median: float
    spread: float
    """Standard deviation of the logarithm."""


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, times in seconds. The defaults are those of two published hours of a
    production cluster that serves coding agents (GLM-5.1; 2.1 million requests)."""

    families_per_s: float = 9.8
    """Rate of a Poisson process."""
    instruction_blocks: tuple[int, ...] = (8, 5, 12, 3, 24, 8, 2, 16)
    """Blocks of each popular instruction, the i-th used in proportion to 1 / i."""
    lonely: float = 0.42
    """Share of families with one session."""
    mean_members: float = 2.6
    """Mean number of sessions of the other families: at least two, geometrically distributed."""
    gap_s: float = 40.0
    """Mean time between the beginnings of two sessions of a family, exponential."""
    context: LogNormal = LogNormal(5_200, 1.82)
    """Text that a family shares."""
    own: LogNormal = LogNormal(1_950, 1.5)
    """A session's first turn, without the shared text."""
    one_turn: float = 0.928
    """Share of sessions with one turn."""
    turns: LogNormal = LogNormal(4.0, 1.1)
    """Turns of the other sessions beyond the second."""
    addition: LogNormal = LogNormal(800, 1.2)
    """Text that a turn adds behind the last answer."""
    answer: LogNormal = LogNormal(80, 1.88)
    pause_s: LogNormal = LogNormal(8, 1.2)
    """Time from one request of a session to the next."""
    longest: int = 200_000
    """Maximum tokens of a prompt: first turns are cut to it, sessions end before it."""
    longest_answer: int = 32_000
    block_tokens: int = BLOCK_TOKENS


AGENTIC = Shape()


def generate(requests: int, seed: int = 0, shape: Shape = AGENTIC) -> Iterator[Record]:
    """Yield the first ``requests`` requests, by time, with session and turn.

    The same arguments give the same trace, and a shorter trace is the start of a longer one. Only
    families that have begun and not ended are in memory.
    """
    waiting: list[tuple[float, int, Record, Iterator[Record]]] = []  # next request of each session
    serial = count()
    families = _Traffic(random.Random(seed), shape).families()
    began, family = next(families)
    for _ in range(requests):
        # Add all families that begin before the next request is due.
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
    """Return the shape with about ``requests_per_s``: more or fewer users, of the same speed."""
    first_requests = list(generate(20_000, seed, shape))
    seconds = (first_requests[-1].timestamp - first_requests[0].timestamp) / 1000
    return replace(
        shape,
        families_per_s=shape.families_per_s * requests_per_s * seconds / len(first_requests),
    )


class _Traffic:
    """Random draws of one trace. Block ids and sessions are numbered consecutively."""

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self._rng = rng
        self._shape = shape
        self._ids = count()
        self._sessions = count()

    def families(self) -> Iterator[tuple[float, list[Iterator[Record]]]]:
        """Yield, without end, when each family begins, in seconds, and its sessions."""
        shape, rng = self._shape, self._rng
        instructions = [self._new(n) for n in shape.instruction_blocks]
        popularity = [1 / (i + 1) for i in range(len(instructions))]
        mean = shape.mean_members - 2  # members beyond two: geometric, from 0
        family_begins = 0.0
        while True:
            family_begins += rng.expovariate(shape.families_per_s)
            start = rng.choices(instructions, popularity)[0] if instructions else ()
            context = (*start, *self._new(self._tokens(shape.context) // shape.block_tokens))
            context = context[: shape.longest // shape.block_tokens]
            extra_members = 0
            if rng.random() >= shape.lonely:
                extra_members = 1 + int(math.log(1 - rng.random()) / math.log(mean / (1 + mean)))
            begins = [family_begins]
            for _ in range(extra_members):
                begins.append(begins[-1] + rng.expovariate(1 / shape.gap_s))
            yield family_begins, [self._session(begin, context) for begin in begins]

    def _session(self, due: float, shared: tuple[int, ...]) -> Iterator[Record]:
        """Yield one session's requests; each prompt is the text so far, and an addition."""
        shape, rng, block = self._shape, self._rng, self._shape.block_tokens
        name = f"s{next(self._sessions)}"
        full = list(shared)  # ids of the blocks that can no longer change
        tokens = min(shape.longest, len(full) * block + self._tokens(shape.own))
        turns = 1 if rng.random() < shape.one_turn else 2 + int(self._draw(shape.turns))
        for turn in range(turns):
            full += self._new(tokens // block - len(full))
            partial = self._new(blocks(tokens, block) - len(full))
            answer = min(shape.longest_answer, self._tokens(shape.answer))
            yield Record(round(due * 1000), tokens, answer, (*full, *partial), name, turn)
            tokens += answer + self._tokens(shape.addition)
            if tokens > shape.longest:
                return
            due += self._draw(shape.pause_s)

    def _new(self, blocks: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(blocks))

    def _draw(self, length: LogNormal) -> float:
        return self._rng.lognormvariate(math.log(length.median), length.spread)

    def _tokens(self, length: LogNormal) -> int:
        return max(1, round(self._draw(length)))

"""Agentic traffic as a trace, for machines with no trace at hand.

    python -m benchmark.agentic generate FILE [--requests N] [--seed N] [--no-sessions]

``shape`` says what it is like. ``benchmark.traces.generate`` has conversations of people instead.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec

from benchmark.agentic.sample.command import reporting, whole
from benchmark.agentic.sample.progress import counted
from benchmark.agentic.sample.shape import AgenticShape, LogNormal
from benchmark.traces.read import write
from benchmark.traces.record import Record, blocks


def agentic(requests: int, seed: int = 0, shape: AgenticShape | None = None) -> Iterator[Record]:
    """The first ``requests`` requests, by time, with session and turn.

    The same arguments give the same trace, and a shorter trace is the start of a longer one. Only
    families that have begun and not ended are in memory.
    """
    traffic = _Traffic(random.Random(seed), shape or AgenticShape())
    waiting: list[tuple[float, int, Record, Iterator[Record]]] = []  # next request of each session
    serial = count()
    families = traffic.families()
    began, family = next(families)
    for _ in range(requests):
        # Whatever is due before the next family begins is known by then.
        while not waiting or waiting[0][0] > began * 1000:
            for session in family:
                first = next(session)
                heapq.heappush(waiting, (first.timestamp, next(serial), first, session))
            began, family = next(families)
        _, order, record, session = waiting[0]
        later = next(session, None)
        if later is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (later.timestamp, order, later, session))
        yield record


class _Traffic:
    """Draws of one trace; block ids and sessions are numbered through."""

    def __init__(self, rng: random.Random, shape: AgenticShape) -> None:
        self._rng = rng
        self._shape = shape
        self._ids = count()
        self._sessions = count()

    def families(self) -> Iterator[tuple[float, list[Iterator[Record]]]]:
        """When each begins, in seconds, and its sessions. Without end."""
        shape, rng = self._shape, self._rng
        instructions = [self._new(n) for n in shape.instruction_blocks]
        popularity = [1 / (i + 1) for i in range(len(instructions))]
        at = 0.0
        while True:
            at += rng.expovariate(shape.families_per_s)
            start = rng.choices(instructions, popularity)[0] if instructions else ()
            context = (*start, *self._new(self._tokens(shape.context) // shape.block_tokens))
            context = context[: shape.longest // shape.block_tokens]
            begins = [at]
            for _ in range(self._members() - 1):
                begins.append(begins[-1] + rng.expovariate(1 / shape.gap_s))
            yield at, [self._session(begin, context) for begin in begins]

    def _session(self, at: float, shared: tuple[int, ...]) -> Iterator[Record]:
        """The requests of one session; each prompt is all that was said before, and an addition."""
        shape, block = self._shape, self._shape.block_tokens
        name = f"s{next(self._sessions)}"
        full = list(shared)  # ids of the blocks that can no longer change
        said = min(shape.longest, len(full) * block + self._tokens(shape.own))
        for turn in range(self._turns()):
            full += self._new(said // block - len(full))
            partial = self._new(blocks(said, block) - len(full))
            answer = min(shape.longest_answer, self._tokens(shape.answer))
            yield Record(round(at * 1000), said, answer, (*full, *partial), name, turn)
            said += answer + self._tokens(shape.addition)
            if said > shape.longest:
                return
            at += self._draw(shape.pause_s)

    def _members(self) -> int:
        if self._rng.random() < self._shape.lonely:
            return 1
        extra = self._shape.mean_members - 2  # geometric, from 0
        return 2 + self._geometric(extra)

    def _geometric(self, mean: float) -> int:
        if mean <= 0:
            return 0
        return int(math.log(1 - self._rng.random()) / math.log(mean / (1 + mean)))

    def _turns(self) -> int:
        if self._rng.random() < self._shape.one_turn:
            return 1
        return 2 + int(self._draw(self._shape.turns))

    def _new(self, blocks: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(blocks))

    def _tokens(self, length: LogNormal) -> int:
        return max(1, round(self._draw(length)))

    def _draw(self, length: LogNormal) -> float:
        return self._rng.lognormvariate(math.log(length.median), length.spread)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.agentic generate",
        description="Make a trace of agentic traffic.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=whole, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-sessions", action="store_true", help="leave out session_id and turn, as Mooncake does"
    )
    args = parser.parse_args(argv)
    with reporting():
        records: Iterator[Record] = agentic(args.requests, args.seed)
        if args.no_sessions:
            records = (msgspec.structs.replace(r, session_id=None, turn=None) for r in records)
        done = write(args.file, counted(records, "generating", args.requests))
        print(f"{done} requests")
    return 0

"""Seeded conversations as a trace: many people talk with an assistant, some with one instruction.

    python -m benchmark.traces.generate FILE [--requests N] [--seed N]

The defaults resemble Mooncake's conversation trace in what matters to a cache: prompts of about
12,000 tokens on average with a long tail, answers of about 340, 3.4 requests a second, and a third
of all blocks seen before.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmark.traces.read import write
from benchmark.traces.record import BLOCK_TOKENS, Record, blocks


@dataclass(frozen=True)
class Shape:
    """What the conversations are like. Lengths in tokens, times in seconds."""

    conversations_per_s: float = 1.9
    mean_turns: float = 1.8
    """Turns of a conversation: at least one, geometrically distributed."""
    system_prompts: int = 4
    """Instructions that conversations begin with, the first one the most frequent."""
    system_blocks: int = 1
    """Blocks of each of them."""
    first_tokens: float = 4500
    """Median of a conversation's first turn, log-normal, the instruction not counted."""
    first_spread: float = 1.3
    turn_tokens: float = 300
    """Median of each later turn."""
    turn_spread: float = 1.0
    answer_tokens: float = 250
    """Median of an answer."""
    answer_spread: float = 0.8
    think_s: float = 60.0
    """Mean time from one turn to the next, exponential."""
    longest: int = 125_000
    """A conversation ends before its prompt is longer."""
    block_tokens: int = BLOCK_TOKENS


def conversations(requests: int, seed: int = 0, shape: Shape = Shape()) -> Iterator[Record]:  # noqa: B008
    """The first ``requests`` requests, by time. The same arguments give the same trace."""
    rng = random.Random(seed)
    ids = count()
    instructions = [
        tuple(next(ids) for _ in range(shape.system_blocks)) for _ in range(shape.system_prompts)
    ]
    weights = [1 / (i + 1) for i in range(shape.system_prompts)]
    arrival = 0.0
    waiting: list[tuple[float, int, Record]] = []  # turns of conversations that have begun
    serial = count()
    for _ in range(requests):
        # Whatever is due before the next conversation begins is known by then.
        while not waiting or waiting[0][0] > arrival:
            start = rng.choices(instructions, weights)[0] if instructions else ()
            for record in _turns(rng, arrival, start, ids, shape):
                heapq.heappush(waiting, (record.timestamp / 1000, next(serial), record))
            arrival += rng.expovariate(shape.conversations_per_s)
        yield heapq.heappop(waiting)[2]


def _turns(
    rng: random.Random, began_s: float, start: tuple[int, ...], ids: count[int], shape: Shape
) -> Iterator[Record]:
    """The requests of one conversation; each prompt is all that was said before, and a turn."""
    block = shape.block_tokens
    full = list(start)  # ids of the blocks that can no longer change
    said = len(full) * block
    at = began_s
    first = True
    while True:
        median, spread = (
            (shape.first_tokens, shape.first_spread)
            if first
            else (shape.turn_tokens, shape.turn_spread)
        )
        said += _log_normal(rng, median, spread)
        if said > shape.longest:
            if not first:
                return
            said = shape.longest
        full += [next(ids) for _ in range(said // block - len(full))]
        partial = [next(ids)] if blocks(said, block) > len(full) else []
        answer = _log_normal(rng, shape.answer_tokens, shape.answer_spread)
        yield Record(round(at * 1000), said, answer, (*full, *partial))
        if rng.random() < 1 / shape.mean_turns:
            return
        said += answer
        at += rng.expovariate(1 / shape.think_s)
        first = False


def _log_normal(rng: random.Random, median: float, spread: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), spread)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.traces.generate")
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{write(args.file, conversations(args.requests, args.seed))} requests")


if __name__ == "__main__":
    main()

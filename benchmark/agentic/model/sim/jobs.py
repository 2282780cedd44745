"""Requests of a simulation."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmark.traces.record import BLOCK_TOKENS, Record


@dataclass(slots=True, eq=False)
class Job:
    """A request and its way through the fleet. Times in seconds, -1 before they happened."""

    number: int
    arrival: float
    prompt: int
    """Tokens."""
    output: int
    blocks: tuple[int, ...]
    """Ids of the prompt's full blocks: equal ids are equal tokens, and equal tokens before them."""

    prefill: int = -1
    """Worker."""
    decode: int = -1
    admitted: float = -1.0
    """Decode gave it pages; prefill may begin."""
    prefilled: float = -1.0
    landed: float = -1.0
    first_token: float = -1.0
    """It joined a decode batch, whose server sends the first token."""
    finished: float = -1.0
    decode_hit: int = 0
    """Prompt tokens that decode held when it admitted the request."""
    prefill_hit: int = 0
    moved: int = 0
    """Tokens on the wire."""
    stalled: float = 0.0
    """Seconds that its chunks waited for a link."""
    retracted: int = 0
    """Times."""
    rejected: bool = False

    # What the workers note on it.
    pending: int = 0
    """Tokens that its prefill worker was said to compute when it was routed, and has not."""
    said: tuple[int, int] = (0, 0)
    """Tokens that its prefill and its decode worker were said to hold when it was routed."""
    private: int = 0
    """Tokens of the decode pool that are its own."""
    locked: int = 0
    """Blocks of the decode pool that it holds."""
    finish_step: int = 0
    joined_step: int = 0
    left: int = 0
    """Decode steps that it still needs when it joins."""
    position: int = 0
    """Prompt tokens whose KV prefill has."""
    prefill_private: int = 0
    prefill_locked: int = 0


def from_trace(records: Iterable[Record]) -> Iterator[Job]:
    """A trace's requests, by time. A last block that is not full is nobody else's.

    Answers are no part of the ids of a trace until a later prompt holds them, so what a
    session's next turn could find of the last answer is not counted as held.
    """
    for number, record in enumerate(records):
        full = record.input_length // BLOCK_TOKENS
        yield Job(
            number,
            record.timestamp / 1000,
            record.input_length,
            record.output_length,
            tuple(record.hash_ids[:full]),
        )


@dataclass(frozen=True)
class SharedPrefixes:
    """A closed loop's requests: a prefix of a few, a suffix of its own. Lengths in tokens."""

    requests: int = 1000
    prefixes: int = 20
    prefix: int = 50_000
    suffix: int = 4500
    output: float = 355.4
    suffix_spread: float = 500.0
    """Standard deviation, normal."""
    output_spread: float = 100.0
    block: int = 500
    """Unit of the caches; a prefix is whole blocks."""

    def __post_init__(self) -> None:
        if self.prefix % self.block:
            raise ValueError(
                f"a prefix of {self.prefix} tokens is no whole number of blocks of {self.block}"
            )

    def jobs(self, seed: int = 0) -> Iterator[Job]:
        """All at time 0; the closed loop holds them back. The same seed gives the same."""
        rng = random.Random(seed)
        shared = self.prefix // self.block
        prefixes = [tuple(range(p * shared, (p + 1) * shared)) for p in range(self.prefixes)]
        next_id = self.prefixes * shared
        for number in range(self.requests):
            prefix = rng.randrange(self.prefixes)
            suffix = _normal(rng, self.suffix, self.suffix_spread)
            output = _normal(rng, self.output, self.output_spread)
            own = suffix // self.block
            blocks = (*prefixes[prefix], *range(next_id, next_id + own))
            next_id += own
            yield Job(number, 0.0, self.prefix + suffix, output, blocks)


def _normal(rng: random.Random, mean: float, spread: float) -> int:
    return max(1, round(rng.gauss(mean, spread)))

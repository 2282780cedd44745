"""The questions of a chaos run and their right answers, asked of an aggregated server beforehand.

Conversations over a few shared prefixes: the prompt of a turn is the prompt and the answer of the
turn before and new tokens. The prompts of later turns hold right answers, so that any request can
be sent at any time, whatever became of those before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.harness.pair import Aggregated
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import token_range
from e2e.support import START_METHOD

Ids = list[int]

Ask = Callable[[Sequence[Ids], int], list[Ids]]
"""Prompts and how many tokens to generate -> the greedy answers."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a bank, in tokens where nothing else is said."""

    threads: int = 8
    """Conversations."""
    turns: int = 5
    prefixes: int = 2
    """Different starts that the conversations share."""
    prefix: int = 192
    first: tuple[int, int] = (20, 400)
    """Shortest and longest first question; longer ones take several prefill chunks."""
    later: tuple[int, int] = (8, 40)
    answer: tuple[int, int] = (16, 64)


DEFAULT_SHAPE = Shape()


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that every server must give."""

    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Bank:
    """Questions, conversation after conversation."""

    questions: tuple[Question, ...]
    threads: tuple[int, ...]
    """How many questions each conversation has."""


def make_bank(vocabulary: range, seed: int, ask: Ask, shape: Shape = DEFAULT_SHAPE) -> Bank:
    """A bank of conversations; ``ask`` is called once a turn, with a prompt of each."""
    rng = random.Random(f"{seed} bank")
    prefixes = [rng.choices(vocabulary, k=shape.prefix) for _ in range(shape.prefixes)]
    prompts: list[tuple[int, ...]] = [
        (*prefixes[i % shape.prefixes], *rng.choices(vocabulary, k=rng.randint(*shape.first)))
        for i in range(shape.threads)
    ]
    found: list[list[Question]] = [[] for _ in prompts]
    for turn in range(shape.turns):
        longest = ask([list(prompt) for prompt in prompts], shape.answer[1])
        for i, answer in enumerate(longest):
            kept = tuple(answer[: rng.randint(*shape.answer)])
            found[i].append(Question(i * shape.turns + turn, prompts[i], kept))
            words = rng.choices(vocabulary, k=rng.randint(*shape.later))
            prompts[i] = (*prompts[i], *kept, *words)
    return Bank(tuple(q for thread in found for q in thread), tuple(map(len, found)))


def ask_aggregated(model: Path, logs: Path, seed: int, shape: Shape = DEFAULT_SHAPE) -> Bank:
    """Makes a bank with SGLang's own aggregated server, stock, which runs meanwhile only."""
    sizes = Sizes(pool_tokens=60_000, chunked_prefill_tokens=2048)
    with Aggregated(model, logs, sizes, env={START_METHOD: "fork"}) as server:
        return make_bank(token_range(model), seed, server.generate, shape)

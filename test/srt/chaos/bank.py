"""The questions of a chaos run and their right answers, computed by an aggregated server
beforehand.

The prompt of each turn of a conversation is the previous turn's prompt and answer, plus new tokens;
conversations share a few prefixes. Because prompts of later turns contain the right answers, any
request can be sent at any time, however earlier requests ended.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.harness.fleet import Aggregated
from benchmark.harness.models import token_range
from benchmark.harness.servers import Sizes
from chaos.families import DENSE, Served, rounded
from e2e.support import post

Ids = list[int]

Ask = Callable[[Sequence[Ids], int], list[Ids]]
"""Prompts and the number of tokens to generate -> the greedy answers."""


THREADS = 8
"""Number of conversations."""
TURNS = 5
PREFIXES = 2
"""Number of different prefixes that the conversations share."""
PREFIX_TOKENS = 192
FIRST_TOKENS = (20, 400)
"""Shortest and longest first question; longer ones take several prefill chunks."""
LATER_TOKENS = (8, 40)
ANSWER_TOKENS = (16, 64)


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that every server must give."""

    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Bank:
    """Questions, conversation after conversation."""

    model: Path
    """The weights that answered."""
    questions: tuple[Question, ...]
    threads: tuple[int, ...]
    """Number of questions of each conversation."""


def make_bank(model: Path, seed: int, ask: Ask) -> Bank:
    """Make a bank of conversations. ``ask`` is called once a turn with a prompt of each.

    Conversations for different models begin with equal prompts if the seeds are equal.
    """
    vocabulary = token_range(model)
    rng = random.Random(f"{seed} bank")
    prefixes = [rng.choices(vocabulary, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
    prompts: list[tuple[int, ...]] = [
        (*prefixes[i % PREFIXES], *rng.choices(vocabulary, k=rng.randint(*FIRST_TOKENS)))
        for i in range(THREADS)
    ]
    questions: list[list[Question]] = [[] for _ in prompts]
    for turn in range(TURNS):
        longest = ask([list(prompt) for prompt in prompts], ANSWER_TOKENS[1])
        for i, answer in enumerate(longest):
            kept = tuple(answer[: rng.randint(*ANSWER_TOKENS)])
            questions[i].append(Question(i * TURNS + turn, prompts[i], kept))
            words = rng.choices(vocabulary, k=rng.randint(*LATER_TOKENS))
            prompts[i] = (*prompts[i], *kept, *words)
    return Bank(model, tuple(q for thread in questions for q in thread), tuple(map(len, questions)))


def ask_aggregated(
    models: Sequence[Path], logs: Path, seed: int, served: Served = DENSE
) -> list[Bank]:
    """Make a bank for each model with stock SGLang's aggregated server.

    One server runs for the duration of this call and loads the weights of one model after another.
    """
    sizes = Sizes(60_000, page_size=served.page_size, chunked_prefill_tokens=2048)
    banks, args, env = [], served.arguments, dict(served.env)
    with Aggregated(models[0], logs, sizes, extra_args=args, env=env) as server:

        def load(model: Path) -> None:
            post(server.config.url, "/update_weights_from_disk", model_path=str(model))

        for model in models:
            if model != models[0]:
                load(model)
            others = [
                rounded(model, logs / f"{model.name}.{trial}", trial)
                for trial in range(served.roundings)
            ]
            banks.append(make_bank(model, seed, agreed(server.generate, load, model, others)))
    return banks


def agreed(ask: Ask, load: Callable[[Path], object], model: Path, others: Sequence[Path]) -> Ask:
    """Return ``ask`` with answers as far as ``others`` agree with ``model``, one token at least.

    If rounding decides about a token, servers may answer with different ones, and none is wrong.
    """

    def answers(prompts: Sequence[Ids], new_tokens: int) -> list[Ids]:
        answers_so_far = ask(prompts, new_tokens)
        for other in others:
            load(other)
            for i, again in enumerate(ask(prompts, new_tokens)):
                answers_so_far[i] = answers_so_far[i][
                    : max(1, len(os.path.commonprefix([answers_so_far[i], again])))
                ]
        if others:
            load(model)
        return answers_so_far

    return answers

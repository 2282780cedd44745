"""The shipped arithmetic model has the same score on a pair and on one server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmark.harness import metrics
from benchmark.harness.client import Request, Result, Target, send_all
from benchmark.harness.fleet import Aggregated, Pair
from benchmark.harness.metrics import HIT_TOKENS, PROMPT_TOKENS
from benchmark.harness.servers import Sizes
from e2e.support import pair_config, settle

MODEL = Path(__file__).parents[1] / "models" / "tiny_arith"
QUESTIONS = 40
ANSWER_TOKENS = 120
PAGE = 16
POOL_TOKENS = 32_000
"""Room for every question and answer, so that a second pass finds all of them in the tree."""


@dataclass(frozen=True)
class Graded:
    """A server's answers to the questions, and the number of right ones."""

    texts: list[str]
    correct: int


def number_of(answer: str) -> int | None:
    """Return the number after ``####``, which ends an answer of GSM8K, or None."""
    match = re.search(r"#### (-?\d+)", answer)
    return int(match.group(1)) if match else None


def held_out() -> tuple[list[Request], list[int | None]]:
    """Return chat requests for the first held-out questions, and the right numbers."""
    rows = [json.loads(line) for line in (MODEL / "test_set.jsonl").read_text().splitlines()]
    asked = [
        Request([{"role": "user", "content": row["question"]}], ANSWER_TOKENS, ignore_eos=False)
        for row in rows[:QUESTIONS]
    ]
    right = [number_of(row["answer"]) for row in rows[:QUESTIONS]]
    assert len(right) == QUESTIONS and None not in right
    return asked, right


def grade(results: Sequence[Result], right: Sequence[int | None]) -> Graded:
    assert [result.error for result in results] == [None] * len(results)
    texts = [result.text for result in results]
    correct = sum(number_of(text) == number for text, number in zip(texts, right, strict=True))
    return Graded(texts, correct)


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> Graded:
    """The stock aggregated server's answers, computed once for all arms."""
    asked, right = held_out()
    folder = tmp_path_factory.mktemp("aggregated")
    sizes = Sizes(pool_tokens=POOL_TOKENS)
    with Aggregated(MODEL, folder, sizes) as server:
        return grade(asyncio.run(send_all(Target(server.config.url), asked, 16)), right)


def test_the_model_knows_arithmetic(aggregated: Graded) -> None:
    """Guards against a model that answers at random: equal scores would mean little."""
    assert aggregated.correct >= 0.9 * QUESTIONS


def test_prefill_and_decode_score_what_one_server_scores(aggregated: Graded, logs: Path) -> None:
    """Guards against KV that is wrong, late or another request's, which would cost right answers;
    also in a second pass, with prompts that decode's tree holds up to their last page."""
    asked, right = held_out()
    config = pair_config(MODEL, logs, page_size=PAGE, decode_tokens=POOL_TOKENS)
    with Pair(config, logs / "pair") as pair:
        assert grade(pair.send(asked, concurrency=16), right) == aggregated
        settle(pair)
        before = pair.metrics()[1]
        second = pair.send(asked, concurrency=16)
        assert grade(second, right) == aggregated
        settle(pair)
        gained = metrics.gained(before, pair.metrics()[1])
    prompts = [result.prompt_tokens for result in second]
    assert gained[PROMPT_TOKENS] == sum(prompts)
    assert gained[HIT_TOKENS] == sum(tokens // PAGE * PAGE for tokens in prompts)

"""The shipped arithmetic model answers right, and as well from the decode tree as without it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from benchmark.harness.client import Request, Target, send_all
from benchmark.harness.metrics import HIT_TOKENS
from benchmark.harness.pair import Aggregated, Pair
from benchmark.harness.servers import Sizes
from e2e.support import START_METHOD, pair_config, settle
from models.arithmetic import number_of

MODEL = Path(__file__).parents[1] / "models" / "tiny_arith"
QUESTIONS = 100
ANSWER_TOKENS = 120


def questions() -> tuple[list[Request], list[int]]:
    """Chat requests for the first held-out questions, and the right numbers."""
    rows = [json.loads(line) for line in (MODEL / "test_set.jsonl").read_text().splitlines()]
    asked = [
        Request([{"role": "user", "content": row["question"]}], ANSWER_TOKENS, ignore_eos=False)
        for row in rows[:QUESTIONS]
    ]
    right = [number_of(row["answer"]) for row in rows[:QUESTIONS]]
    assert None not in right
    return asked, [int(number) for number in right if number is not None]


def test_held_out_arithmetic(logs: Path) -> None:
    """A model that answers at random would make every demo and equality test worth little; and a
    second pass, answered from the decode tree, must give the very same texts."""
    asked, right = questions()
    sizes = Sizes(pool_tokens=16_000)
    with Aggregated(MODEL, logs / "aggregated", sizes, env={START_METHOD: "fork"}) as server:
        results = asyncio.run(send_all(Target(server.config.url), asked, concurrency=16))
    texts = [result.text for result in results]
    correct = sum(number_of(text) == number for text, number in zip(texts, right, strict=True))
    assert correct >= 0.9 * QUESTIONS

    with Pair(pair_config(MODEL, logs, page_size=16), logs / "pair") as pair:
        for _ in range(2):
            assert [r.text for r in pair.send(asked[:40], concurrency=8)] == texts[:40]
        settle(pair)
        assert pair.metrics()[1][HIT_TOKENS] > 0

"""Turns that decode computes itself, with data parallel attention and experts over both ranks.

Each rank has its own requests and its own tree, but both run each step together.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.client import Request
from benchmark.harness.fleet import Pair
from e2e.support import (
    Ids,
    dp_attention,
    pair_config,
    prompt_maker,
    reference_server,
    send_and_leave,
    settle,
)
from e2e.test_local_turns import LIMIT, turns
from models import families

ROUNDS = int(os.environ.get("LOCAL_DP_ROUNDS", "6"))
"""Number of rounds; in each, all talks send one turn at the same time."""
TALKS = 8
NEW_TOKENS = 24


def config_of(model: Path, logs: Path) -> Any:
    """Return the configuration of a pair with two decode ranks."""
    return pair_config(
        model,
        logs,
        page_size=16,
        decode_tp=2,
        skip_warmup=True,
        # Not ``DOZE``, because a rank would wait for the other one while that sleeps.
        decode_args=(
            *dp_attention(),
            *("--ep-size", "2", "--disaggregation-decode-local-tokens", str(LIMIT)),
        ),
        decode_env={"SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK": "48"},
    )


@pytest.mark.nightly
def test_talks_on_both_ranks(tmp_path: Path, logs: Path) -> None:
    """Guards against a rank that misses a step in which the other one computes a chunk, which would
    hang the server, and against a chunk's experts with another rank's tokens. Clients disconnect at
    any time. In every run ``component/decode/test_local_data_parallel.py`` has the loop of two
    ranks."""
    model = families.build(tmp_path / "deepseek_v3", "deepseek_v3")
    rng = random.Random(7)
    tokens = prompt_maker(model, seed=7)
    stock = reference_server(model, logs, 20_000)
    with stock as reference, Pair(config_of(model, logs), logs) as pair:
        talks: list[Ids] = []
        answered = left = 0
        for _ in range(ROUNDS):
            while len(talks) < TALKS:
                talks.append(tokens(rng.randrange(20, 400)))
            expected = reference.answers(talks, NEW_TOKENS)
            asked = [Request(talk, NEW_TOKENS) for talk in talks]
            patience = [rng.choice([None, None, rng.uniform(0, 1.0)]) for _ in talks]
            results = send_and_leave(pair.target, asked, patience)
            following = []
            for talk, answer, result in zip(talks, expected, results, strict=True):
                if result is None:
                    left += 1
                else:
                    assert (result.error, result.output_ids) == (None, answer)
                    answered += 1
                following.append([*talk, *answer, *tokens(rng.randrange(1, 150))])
            talks = [talk for talk in following if len(talk) < 1500]
        counted = turns(pair)
        print(f"{answered} answered, {left} left, {counted}")
        assert answered > 20 and left > 0
        assert counted["local", "short"] > 10
        settle(pair)

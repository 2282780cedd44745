"""Real servers of SGLang 0.5.23 over NIXL and TCP: talks of three turns.

An aggregated stock server says what the answers are. Pairs of stock servers, pairs with the group
``lead``, and the latter on two ranks each have to give the same tokens, and to be idle and balanced
afterwards: ``Pair.check`` waits for SGLang's own memory check.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmark.harness import metrics
from benchmark.harness.pair import Aggregated, Pair, PairConfig
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import token_range
from current.environment import environment
from models.random_qwen3 import build
from sglang.srt.disaggregation.lead import attach

PAGE, NEW = 16, 16
SIZES = Sizes(pool_tokens=16_000, page_size=PAGE, chunked_prefill_tokens=512)
#: Every part of the group, on both servers; every later turn is computed by decode, and prefill's
#: half of it has to end without an error, or the client takes the request for failed.
LEAD = {
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "512",
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_ALWAYS": "1",
    "SGLANG_DISAGGREGATION_DECODE_FALLBACK_PREFILL_TOKENS": "512",
    "SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining",
    "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY": "1000",
}
is_there = pytest.mark.skipif(not attach.PARTS, reason="the group lead has no part")


class Talks(NamedTuple):
    """Prompts of each turn, one a talk, and the answers to them."""

    model: Path
    prompts: list[list[list[int]]]
    answers: list[list[list[int]]]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """Four talks, two of which begin alike, as the aggregated server carries them on."""
    model = build(tmp_path_factory.mktemp("model"))
    rng, tokens = random.Random(5), token_range(model)
    begun = rng.choices(tokens, k=200)
    prompts = [[*begun, *rng.choices(tokens, k=100 + 60 * i)] for i in range(2)]
    prompts += [rng.choices(tokens, k=300 + 90 * i) for i in range(2)]
    told = Talks(model, [], [])
    logs = tmp_path_factory.mktemp("aggregated")
    with Aggregated(model, logs, SIZES, env=variables()) as server:
        for _ in range(3):
            told.prompts.append(prompts)
            told.answers.append(server.generate(prompts, NEW))
            prompts = [
                [*prompt, *answer, *rng.choices(tokens, k=30)]
                for prompt, answer in zip(prompts, told.answers[-1], strict=True)
            ]
        server.check()
    return told


def variables(**more: str) -> dict[str, str]:
    """For each server; the stand-in forks SGLang's processes, which halves a start."""
    return {**environment(), "SGLANG_CPU_STANDIN_START_METHOD": "fork", **more}


def carries_on(talks: Talks, logs: Path, *, ranks: int = 1, lead: bool) -> None:
    """A pair gives the same answers, turn by turn, and ends balanced."""
    config = PairConfig(
        talks.model,
        stock=not lead,
        radix=True,
        prefill_sizes=SIZES,
        decode_sizes=SIZES,
        prefill_tp=ranks,
        decode_tp=ranks,
        skip_warmup=True,
        env=variables(**LEAD if lead else {}),
    )
    with Pair(config, logs) as pair:
        for turn, (prompts, answers) in enumerate(zip(talks.prompts, talks.answers, strict=True)):
            assert pair.generate(prompts, NEW) == answers, f"turn {turn}"
        pair.check()
        page = metrics.page(pair.decode_url)
        turns = metrics.by_labels(page, "sglang:decode_turns_total", "where", "reason")
        # Of the first ones some are asked of prefill, while it is asked what it can do.
        assert (turns.get(("local", "always"), 0) >= 2 * len(prompts)) == lead, turns


def test_stock(talks: Talks, tmp_path: Path) -> None:
    """The baseline: where it differs, nothing else of this file says anything."""
    carries_on(talks, tmp_path, lead=False)


@is_there
def test_lead(talks: Talks, tmp_path: Path) -> None:
    """Guards against a turn of wrong KV, and against pages or rows that a part leaves behind."""
    carries_on(talks, tmp_path, lead=True)


@is_there
def test_lead_on_two_ranks(talks: Talks, tmp_path: Path) -> None:
    """Guards against ranks that decide differently: they would hang, or attend to other KV."""
    carries_on(talks, tmp_path, ranks=2, lead=True)

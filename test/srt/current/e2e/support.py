"""Talks with their answers, and how servers of SGLang 0.5.23 are started here."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmark.harness import metrics
from benchmark.harness.fleet import Aggregated, Pair, PairConfig
from benchmark.harness.models import token_range
from benchmark.harness.servers import Sizes
from current.environment import MODEL, environment

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

Ids = list[int]


class Talks(NamedTuple):
    """Prompts of each turn, one a talk, and the answers to them."""

    model: Path
    prompts: list[list[Ids]]
    answers: list[list[Ids]]
    architecture: str = MODEL
    """SGLang's file for the model."""


def talks_of(model: Path, logs: Path, architecture: str = MODEL) -> Talks:
    """Four talks of three turns, two of which begin alike, and a fourth list of prompts that no
    talk shares, the last of them long; as an aggregated stock server answers them."""
    rng, tokens = random.Random(5), token_range(model)
    begun = rng.choices(tokens, k=200)
    prompts = [[*begun, *rng.choices(tokens, k=100 + 60 * i)] for i in range(2)]
    prompts += [rng.choices(tokens, k=300 + 90 * i) for i in range(2)]
    told = Talks(model, [], [], architecture)
    with Aggregated(model, logs, SIZES, env=variables(architecture)) as server:
        for _ in range(3):
            told.prompts.append(prompts)
            told.answers.append(server.generate(prompts, NEW))
            prompts = [
                [*prompt, *answer, *rng.choices(tokens, k=30)]
                for prompt, answer in zip(prompts, told.answers[-1], strict=True)
            ]
        told.prompts.append([rng.choices(tokens, k=length) for length in (250, 300, 4000)])
        told.answers.append(server.generate(told.prompts[-1], NEW))
        changed = [told.prompts[0][0][:]]
        changed[0][5] = next(token for token in tokens if token != changed[0][5])
        assert server.generate(changed, NEW) != told.answers[0][:1], "wrong KV would not show"
        server.check()
    return told


def variables(architecture: str = MODEL, **more: str) -> dict[str, str]:
    """Of each server."""
    return {**environment(model=architecture), **more}


def play(
    talks: Talks,
    logs: Path,
    settings: Mapping[str, str],
    *,
    ranks: int = 1,
    arguments: tuple[str, ...] = (),
    decode_env: Mapping[str, str] | None = None,
) -> str:
    """Play the talks on a pair that must give the same answers and end balanced. Return decode's
    metrics.

    Args:
        settings: variables of the lead; without any, both servers are stock.
        ranks: of each server.
        arguments: of both servers.
        decode_env: more variables of the decode server.
    """
    config = PairConfig(
        talks.model,
        stock=not settings,
        radix=True,
        prefill_sizes=SIZES,
        decode_sizes=SIZES,
        prefill_tp=ranks,
        decode_tp=ranks,
        prefill_args=arguments,
        decode_args=arguments,
        skip_warmup=True,
        env=variables(talks.architecture, **settings),
        decode_env=decode_env or {},
    )
    with Pair(config, logs) as pair:
        for turn in range(3):
            prompts, answers = talks.prompts[turn], talks.answers[turn]
            assert pair.generate(prompts, NEW) == answers, f"turn {turn}"
        pair.check()
        return metrics.page(pair.decode_url)


def turns(page: str) -> dict[tuple[str, ...], float]:
    """Return how many turns were computed where and why, of decode's metrics."""
    return metrics.by_labels(page, metrics.TURNS, "where", "reason")

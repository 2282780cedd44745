"""Talks with their answers, and the start of servers of SGLang 0.5.23."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import requests

from benchmark.harness import metrics
from benchmark.harness.fleet import Aggregated, Pair, PairConfig
from benchmark.harness.models import token_range
from benchmark.harness.servers import Sizes
from current.environment import MODEL, environment
from e2e.support import dp_attention
from sglang.srt.patchset.metric import INFO, KEY

PAGE = 16
#: Generated tokens of an answer.
NEW = 16
SIZES = Sizes(pool_tokens=16_000, page_size=PAGE, chunked_prefill_tokens=512)
#: Every part of the group, on both servers. Decode computes every later turn, and prefill's half of
#: it must end without an error, because otherwise the client takes the request for failed.
LEAD = {
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "512",
    "SGLANG_DISAGGREGATION_DECODE_FALLBACK_PREFILL_TOKENS": "512",
    "SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining",
    "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY": "1000",
}

Ids = list[int]


class Talks(NamedTuple):
    """For each turn: a prompt of each talk, and its answers."""

    model: Path
    prompts: list[list[Ids]]
    answers: list[list[Ids]]
    architecture: str = MODEL
    """SGLang's file for the model."""
    page: int = PAGE
    """Tokens of a page."""
    arguments: tuple[str, ...] = ()
    """More arguments of each server."""


def talks_of(
    model: Path,
    logs: Path,
    architecture: str = MODEL,
    page: int = PAGE,
    arguments: tuple[str, ...] = (),
) -> Talks:
    """Return four talks of three turns with the answers of an aggregated stock server.

    Two talks begin with the same prefix. A fourth list has prompts without a talk; the last is
    long.
    """
    rng, tokens = random.Random(5), token_range(model)
    begun = rng.choices(tokens, k=200)
    prompts = [[*begun, *rng.choices(tokens, k=100 + 60 * i)] for i in range(2)]
    prompts += [rng.choices(tokens, k=300 + 90 * i) for i in range(2)]
    talks = Talks(model, [], [], architecture, page, arguments)
    sizes = replace(SIZES, page_size=page)
    env = variables(architecture)
    with Aggregated(model, logs, sizes, extra_args=arguments, env=env) as server:
        for _ in range(3):
            talks.prompts.append(prompts)
            talks.answers.append(server.generate(prompts, NEW))
            prompts = [
                [*prompt, *answer, *rng.choices(tokens, k=30)]
                for prompt, answer in zip(prompts, talks.answers[-1], strict=True)
            ]
        talks.prompts.append([rng.choices(tokens, k=length) for length in (250, 300, 4000)])
        talks.answers.append(server.generate(talks.prompts[-1], NEW))
        changed = [talks.prompts[0][0][:]]
        changed[0][5] = next(token for token in tokens if token != changed[0][5])
        assert server.generate(changed, NEW) != talks.answers[0][:1], (
            "wrong KV would not change answers"
        )
        server.check()
    return talks


def variables(architecture: str = MODEL, **more: str) -> dict[str, str]:
    """Return the variables of each server."""
    return {**environment(None, architecture), **more}


def play(
    talks: Talks,
    logs: Path,
    settings: Mapping[str, str],
    *,
    ranks: int = 1,
    attention_ranks: int = 1,
    arguments: tuple[str, ...] = (),
    decode_env: Mapping[str, str] | None = None,
    backend: str = "nixl",
) -> str:
    """Play the talks on a pair that must give the same answers and end balanced. Both servers must
    report the package, unless they are stock. Return decode's metrics.

    Args:
        settings: variables of the lead; without any, both servers are stock.
        ranks: number of tensor parallel ranks of each server.
        attention_ranks: number of data parallel ranks of attention; ``ranks`` is a multiple of it.
        arguments: of both servers.
        decode_env: more variables of the decode server.
        backend: transfer backend.
    """
    parallel = [dp_attention(attention_ranks) if attention_ranks > 1 else () for _ in range(2)]
    arguments, sizes = (*talks.arguments, *arguments), replace(SIZES, page_size=talks.page)
    config = PairConfig(
        talks.model,
        backend=backend,
        stock=not settings,
        radix=True,
        prefill_sizes=sizes,
        decode_sizes=sizes,
        prefill_tp=ranks,
        decode_tp=ranks,
        prefill_args=(*arguments, *parallel[0]),
        decode_args=(*arguments, *parallel[1]),
        skip_warmup=True,
        env=variables(talks.architecture, **settings),
        decode_env=decode_env or {},
    )
    with Pair(config, logs) as pair:
        for turn in range(3):
            prompts, answers = talks.prompts[turn], talks.answers[turn]
            assert pair.generate(prompts, NEW) == answers, f"turn {turn}"
        pair.check()
        for url in (pair.prefill_url, pair.decode_url):
            reports = 1 + attention_ranks if settings else 0
            assert reported_groups(url) == ["lead"] * reports, url
        return metrics.page(pair.decode_url)


def reported_groups(url: str) -> list[str]:
    """Return the groups of the package that a server reports on ``/metrics`` and in
    ``/server_info``."""
    page = metrics.by_labels(metrics.page(url), INFO.exported_name, "groups")
    states = requests.get(f"{url}/server_info", timeout=30).json()["internal_states"]
    return [
        *(groups for (groups,) in page),
        *(each[KEY]["groups"] for each in states if KEY in each),
    ]


def turns(page: str) -> dict[tuple[str, ...], float]:
    """Return the counts of turns by side and reason from decode's metrics."""
    return metrics.by_labels(page, metrics.TURNS, "where", "reason")

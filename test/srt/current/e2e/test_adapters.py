"""LoRA adapters on a pair of SGLang 0.5.23 with the group ``lead``."""

from __future__ import annotations

import random
from pathlib import Path

from benchmark.harness import metrics
from benchmark.harness.client import Request
from benchmark.harness.fleet import Aggregated, Pair, PairConfig, output_ids
from benchmark.harness.models import token_range
from current.e2e.support import LEAD, NEW, SIZES, Ids, turns, variables
from models import random_lora
from models.random_qwen3 import build

NAMED = [{}, {"lora_path": "one"}, {"lora_path": "two"}] * 2


def ask(server: Aggregated | Pair, prompts: list[Ids]) -> list[Ids]:
    """Return the answers to ``prompts``, two for each adapter, sent at once."""
    requests = [
        Request(prompt, NEW, label=str(number), extra=named)
        for number, (prompt, named) in enumerate(zip(prompts, NAMED, strict=True))
    ]
    return output_ids(server.send(requests))


def test_lead_with_adapters(tmp_path: Path) -> None:
    """Guards against an adapter that is not loaded when a chunk runs, and against KV of another
    one. Adapters take turns, because a batch has at most two of the three, the model without one
    included. All prompts begin with the same text."""
    model = build(tmp_path / "model")
    paths = [
        f"{name}={random_lora.build(tmp_path / name, model, seed)}"
        for seed, name in enumerate(("one", "two"))
    ]
    lora = ("--lora-paths", *paths, "--lora-backend", "torch_native", "--max-loras-per-batch", "2")
    rng, tokens = random.Random(6), token_range(model)
    first = rng.choices(tokens, k=200)
    prompts = [[*first, *rng.choices(tokens, k=9 * number)] for number in range(6)]
    with Aggregated(model, tmp_path, SIZES, env=variables(), extra_args=lora) as server:
        assert len({*map(tuple, ask(server, [first] * 6))}) == 3, "the adapters change nothing"
        answers = ask(server, prompts)
        second = [
            [*prompt, *answer, *rng.choices(tokens, k=30)]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        expected = ask(server, second)
    config = PairConfig(
        model,
        radix=True,
        prefill_sizes=SIZES,
        decode_sizes=SIZES,
        prefill_args=lora,
        decode_args=lora,
        skip_warmup=True,
        env=variables(**LEAD),
    )
    with Pair(config, tmp_path) as pair:
        assert ask(pair, prompts) == answers
        assert ask(pair, second) == expected
        pair.check()
        counts = turns(metrics.page(pair.decode_url))
    assert counts.get(("local", "short"), 0) >= 6, counts

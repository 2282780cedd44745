"""LoRA adapters on a decode server that computes turns itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmark.harness.fleet import Aggregated, Pair
from e2e.support import DOZE, Ids, ask_both, prompt_maker, settle
from e2e.test_local_turns import GREEDY, local_config, turns
from models import random_lora


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16])
def test_adapters(model: Path, logs: Path, page_size: int) -> None:
    """Guards against KV of another adapter, or of none, under a chunk or an answer, and against a
    chunk between two decode steps that replaces the adapter of running requests."""
    tokens = prompt_maker(model, seed=21)
    names: list[str | None] = ["one", "two", None]
    paths = [
        f"{name}={random_lora.build(logs / name, model, seed)}"
        for seed, name in enumerate(filter(None, names))
    ]
    lora = ("--lora-paths", *paths, "--lora-backend", "torch_native", "--max-loras-per-batch", "3")
    config = local_config(model, logs, page_size=page_size, prefill_args=(*DOZE, *lora))
    config = replace(config, decode_args=(*config.decode_args, *lora))
    turns_asked: list[tuple[Ids, str | None, Ids, int]] = []
    with Pair(config, logs) as pair:

        def ask(prompt: Ids, name: str | None) -> Ids:
            adapter = {"lora_path": name} if name else {}
            here = ask_both(pair, prompt, GREEDY, **adapter)[1].json()
            cached = here["meta_info"]["cached_tokens"]
            turns_asked.append((prompt, name, here["output_ids"], cached))
            return [*prompt, *here["output_ids"]]

        history = tokens(300)  # the same for all adapters, and too long for decode
        talks = {name: ask(history, name) for name in names}
        assert [cached for *_, cached in turns_asked] == [0, 0, 0]
        for new in (70, 41):
            talks = {name: ask([*talk, *tokens(new)], name) for name, talk in talks.items()}
        counted = turns(pair)
        assert (counted["remote", "long"], counted["local", "short"]) == (3, 6)
        settle(pair)
    assert all(cached >= 300 - page_size for *_, cached in turns_asked[3:])
    first = [tuple(answer) for _, _, answer, _ in turns_asked[:3]]
    assert len(set(first)) == 3, "the adapters change nothing"
    with Aggregated(model, logs / "stock", extra_args=lora) as stock:
        url = f"{stock.config.url}/generate"
        for prompt, name, answer, _ in turns_asked:
            body: dict[str, Any] = {"input_ids": prompt, "sampling_params": GREEDY}
            body |= {"lora_path": name} if name else {}
            assert requests.post(url, json=body, timeout=60).json()["output_ids"] == answer

"""Servers with a feature group that is not attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import metrics
from benchmark.harness.pair import Pair
from e2e.support import Ids, Reference, pair_config, prompt_maker


def some_prompts(model: Path) -> list[Ids]:
    tokens = prompt_maker(model, seed=5)
    shared = tokens(200)
    return [[*shared, *tokens(10 * i + 1)] for i in range(4)]


def config(model: Path, logs: Path, **changes: Any) -> Any:
    """SGLang's own NIXL leaves entries of rooms behind, which our invariants would not let pass."""
    env = {"SGLANG_DISAGGREGATION_CHECK_INVARIANTS": "0", **changes.pop("env", {})}
    return pair_config(model, logs, page_size=16, env=env, prefill_args=(), **changes)


def two_turns(pair: Pair, reference: Reference, prompts: list[Ids]) -> None:
    answers = reference.answers(prompts, 8)
    for _ in range(2):
        assert pair.generate(prompts, 8) == answers
    pair.check()


@pytest.mark.nightly
def test_a_prefill_server_with_its_group_off(model: Path, reference: Reference, logs: Path) -> None:
    """It moves whole prompts, so it must not say that it takes a prefix: it would write a prompt's
    start into the pages of its tail. In every run ``component/nixl/test_negotiation.py`` asks it,
    and ``test_interop.py`` has a prefill server that is stock as a whole."""
    off = {"SGLANG_PATCHSET_DISABLE": "nixl_async"}
    with Pair(config(model, logs, prefill_env=off), logs) as pair:
        two_turns(pair, reference, some_prompts(model))
        counters = pair.metrics()[1]
        assert counters[metrics.PROMPT_TOKENS] > 0 and counters[metrics.HIT_TOKENS] == 0
        assert "does not support decode_prefix_len" in pair.processes["decode"].log_text()

"""Warm-up and health requests leave nothing behind, and namespaces keep requests apart."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from benchmark.harness import metrics
from benchmark.harness.client import Request
from benchmark.harness.pair import Pair
from e2e.support import Reference, pair_config, prompt_maker, settle


@pytest.mark.hazard("bad-kv-in-tree", "tenants-share")
def test_warmup_health_and_other_namespaces_never_hit(
    model: Path, reference: Reference, logs: Path
) -> None:
    """Warm-up sends the ids 10 to 13 and health the id 0, with no KV behind them; at page size 1 a
    prompt that starts like them would be answered from garbage. And equal tokens under another
    ``extra_key`` (tenant, adapter, salt) must not meet."""
    tokens = prompt_maker(model, seed=4)
    with Pair(pair_config(model, logs, page_size=1), logs) as pair:
        for url in (pair.prefill_url, pair.decode_url):
            urllib.request.urlopen(f"{url}/health_generate", timeout=60).read()
        settle(pair)
        colliding = [[10, 11, 12, 13, *tokens(30)], [0, *tokens(30)]]
        assert pair.generate(colliding, 8) == reference.answers(colliding, 8)
        settle(pair)
        assert pair.metrics()[1][metrics.HIT_TOKENS] == 0

        prompt = tokens(200)
        salted = [Request(prompt, 8, extra={"extra_key": key}) for key in ("a", "b", "a")]
        for request in salted:
            assert pair.send([request])[0].output_ids == reference.answers([prompt], 8)[0]
        settle(pair)
        assert pair.metrics()[1][metrics.HIT_TOKENS] == len(prompt)

"""Greedy output with the decode radix cache is the aggregated server's, token by token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmark.harness.metrics import HIT_TOKENS
from benchmark.harness.pair import Pair
from benchmark.harness.workload import kv_bytes_per_token
from e2e.support import EventLogs, Ids, Reference, assert_tiled, pair_config, prompt_maker, settle


@pytest.mark.parametrize("page_size", [1, 16])
def test_conversations_and_shared_prefixes_on_a_pool_that_evicts(
    model: Path, reference: Reference, logs: Path, page_size: int
) -> None:
    """Wrong slots, stale tree content, a prefix cut at the wrong token, or pages evicted while in
    use would change what is generated. Chunks of prefill are smaller than the prefixes, and the
    decode pool holds a fraction of the conversations, so that it evicts all the time."""
    tokens = prompt_maker(model, seed=page_size)
    config = pair_config(model, logs, page_size=page_size, decode_tokens=4096)
    page_bytes = page_size * kv_bytes_per_token(model)
    events = EventLogs(logs)
    with Pair(config, logs) as pair:
        # 8 conversations of 5 turns.
        prompts: list[Ids] = [tokens(200 + 37 * i) for i in range(8)]
        for _ in range(5):
            expected = reference.answers(prompts, 24)
            assert pair.generate(prompts, 24) == expected
            prompts = [
                [*prompt, *answer, *tokens(19)]
                for prompt, answer in zip(prompts, expected, strict=True)
            ]
        # 16 at once over two prefixes longer than a chunk, some of them whole-prefix prompts.
        prefixes = [tokens(600), tokens(640)]
        burst = [[*prefixes[i % 2], *tokens(3 + 5 * i)] for i in range(14)] + prefixes
        assert pair.generate(burst, 32) == reference.answers(burst, 32)
        # The same again: now the prefixes are in the tree, and full hits move no KV.
        assert pair.generate(prefixes, 32) == reference.answers(prefixes, 32)
        settle(pair)
        assert_tiled(*events.read(), page_bytes)
        assert pair.metrics()[1][HIT_TOKENS] > 0


@pytest.mark.hazard("retraction-of-shared-pages")
def test_retracted_requests_resume_from_the_tree_and_their_copies(
    model: Path, reference: Reference, logs: Path
) -> None:
    """A retracted request's private KV comes back from its CPU copy and its shared prefix from the
    tree; copying the prefix back would overwrite pages that other requests read, and a wrong split
    would continue from another request's tokens."""
    tokens = prompt_maker(model, seed=5)
    prefixes = [tokens(400), tokens(400)]
    prompts = [[*prefixes[i % 2], *tokens(20 + i)] for i in range(12)]
    config = pair_config(
        model,
        logs,
        page_size=16,
        decode_tokens=2400,
        # Little is reserved, so that running requests outgrow the pool.
        decode_args=("--num-reserved-decode-tokens", "16"),
        decode_env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"},
    )
    with Pair(config, logs) as pair:
        assert pair.generate(prompts, 96) == reference.answers(prompts, 96)
        retracted = re.findall(r"#retracted_reqs: (\d+)", pair.processes["decode"].log_text())
        assert sum(map(int, retracted)) > 0
        settle(pair)

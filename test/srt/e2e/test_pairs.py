"""Pairs whose servers have other sizes or transports than that of ``test_one_pair.py``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmark.harness import metrics, workload
from benchmark.harness.pair import Pair
from e2e.support import Reference, pair_config, prompt_maker, settle


@pytest.mark.nightly
def test_burst_with_shared_prefixes_over_tcp(model: Path, reference: Reference, logs: Path) -> None:
    """48 requests at once over 4 new prefixes: each prefix may cross the wire once, although none
    of the requests hits while the first of its group is still in transfer."""
    load = workload.SharedPrefixes(48, 4, 1500, 130, 4, seed=3)
    prompts = [list(request.prompt) for request in load.sent(workload.token_range(model))]
    config = pair_config(
        model,
        logs,
        decode_tokens=32_000,
        chunked_prefill_tokens=1024,
        env={"UCX_TLS": "tcp,self"},
    )
    with Pair(config, logs) as pair:
        assert pair.generate(prompts, 4) == reference.answers(prompts, 4)
        settle(pair)
        moved = pair.metrics()[0][metrics.SENT_BYTES]
    unsent_tokens = 4 * 1500 + 48 * 130
    assert moved <= 1.03 * unsent_tokens * workload.kv_bytes_per_token(model)


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

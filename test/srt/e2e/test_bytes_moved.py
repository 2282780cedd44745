"""What crosses from prefill to decode: exactly the pages that decode lacks, page by page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness import metrics, workload
from benchmark.harness.client import Request
from benchmark.harness.pair import Pair
from e2e.support import EventLogs, Reference, assert_tiled, pair_config, prompt_maker, settle


@pytest.mark.hazard("cached-tokens-twice")
def test_second_turn_moves_only_new_pages(model: Path, reference: Reference, logs: Path) -> None:
    """Turn two must reuse turn one's prompt *and* answer: only pages that neither filled may be
    sent, the client must still see prefill's own cached tokens, and a full hit sends none."""
    page = 16
    page_bytes = page * workload.kv_bytes_per_token(model)
    tokens = prompt_maker(model, seed=2)
    first = tokens(333)
    events = EventLogs(logs)
    with Pair(pair_config(model, logs, page_size=page), logs) as pair:
        answer = pair.generate([first], 40)[0]
        settle(pair)
        (admitted,), sent = events.read()
        assert (admitted.prefix_tokens, len(admitted.pages)) == (0, -(-len(first) // page))
        assert_tiled([admitted], sent, page_bytes)

        # The last generated token has no KV: its page was never complete.
        kept = (len(first) + len(answer) - 1) // page * page
        second = [*first, *answer, *tokens(50)]
        before = pair.metrics()
        result = pair.send([Request(second, 8)])[0]
        settle(pair)
        (admitted,), sent = events.read()
        assert admitted.prefix_tokens == kept
        assert len(admitted.pages) == -(-len(second) // page) - kept // page
        assert_tiled([admitted], sent, page_bytes)
        assert result.output_ids == reference.answers([second], 8)[0]

        gained = [metrics.gained(b, a) for b, a in zip(before, pair.metrics(), strict=True)]
        assert gained[0][metrics.SENT_BYTES] == len(admitted.pages) * page_bytes
        assert gained[1][metrics.REQUESTED_BYTES] == len(admitted.pages) * page_bytes
        assert gained[0][metrics.SKIPPED_TOKENS] == gained[1][metrics.HIT_TOKENS] == kept
        # Prefill's cache holds turn one's prompt, not its answer: that is what clients are told.
        assert result.cached_tokens == len(first) // page * page

        whole = second[: len(second) // page * page]
        assert pair.generate([whole], 8) == reference.answers([whole], 8)
        settle(pair)
        (admitted,), sent = events.read()
        assert (admitted.prefix_tokens, admitted.pages, sent) == (len(whole), [], [])


def test_burst_with_shared_prefixes_over_tcp(model: Path, reference: Reference, logs: Path) -> None:
    """48 requests at once over 4 new prefixes: each prefix may cross the wire once, although none
    of the requests hits while the first of its group is still in transfer."""
    prompts = [
        list(prompt.ids)
        for prompt in workload.shared_prefix(
            workload.token_range(model),
            groups=4,
            requests=48,
            prefix_tokens=1500,
            suffix_tokens=130,
            seed=3,
        )
    ]
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

"""The decode radix cache over Mooncake: answers, bytes that move, and a client that goes away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmark.harness import metrics
from benchmark.harness.client import Request
from benchmark.harness.pair import Pair
from benchmark.harness.workload import kv_bytes_per_token
from e2e.support import (
    EventLogs,
    Reference,
    assert_tiled,
    pair_config,
    prompt_maker,
    send_and_leave,
    settle,
)

pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.nightly), 16])
def test_turns_and_a_client_that_leaves(
    model: Path, reference: Reference, logs: Path, page: int
) -> None:
    """Guards against wrong slots, a prefix cut at the wrong token and stale metadata, all of which
    change what is generated; against pages sent again that decode holds; and against a client that
    leaves in the middle whose pages leak or are written to when others own them. Chunks of prefill
    are smaller than the prompts."""
    tokens = prompt_maker(model, seed=40 + page)
    page_bytes = page * kv_bytes_per_token(model)
    events = EventLogs(logs)
    config = pair_config(model, logs, backend="mooncake", page_size=page, env={"MC_FORCE_TCP": "1"})
    with Pair(config, logs) as pair:
        prefix = tokens(600)
        first = [tokens(333), [*prefix, *tokens(17)], [*prefix, *tokens(40)]]
        answers = pair.generate(first, 16)
        assert answers == reference.answers(first, 16)
        settle(pair)
        assert_tiled(*events.read(), page_bytes)

        second = [*first[0], *answers[0], *tokens(50)]
        before = pair.metrics()
        assert pair.generate([second], 8) == reference.answers([second], 8)
        settle(pair)
        (admitted,), sent = events.read()
        kept = admitted.prefix_tokens
        # The last generated token has KV if the overlapped next step had begun.
        held = len(first[0]) + len(answers[0])
        assert kept in {(held - 1) // page * page, held // page * page}
        assert len(admitted.pages) == -(-len(second) // page) - kept // page
        assert_tiled([admitted], sent, page_bytes)
        gained = [metrics.gained(b, a) for b, a in zip(before, pair.metrics(), strict=True)]
        assert gained[0][metrics.SENT_BYTES] == len(admitted.pages) * page_bytes
        assert gained[0][metrics.SKIPPED_TOKENS] == gained[1][metrics.HIT_TOKENS] == kept

        # A full hit moves no KV; beside it, a client that leaves while its prompt is moved.
        whole = second[: len(second) // page * page]
        leaves = Request([*prefix, *tokens(3000)], 400)
        stayed, gone = asyncio.run(
            send_and_leave(pair.target, [Request(whole, 8), leaves], [None, 0.6])
        )
        assert stayed is not None and stayed.output_ids == reference.answers([whole], 8)[0]
        assert gone is None
        settle(pair)
        admissions, sent = events.read()
        hit = next(a for a in admissions if a.prompt_tokens == len(whole))
        assert (hit.prefix_tokens, hit.pages) == (len(whole), [])
        assert not [event for event in sent if event.room == hit.room]
        # Nothing of the one that left is in the way.
        again = [[*prefix, *tokens(9)], first[1]]
        assert pair.generate(again, 8) == reference.answers(again, 8)
        settle(pair)

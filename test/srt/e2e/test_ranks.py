"""Several ranks in a server: tensor parallelism of equal and unequal sizes, and data parallelism.

KV of one conversation is spread over several ranks, each with a part of the heads. A rank that
matches another prefix than the others, or misplaced heads, change the answers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import metrics
from benchmark.harness.fleet import Pair
from benchmark.harness.models import kv_bytes_per_token
from e2e.support import (
    EventLogs,
    Reference,
    assert_tiled,
    dp_attention,
    pair_config,
    prompt_maker,
    prompts_that_share,
    settle,
    take_turns,
)

KV_HEADS = 2
"""KV heads of the session's model."""
ATTACHED = "decode radix cache is on"


def converse(
    model: Path,
    kv_heads: int,
    reference: Reference,
    logs: Path,
    page: int,
    *,
    ranks_a_room: int,
    **changes: Any,
) -> None:
    """Run two turns of conversations that share prefixes; check the answers and the event logs.

    The second turn finds the first one's prompts and answers on every decode rank, a last request
    is a full hit, and prefill's chunks are shorter than the prompts. ``ranks_a_room``: number of
    decode ranks over which the heads of one request are spread.
    """
    config = pair_config(model, logs, page_size=page, skip_warmup=True, **changes)
    tokens = prompt_maker(model, seed=page)
    prompts = prompts_that_share(tokens)
    with Pair(config, logs) as pair:
        more = partial(tokens, 21)
        prompts = take_turns(pair, reference, prompts, turns=2, new_tokens=10, more=more)
        whole = prompts[0][: len(prompts[0]) // 16 * 16 - 32]
        assert pair.generate([whole], 4) == reference.answers([whole], 4)
        settle(pair)
        assert pair.metrics()[1][metrics.HIT_TOKENS] > 0
    heads_on_a_rank = max(1, kv_heads // ranks_a_room)
    rank_page_bytes = page * kv_bytes_per_token(model) // kv_heads * heads_on_a_rank
    assert_tiled(*EventLogs(logs).read(), rank_page_bytes, ranks_a_room)


@pytest.mark.hazard("ranks-disagree-on-prefix")
def test_two_ranks_on_both_sides(model: Path, reference: Reference, logs: Path) -> None:
    """Guards against ranks that match, admit or release differently, which would hang or mix KV."""
    converse(model, KV_HEADS, reference, logs, 16, ranks_a_room=2, prefill_tp=2, decode_tp=2)


@pytest.mark.hazard("unequal-tensor-parallelism")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("page", "ranks"),
    [
        # A room that is complete after the first of two writers; heads that overwrite the other's.
        pytest.param(16, {"prefill_tp": 2}, id="two-to-one"),
        # The same heads for both decode ranks; a room that only one of them announces.
        pytest.param(1, {"decode_tp": 2}, id="one-to-two"),
    ],
)
def test_unequal_ranks(
    model: Path, reference: Reference, logs: Path, page: int, ranks: dict[str, int]
) -> None:
    """Guards against misplaced heads; in every run ``component/pools/test_ranks.py``."""
    decode_ranks = ranks.get("decode_tp", 1)
    converse(model, KV_HEADS, reference, logs, page, ranks_a_room=decode_ranks, **ranks)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("page", "ranks"),
    [
        # Stock NIXL divides by zero; the second replica must neither write again nor be awaited.
        pytest.param(1, {"prefill_tp": 2}, id="two-to-one"),
        # A decode rank must get KV although another rank has the same head.
        pytest.param(16, {"decode_tp": 2}, id="one-to-two"),
    ],
)
def test_a_replicated_head(
    one_head: Path,
    one_head_reference: Reference,
    logs: Path,
    page: int,
    ranks: dict[str, int],
) -> None:
    """Guards against faults with fewer KV heads than ranks; in every run
    ``component/pools/test_ranks.py``."""
    decode_ranks = ranks.get("decode_tp", 1)
    converse(one_head, 1, one_head_reference, logs, page, ranks_a_room=decode_ranks, **ranks)


def test_attention_data_parallel_decode(model: Path, reference: Reference, logs: Path) -> None:
    """Guards against a hang or wrong KV with decode ranks that hold whole requests and their own
    trees but step together: an idle rank must take part without a prefix."""
    args = dp_attention()
    converse(model, KV_HEADS, reference, logs, 16, ranks_a_room=1, decode_tp=2, decode_args=args)


@pytest.mark.nightly
def test_two_data_parallel_decode_ranks(model: Path, reference: Reference, logs: Path) -> None:
    """Guards against schedulers without the tree: the DP controller spawns them itself. A request
    must be answered right by every rank. In every run ``component/patchset/test_processes.py``
    checks that such schedulers are attached."""
    tokens = prompt_maker(model, seed=7)
    shared = tokens(120)
    prompts = [[*shared, *tokens(5 + i)] for i in range(8)]
    config = pair_config(
        model,
        logs,
        page_size=16,
        decode_args=("--dp-size", "2"),
    )
    with Pair(config, logs) as pair:
        for _ in range(2):
            assert pair.generate(prompts, 12) == reference.answers(prompts, 12)
        settle(pair)
        assert pair.processes["decode"].log_text().count(ATTACHED) == 2
        assert pair.metrics()[1][metrics.HIT_TOKENS] > 0


@pytest.mark.nightly
def test_two_data_parallel_prefill_ranks_in_turns(
    model: Path, reference: Reference, logs: Path
) -> None:
    """Guards against requests that decode announces to another rank than prefill's: half of them
    failed by their deadlines. In every run ``component/prefill/test_served_rooms.py`` checks
    prefill's answer to decode."""
    prompts = [prompt_maker(model, seed=8)(30 + i) for i in range(8)]
    config = pair_config(
        model,
        logs,
        page_size=16,
        prefill_args=("--dp-size", "2", "--load-balance-method", "round_robin"),
    )
    with Pair(config, logs) as pair:
        assert pair.generate(prompts, 12) == reference.answers(prompts, 12)
        settle(pair)
        log = pair.processes["prefill"].log_text()
        assert all(f"DP{rank}] Prefill batch" in log for rank in (0, 1))

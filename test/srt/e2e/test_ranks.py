"""Several ranks a server: tensor parallel, of equal and of unequal sizes, and data parallel.

KV of one conversation lies on several ranks, each with its part of the heads. A rank that matches
another prefix than its siblings, or heads that land beside their place, change what is generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import metrics
from benchmark.harness.pair import Aggregated, Pair
from benchmark.harness.ports import allocate_adjacent_ports
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import kv_bytes_per_token
from e2e.support import (
    START_METHOD,
    RankLogs,
    Reference,
    assert_tiled_by_rank,
    pair_config,
    prompt_maker,
    settle,
    take_turns,
)
from models.random_qwen3 import build

KV_HEADS = 2
"""Of the session's model."""


@pytest.fixture(scope="module")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one KV head, of which each of two ranks holds a replica."""
    return build(tmp_path_factory.mktemp("model") / "one_head", seed=1, kv_heads=1, layers=2)


@pytest.fixture(scope="module")
def one_head_reference(
    one_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """Its aggregated server."""
    server = Aggregated(
        one_head,
        tmp_path_factory.mktemp("one_head"),
        Sizes(pool_tokens=20_000, chunked_prefill_tokens=2048),
        extra_args=("--sleep-on-idle",),
        env={START_METHOD: "fork"},
    )
    with server:
        yield Reference(server)


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
    """Two turns of conversations that share prefixes, compared with the reference; then the logs.

    The second turn finds the first one's prompts and answers on every decode rank, a last request
    is all hit, and prefill computes in chunks that are shorter than the prompts. ``ranks_a_room``:
    decode ranks over which the heads of one request are spread.
    """
    config = pair_config(model, logs, page_size=page, skip_warmup=True, **changes)
    tokens = prompt_maker(model, seed=page)
    shared = tokens(150)
    prompts = [[*shared, *tokens(60 + 61 * i)] for i in range(3)] + [tokens(300)]
    with Pair(config, logs) as pair:
        more = partial(tokens, 21)
        prompts = take_turns(pair, reference, prompts, turns=2, new_tokens=10, more=more)
        whole = prompts[0][: len(prompts[0]) // 16 * 16 - 32]
        assert pair.generate([whole], 4) == reference.answers([whole], 4)
        settle(pair)
        assert pair.metrics()[1][metrics.HIT_TOKENS] > 0
    heads_on_a_rank = max(1, kv_heads // ranks_a_room)
    rank_page_bytes = page * kv_bytes_per_token(model) // kv_heads * heads_on_a_rank
    assert_tiled_by_rank(RankLogs.read(logs), ranks_a_room, rank_page_bytes)


@pytest.mark.hazard("ranks-disagree-on-prefix")
def test_two_ranks_on_both_sides(model: Path, reference: Reference, logs: Path) -> None:
    """Guards against ranks that match, admit or release differently, which would hang or mix KV."""
    converse(model, KV_HEADS, reference, logs, 16, ranks_a_room=2, prefill_tp=2, decode_tp=2)


@pytest.mark.hazard("unequal-tensor-parallelism")
@pytest.mark.nightly
def test_two_prefill_ranks_and_one_decode_rank(
    model: Path, reference: Reference, logs: Path
) -> None:
    """Guards against a room that is complete when the first of two writers is, and against heads
    of one writer over those of the other; as ``component/pools/test_ranks.py`` in every run."""
    converse(model, KV_HEADS, reference, logs, 16, ranks_a_room=1, prefill_tp=2)


@pytest.mark.nightly
def test_one_prefill_rank_and_two_decode_ranks(
    model: Path, reference: Reference, logs: Path
) -> None:
    """Guards against the same heads sent to both decode ranks, and against a room that one of them
    announces and prefill serves alone."""
    converse(model, KV_HEADS, reference, logs, 1, ranks_a_room=2, decode_tp=2)


@pytest.mark.nightly
def test_two_prefill_ranks_with_a_replicated_head(
    one_head: Path, one_head_reference: Reference, logs: Path
) -> None:
    """Guards against fewer KV heads than ranks, as ``component/pools/test_ranks.py`` in every run:
    stock NIXL divides by zero, and the second replica must not write the same bytes again, nor be
    missed."""
    converse(one_head, 1, one_head_reference, logs, 1, ranks_a_room=1, prefill_tp=2)


@pytest.mark.nightly
def test_two_decode_ranks_with_a_replicated_head(
    one_head: Path, one_head_reference: Reference, logs: Path
) -> None:
    """Guards against a decode rank that gets no KV because another one has the same head."""
    converse(one_head, 1, one_head_reference, logs, 16, ranks_a_room=2, decode_tp=2)


def test_attention_data_parallel_decode(model: Path, reference: Reference, logs: Path) -> None:
    """Guards against decode ranks that each hold whole requests, with trees of their own, but step
    together: an idle one must take part without a prefix of its own."""
    # From its own port on it would take others that a server beside it may have: the six from
    # this one on, and the 13th after it (PortArgs.init_new, DP_ATTENTION_HANDSHAKE_PORT_DELTA).
    first_port = allocate_adjacent_ports(14)[0]
    converse(
        model,
        KV_HEADS,
        reference,
        logs,
        16,
        ranks_a_room=1,
        decode_tp=2,
        decode_args=(
            *("--dp-size", "2", "--enable-dp-attention"),
            *("--dist-init-addr", f"127.0.0.1:{first_port}"),
        ),
    )

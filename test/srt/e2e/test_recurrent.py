"""Models with recurrent state on a pair: a prefix from decode's tree, but the state always from
prefill; compared with SGLang's aggregated server. ``families.py`` has more rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import metrics
from benchmark.harness.fleet import Pair
from e2e.families import Run
from e2e.support import (
    DOZE,
    EventLogs,
    Reference,
    ask_decode,
    assert_tiled,
    pair_config,
    prompt_maker,
    reference_server,
    settle,
    take_turns,
)
from e2e.test_families import SERVER_ARGS, SERVER_ENV, page_bytes
from models import families

FAMILY = "qwen3_next"
REQUESTED_BYTES = "sglang:kv_transfer_requested_bytes_total"
STATES = SERVER_ARGS[FAMILY]
EXACT = SERVER_ENV[FAMILY]
#: SGLang's tree with states has pages of one token; on a GPU --mamba-scheduler-strategy
#: extra_buffer has others.
NO_TREE = ("--disable-radix-cache",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.build(tmp_path_factory.mktemp(FAMILY) / FAMILY, FAMILY)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Stock SGLang's aggregated server of such a model."""
    logs = tmp_path_factory.mktemp("reference")
    with reference_server(model, logs, 20_000, args=STATES, env=EXACT) as server:
        yield server


def state_bytes(model: Path) -> int:
    """Return the bytes of the state of a request."""
    config = json.loads((model / "config.json").read_text())
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    window = (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1)
    matrices = values * config["linear_key_head_dim"]
    layers = config["layer_types"].count("linear_attention")
    return int(4 * layers * (window + matrices))


@pytest.mark.nightly
@pytest.mark.hazard("full-hit-without-state")
@pytest.mark.parametrize(
    ("page", "changes"),
    [
        pytest.param(16, {"prefill_args": NO_TREE, "backend": "mooncake"}, id="mooncake-page16"),
        pytest.param(1, {"decode_tokens": 900}, id="small-pool"),
        pytest.param(1, {"decode_args": ("--max-mamba-cache-size", "2")}, id="two-state-slots"),
    ],
)
def test_answers(
    model: Path, reference: Reference, logs: Path, page: int, changes: dict[str, Any]
) -> None:
    """Guards against a state that is missing, another text's, that of a prefix, or a step behind or
    ahead of the KV: behind a prefix, in chunks of prefill, for a prompt that is a full hit, and
    after a retraction. Both servers count the bytes of the KV and the states."""
    if changes.get("backend") == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    arguments = {
        "env": {"MC_FORCE_TCP": "1", **EXACT},
        **changes,
        **{
            role: (*DOZE, *STATES, *changes.get(role, ()))
            for role in ("prefill_args", "decode_args")
        },
    }
    config = pair_config(model, logs, page_size=page, skip_warmup=True, **arguments)
    tokens = prompt_maker(model, seed=3)
    shared = tokens(150)
    prompts = [[*shared, *tokens(60 + 61 * i)] for i in range(3)] + [tokens(300)]
    with Pair(config, logs) as pair:
        more = partial(tokens, 21)
        prompts = take_turns(pair, reference, prompts, turns=3, new_tokens=10, more=more)
        held = len(prompts[0]) - 21 - 1
        whole = prompts[0][: held // page * page]
        assert pair.generate([whole], 4) == reference.answers([whole], 4)
        settle(pair)
        prefill, decode = pair.metrics()
    admitted, sent = EventLogs(logs).read()
    bytes_of_page = page_bytes(Run(FAMILY, page), model)
    assert_tiled(admitted, sent, bytes_of_page)
    rooms = [event for event in admitted if event.room]
    if "decode_tokens" not in changes:  # otherwise the prefix was evicted
        assert not rooms[-1].pages and len(rooms[-1].state) == 1
    assert decode[metrics.HIT_TOKENS] > 0
    moved = sum(len(event.pages) for event in rooms) * bytes_of_page
    moved += len(rooms) * state_bytes(model)
    assert prefill[metrics.SENT_BYTES] == decode[REQUESTED_BYTES] == moved


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_ranks_of_unequal_number(model: Path, logs: Path, backend: str) -> None:
    """Guards against a request that waits for its deadline, or uses misplaced slices of states: it
    must fail with both numbers of ranks in its error."""
    if backend == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    config = pair_config(
        model,
        logs,
        backend=backend,
        skip_warmup=True,
        decode_tp=2,
        env={"MC_FORCE_TCP": "1", **EXACT},
        prefill_args=(*DOZE, *STATES),
        decode_args=(*DOZE, *STATES),
    )
    with Pair(config, logs) as pair:
        (result,) = asyncio.run(ask_decode(pair, [[20] * 30], 4))
        assert "sizes, not (1, 1) on prefill and (2, 1) on decode" in str(result.error)
        settle(pair)

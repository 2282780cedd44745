"""A decode server with a draft model and the radix cache: the same answers, and equally good
drafts.

The draft model is the target itself (``models/untied.py``, ``models/random_qwen3.py``): the first
has nearly all drafts accepted, the second nearly none, so that wrong KV of the target changes the
text. Wrong draft KV changes no answer, only the number of accepted drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.fleet import Pair, PairConfig
from benchmark.harness.metrics import HIT_TOKENS
from e2e import drafts
from e2e.drafts import ACCEPT_LENGTH, drafting
from e2e.support import (
    RETRACTS,
    Reference,
    pair_config,
    prompt_maker,
    reference_server,
    settle,
    take_turns,
)
from e2e.test_local_turns import local_config, turns
from models import heads, untied

POOL = 30_000
#: SGLang's spec v2 overlaps a step with the result of the one before; v1 is its default.
V2 = {"SGLANG_ENABLE_SPEC_V2": "1"}
VERSIONS = [pytest.param({}, id="v1"), pytest.param(V2, id="v2")]
Config = Callable[..., PairConfig]


def with_drafts(
    config: PairConfig, draft: Path, steps: int, algorithm: str = "EAGLE"
) -> PairConfig:
    """Return ``config`` with a draft model on both servers."""
    args = drafting(draft, steps, algorithm)
    return dataclasses.replace(
        config,
        prefill_args=(*config.prefill_args, *args),
        decode_args=(*config.decode_args, *args),
    )


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_arith`` as a model that can be its own draft."""
    return untied.build(tmp_path_factory.mktemp("untied") / "untied")


def nightly(name: str, steps: int, **changes: Any) -> Any:
    return pytest.param(steps, changes, id=name, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        pytest.param(3, {"page_size": 16}, id="v1"),
        nightly("v1-page-1", 1, page_size=1),
        nightly("v2", 3, page_size=16, env=V2),
        nightly("v2-page-1", 1, page_size=1, env=V2),
        nightly("v2-mooncake", 3, page_size=16, env=V2, backend="mooncake"),
        nightly("v2-decode", 3, page_size=16, decode_env=V2),
        nightly("v2-prefill", 3, page_size=16, prefill_env=V2),
        nightly("v2-ranks", 3, page_size=16, env=V2, prefill_tp=2, decode_tp=2),
    ],
)
def test_conversations_on_a_pool_that_evicts(
    model: Path, reference: Reference, logs: Path, steps: int, changes: dict[str, Any]
) -> None:
    """Guards against the faults of ``test_one_pair.py`` with a draft model on both servers:
    prefixes longer than a chunk of prefill, a pool that evicts, and frequent retractions. With spec
    v2: metadata that one version sends in another form, or ranks that step at different times."""
    tokens = prompt_maker(model, seed=steps)
    decode_env = {**RETRACTS, **changes.get("decode_env", {})}
    config = pair_config(model, logs, decode_tokens=4096, **{**changes, "decode_env": decode_env})
    with Pair(with_drafts(config, model, steps), logs) as pair:
        prompts = [tokens(200 + 37 * i) for i in range(8)]
        take_turns(pair, reference, prompts, 5, 24, lambda: tokens(19))
        settle(pair)
        assert pair.metrics()[1][HIT_TOKENS] > 0
        assert "#retracted_reqs: " in pair.processes["decode"].log_text()


@pytest.mark.nightly
@pytest.mark.parametrize("env", VERSIONS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_turns_that_decode_computes(
    model: Path, reference: Reference, logs: Path, page_size: int, env: dict[str, str]
) -> None:
    """Guards against a chunk without the draft model, lengths that are one off behind a shared
    prefix, and a first step that drafts from nothing: on a pool that evicts, with frequent
    retractions."""
    tokens = prompt_maker(model, seed=29)
    sizes: dict[str, Any] = {"page_size": page_size, "decode_tokens": 4096}
    config = local_config(model, logs, env=env, decode_env=RETRACTS, **sizes)
    with Pair(with_drafts(config, model, 3), logs) as pair:
        prompts = [tokens(270 + 37 * i) for i in range(6)]
        take_turns(pair, reference, prompts, 4, 24, lambda: tokens(61))
        settle(pair)
        counted = turns(pair)
        assert counted["remote", "long"] >= 6 and counted["local", "short"] >= 10
        assert "#retracted_reqs: " in pair.processes["decode"].log_text()


def rates(config: Config, arithmetic: Path, logs: Path, **changes: Any) -> drafts.Rates:
    """Return the shares of accepted one-step drafts: for later turns, for their prompts once more,
    and for the same prompts without hits. ``config`` makes the pair."""
    pair_of_model = config(arithmetic, logs, page_size=16, decode_tokens=POOL, **changes)
    with Pair(with_drafts(pair_of_model, arithmetic, 1), logs) as pair:
        measured = drafts.rates(pair, arithmetic)
        settle(pair)
    print(measured)
    return measured


@pytest.mark.nightly
@pytest.mark.parametrize("env", VERSIONS)
@pytest.mark.parametrize("config", [pair_config, local_config])
def test_drafts_on_hits_are_as_good_as_on_misses(
    arithmetic: Path, logs: Path, config: Config, env: dict[str, str]
) -> None:
    """Guards against draft KV that is missing, another text's, or shifted by a token, behind a
    prefix hit or in a chunk that decode computes: drafts would be rejected, with equal answers."""
    measured = rates(config, arithmetic, logs, env=env)
    assert measured.misses > 0.9
    assert min(measured.turns, measured.again) >= 0.98 * measured.misses


@pytest.mark.nightly
def test_lost_draft_kv_shows(arithmetic: Path, logs: Path) -> None:
    """The control: with the draft KV of every shared prefix zeroed, the answers are the same, and
    the accept rate of prompts from the tree falls clearly below that of misses."""
    measured = rates(pair_config, arithmetic, logs, decode_env=drafts.zeroing())
    assert measured.again < 0.9 * measured.misses


@pytest.mark.nightly
def test_retractions_keep_the_drafts(arithmetic: Path, logs: Path) -> None:
    """Guards against draft KV that is not restored with its request. Every seventh step retracts
    some requests, which costs each the drafts of one step (it starts from its prompt's end)."""
    measured = rates(pair_config, arithmetic, logs, decode_env=RETRACTS)
    assert min(dataclasses.astuple(measured)) > 0.9


@pytest.mark.nightly
@pytest.mark.parametrize("env", VERSIONS)
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN"])
def test_heads_of_one_layer(model: Path, logs: Path, algorithm: str, env: dict[str, str]) -> None:
    """Guards against draft KV that is taken for the target's: an EAGLE3 head and an MTP head have
    fewer buffers than the target. Turns hit the ones before."""
    if algorithm == "EAGLE3":
        target, head = model, heads.eagle3(logs / "eagle3", model)
    else:
        target = head = heads.mtp(logs / "mtp")
    tokens = prompt_maker(target, seed=17)
    config = with_drafts(pair_config(target, logs, page_size=16, env=env), head, 3, algorithm)
    with reference_server(target, logs / "plain", POOL) as plain, Pair(config, logs) as pair:
        prompts = [tokens(120 + 37 * i) for i in range(5)]
        take_turns(pair, plain, prompts, 3, 24, lambda: tokens(19))
        settle(pair)
        metrics = pair.metrics()[1]
        assert metrics[HIT_TOKENS] > 0
        print(algorithm, {name: metrics.get(name) for name in (HIT_TOKENS, ACCEPT_LENGTH)})


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_prefill_without_a_draft_model(
    model: Path, reference: Reference, logs: Path, backend: str
) -> None:
    """Guards against values in the draft's buffers, and metadata of other lengths that fail every
    room. A draft model on decode alone only costs drafts behind the prompt, and decode logs it."""
    tokens = prompt_maker(model, seed=11)
    config = pair_config(model, logs, page_size=16, backend=backend)
    config = dataclasses.replace(config, decode_args=(*config.decode_args, *drafting(model, 3)))
    with Pair(config, logs) as pair:
        prompts = [tokens(120 + 37 * i) for i in range(5)]
        take_turns(pair, reference, prompts, 2, 24, lambda: tokens(19))
        settle(pair)
        assert pair.metrics()[1][HIT_TOKENS] > 0
        log = pair.processes["decode"].log_text()
        assert log.count("prompts arrive without draft KV") == 1

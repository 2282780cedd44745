"""The families of models that fleets serve: answers of a pair equal those of SGLang's aggregated
server.

Each row of ``families.RUNS`` is a test. A family's additions to KV (an index, a latent instead of
heads, windows, states, experts that tip over at a wrong value) are in other buffers or are sent in
another form than a dense model's KV, and show in the answers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import metrics
from benchmark.harness.fleet import Pair, PairConfig
from e2e.drafts import drafting
from e2e.families import NEW_TOKENS, RUNS, Run
from e2e.support import (
    DOZE,
    RETRACTS,
    EventLogs,
    Ids,
    Reference,
    assert_tiled,
    dp_attention,
    has_retracted,
    pair_config,
    prompt_maker,
    prompts_that_share,
    reference_server,
    settle,
    take_turns,
)
from e2e.test_local_turns import LIMIT, local_config, turns
from models import families

TURNS = 3
SHORT = 21
"""New tokens of a turn that decode computes."""
NEEDS_ITS_PAGE = {"deepseek_v32": 64}
"""Page size of the reference, if not 1: SGLang's index supports only this size."""
RECURRENT = ("qwen3_next", "falcon_h1", "nemotron_h")
SERVER_ARGS: dict[str, tuple[str, ...]] = {
    # SGLang refuses the name ``torch_native``; the stand-in replaces Triton by it. The other runner
    # of experts lays its weights out differently.
    "gpt_oss": ("--attention-backend", "triton", "--moe-runner-backend", "triton"),
    # SGLang's default takes gigabytes.
    **dict.fromkeys(RECURRENT, ("--max-mamba-cache-size", "60")),
}
SERVER_ENV: dict[str, dict[str, str]] = {
    # The default, bfloat16, rounds at the end of each chunk, which changes answers.
    family: {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    for family in RECURRENT
}
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
#: Between unequal numbers of ranks each head of each token is a separate transfer. Mooncake's TCP
#: transport fails the batch if its queue for a peer is full.
OVER_TCP = {"MC_FORCE_TCP": "1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}


def marked(run: Run) -> Any:
    marks = [pytest.mark.nightly] if run.nightly else []
    return pytest.param((run.family, "fp8" in run.setup), run, id=run.id, marks=marks)


def prepare(
    param: tuple[str, bool], factory: pytest.TempPathFactory
) -> tuple[Path, AbstractContextManager[Reference]]:
    """Return the model of a family, and its reference. For ``param`` see ``marked``."""
    family, fp8 = param
    folder = factory.mktemp(family)
    model = families.build(folder / family, family)
    args = (*SERVER_ARGS.get(family, ()), *(FP8 if fp8 else ()))
    env, page = SERVER_ENV.get(family, {}), NEEDS_ITS_PAGE.get(family, 1)
    return model, reference_server(model, folder, 20_000, page, args, env)


@pytest.fixture(scope="module")
def starting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Future[Reference]]]:
    """The model of a family, and its reference, which starts beside the first pair."""
    model, server = prepare(request.param, tmp_path_factory)
    with ExitStack() as running, ThreadPoolExecutor(1) as thread:
        yield model, thread.submit(running.enter_context, server)


def configuration(run: Run, model: Path, logs: Path) -> PairConfig:
    """Return the servers of a row."""
    stock_prefill = "stock_prefill" in run.parts
    args = (*common_args(run), *SERVER_ARGS.get(run.family, ()))
    changes: dict[str, Any] = {
        "page_size": run.page,
        "backend": run.backend,
        "radix": "stock" not in run.parts,
        "skip_warmup": True,
        "stock_prefill": stock_prefill,
        "env": {
            **SERVER_ENV.get(run.family, {}),
            **(OVER_TCP if run.backend == "mooncake" else {}),
        },
        "decode_env": RETRACTS if "retract" in run.parts else {},
        "prefill_args": args if stock_prefill else (*DOZE, *args),
        "decode_args": (*DOZE, *args),
    }
    for role in ("prefill", "decode"):
        if {f"{role}_tp2", f"{role}_dp", "ep"} & {*run.setup}:
            changes[f"{role}_tp"] = 2
        if f"{role}_dp" in run.setup:
            changes[f"{role}_args"] += dp_attention()
    if "nextn" in run.setup:
        for role in ("prefill", "decode"):
            changes[f"{role}_args"] += drafting(model, 3, "NEXTN")
    if "no_prefill_tree" in run.setup:
        changes["prefill_args"] += ("--disable-radix-cache",)
    make = local_config if "local" in run.parts else pair_config
    return make(model, logs, **changes)


def common_args(run: Run) -> tuple[str, ...]:
    """Return the arguments of both servers of a row."""
    arguments_of = {
        "fp8": FP8,
        "no_swa_pool": ("--disable-hybrid-swa-memory",),
        "ep": ("--ep-size", "2"),
    }
    return tuple(itertools.chain.from_iterable(arguments_of.get(setup, ()) for setup in run.setup))


def ranks_a_room(run: Run) -> int:
    """Return the number of decode ranks over which the KV of one request is spread."""
    return 2 if {"decode_tp2", "ep"} & {*run.setup} else 1


def page_bytes(run: Run, model: Path) -> int:
    """Return the bytes of KV of a page on one decode rank, without an index and without states."""
    config = json.loads((model / "config.json").read_text())
    size = 1 if "fp8" in run.setup else 4
    layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    layers -= config.get("layer_types", []).count("linear_attention")
    layers = config.get("hybrid_override_pattern", "").count("*") or layers
    if "kv_lora_rank" in config:  # latents are whole on every rank
        token_bytes = size * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    else:
        heads = config["num_key_value_heads"] // ranks_a_room(run)
        token_bytes = 2 * size * heads * config["head_dim"]
    return int(run.page * layers * token_bytes)


def conversation(model: Path, seed: int) -> tuple[list[Ids], Ids, Callable[[], Ids]]:
    """Return the first prompts, the last of them with a changed token near its start, and a
    function that returns the tokens to add to a turn. The first turns are short enough for decode,
    then every other one."""
    tokens = prompt_maker(model, seed)
    prompts = prompts_that_share(tokens)
    changed = [*prompts[-1]]
    changed[5] = next(token for token in tokens(2) if token != changed[5])
    lengths = itertools.chain([SHORT] * len(prompts), itertools.cycle([SHORT, LIMIT + 30]))
    return prompts, changed, lambda: tokens(next(lengths))


@pytest.mark.parametrize(
    ("starting", "run"), [marked(run) for run in RUNS], indirect=["starting"], scope="module"
)
def test_answers(starting: tuple[Path, Future[Reference]], logs: Path, run: Run) -> None:
    """Guards against KV, an index or a state that is missing, or that belongs to another text or
    layer: behind a prefix from decode's tree, in chunks of prefill, in a chunk that decode
    computes, and for a prompt that is a full hit."""
    model, reference = starting
    if run.backend == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    prompts, changed, more = conversation(model, run.seed)
    new_tokens = NEW_TOKENS.get(run.family, 10)
    with Pair(configuration(run, model, logs), logs) as pair:
        stock = reference.result()
        expected, changed_answer = stock.answers([prompts[-1], changed], new_tokens)
        assert expected != changed_answer, "the model does not show wrong KV"
        prompts = take_turns(pair, stock, prompts, TURNS, new_tokens, more)
        # All tokens except the new ones and the last token of the answer before them.
        held = len(prompts[0]) - SHORT - 1
        whole = prompts[0][: held // run.page * run.page]
        ranks = 2 if "decode_dp" in run.setup else 1
        for _ in range(ranks):  # a copy for each rank, so that the second time all are hits
            assert pair.generate([whole] * ranks, 4) == stock.answers([whole] * ranks, 4)
        settle(pair)
        check_hits(run, pair, whole, logs, page_bytes(run, model))


def check_hits(run: Run, pair: Pair, whole: Ids, logs: Path, page_bytes: int) -> None:
    """Check that the parts of a row were used: prefixes, and turns that decode computed."""
    hits = pair.metrics()[1].get(metrics.HIT_TOKENS, 0)
    admitted, sent = EventLogs(logs).read()
    prefixes = [event.prefix_tokens for event in admitted if event.room]
    if "stock" in run.parts or "stock_prefill" in run.parts:
        assert hits == 0
        return
    assert any(prefixes)
    if "retract" in run.parts:
        assert has_retracted(pair)
    if "local" in run.parts:
        counted = turns(pair)
        at_least = 2 if "decode_dp" in run.setup else 6  # because each rank has its own prompts
        assert counted["remote", "long"] >= 6 and counted["local", "short"] >= at_least, counted
    else:
        assert prefixes[-1] == len(whole)
    assert_tiled(admitted, sent, page_bytes, ranks_a_room(run))

"""Turns that decode computes itself: an aggregated server's tokens, without work for prefill."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmark.harness import metrics
from benchmark.harness.client import Result
from benchmark.harness.fleet import Pair, start
from benchmark.harness.models import kv_bytes_per_token
from benchmark.harness.watchdog import kill_group
from benchmark.kv_transfer.event_log import life
from e2e.support import (
    DOZE,
    Ids,
    Reference,
    ask_both,
    ask_decode,
    assert_right,
    frozen,
    pair_config,
    prompt_maker,
    route,
    settle,
    take_turns,
)
from sglang.srt.patchset.environment import EVENT_LOG

LIMIT = 256
WHEN_LOST = 500
"""Most new tokens of a turn that decode computes itself: always, and when prefill is lost."""
HEARTBEATS = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",  # the minimum that SGLang accepts
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
}


def local_config(model: Path, logs: Path, **changes: Any) -> Any:
    """Return a pair with a decode server that computes every turn within ``LIMIT``, in small
    chunks, and longer ones without prefill."""
    env = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK": "48", **changes.pop("decode_env", {})}
    args = (
        *("--disaggregation-decode-local-tokens", str(LIMIT)),
        *("--disaggregation-decode-fallback-prefill-tokens", str(WHEN_LOST)),
        *changes.pop("decode_args", DOZE),
    )
    return pair_config(model, logs, decode_args=args, decode_env=env, **changes)


Turns = dict[tuple[str, ...], float]


def turns(pair: Pair, before: Turns | None = None) -> Turns:
    """Return the turns of all ranks by side and reason so far, or since ``before``."""
    page = metrics.page(pair.decode_url)
    counted = metrics.by_labels(page, metrics.TURNS, "where", "reason")
    earlier = before or {}
    return {key: count - earlier.get(key, 0.0) for key, count in counted.items()}


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A pair with pages of ``request.param`` tokens, behind SGLang's router. Decode's pool holds a
    part of the talks, and decode notices the loss of its prefill server soon."""
    logs = tmp_path_factory.mktemp(f"page{request.param}")
    sizes = {"page_size": request.param, "decode_tokens": 4096}
    config = local_config(model, logs, decode_env=HEARTBEATS, router=True, **sizes)
    with Pair(config, logs) as pair:
        yield pair


@pytest.mark.parametrize("served", [pytest.param(1, marks=pytest.mark.nightly), 16], indirect=True)
def test_talks(served: Pair, model: Path, reference: Reference) -> None:
    """Guards against wrong slots or positions at a chunk's border, KV of a chunk that a concurrent
    step reads too early, and a turn that both sides compute. Decode's pool holds a part of the
    talks, so that some histories have been evicted."""
    pair, tokens = served, prompt_maker(model, seed=16)
    before = turns(pair)
    prompts: list[Ids] = [tokens(270 + 37 * i) for i in range(6)]
    lengths = itertools.cycle(range(19, 19 + 23 * len(prompts), 23))
    prompts = take_turns(pair, reference, prompts, 4, 24, lambda: tokens(next(lengths)))
    counted = turns(pair, before)
    assert counted["remote", "long"] >= 6 and counted["local", "short"] >= 10
    # Full hits, sent at once: at least one token of each is computed.
    tokens_before = pair.metrics()[0]["sglang:prompt_tokens_total"]
    assert pair.generate(prompts[:3] * 2, 24) == reference.answers(prompts[:3] * 2, 24)
    # Prefill answers its halves, too.
    assert pair.metrics()[0]["sglang:prompt_tokens_total"] >= tokens_before
    settle(pair)


@pytest.mark.nightly
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (1, 2), (2, 1)])
def test_several_ranks(
    model: Path, reference: Reference, logs: Path, prefill_tp: int, decode_tp: int
) -> None:
    """Guards against ranks that choose differently or compute different chunks, and against a
    request that ends on one rank only: the server would hang, or answers would be wrong. In
    every run ``component/decode/test_random_lives.py`` has two ranks in one process."""
    tokens = prompt_maker(model, seed=5)
    config = local_config(model, logs, page_size=16, prefill_tp=prefill_tp, decode_tp=decode_tp)
    with Pair(config, logs) as pair:
        prompts = [tokens(270 + 31 * i) for i in range(4)]
        take_turns(pair, reference, prompts, 4, 8, lambda: tokens(61))
        counted = turns(pair)
        assert counted["remote", "long"] == 4
        assert counted["local", "short"] > 0, counted
        settle(pair)


GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("served", [16], indirect=True)
def test_each_answer_is_explained(served: Pair, model: Path, reference: Reference) -> None:
    """Guards against an explanation that is lost between scheduler, detokenizer and tokenizer,
    against one in OpenAI's answers, and against an event log that does not agree with it."""
    pair, tokens = served, prompt_maker(model, seed=48)
    history = tokens(320)
    prompts = {
        "remote": history,
        "hit": [*history, *tokens(LIMIT + 40)],
        "local": [*history, *tokens(40)],
    }
    found: dict[str, dict[str, Any]] = {}
    for rid, ids in prompts.items():
        _, answer = ask_both(pair, ids, GREEDY, rid=f"explained-{rid}")
        found[rid] = answer.json()["meta_info"]["cached_tokens_details"]
        settle(pair)
    facts = ("turn", "turn_reason", "decode_hit_tokens", "local_tokens", "requested_tokens")
    assert {rid: tuple(details[fact] for fact in facts) for rid, details in found.items()} == {
        "remote": ("remote", "long", 0, 0, 320),
        "hit": ("remote", "long", 320, 0, LIMIT + 40),
        "local": ("local", "short", 320, 40, 0),
    }
    whole = 320 * kv_bytes_per_token(model)
    assert found["remote"]["requested_bytes"] == whole and found["local"]["requested_bytes"] == 0
    waits = {rid: {key for key in details if key.endswith("_ms")} for rid, details in found.items()}
    assert waits["remote"] == {"handshake_ms", "memory_ms", "transfer_ms", "start_ms"}
    assert waits["local"] == {"handshake_ms", "memory_ms", "local_prefill_ms", "start_ms"}

    folder = Path(str(pair.config.env[EVENT_LOG.name]))
    kinds = {rid: [line.split()[3] for line in life(f"explained-{rid}", [folder])] for rid in found}
    assert kinds["local"] == ["local", "computed", "ended"]
    assert set(kinds["remote"]) == {"admitted", "announced", "sent", "moved", "arrived", "ended"}

    # OpenAI's API: the keys of stock SGLang's aggregated server.
    body = {"model": "default", "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
    stock = requests.post(
        f"{reference.server.config.url}/v1/chat/completions", json=body, timeout=60
    )
    body |= route(pair)
    with ThreadPoolExecutor(2) as pool:
        urls = [f"{url}/v1/chat/completions" for url in (pair.prefill_url, pair.decode_url)]
        _, ours = pool.map(lambda url: requests.post(url, json=body, timeout=60), urls)
    assert keys(ours.json()) == keys(stock.json())
    settle(pair)


def keys(value: Any) -> Any:
    """Return the keys of nested JSON objects, without the values."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    return [keys(inner) for inner in value] if isinstance(value, list) else None


@pytest.mark.parametrize("served", [16], indirect=True)
def test_kinds_of_requests(served: Pair, model: Path, reference: Reference) -> None:
    """Guards against log probabilities, penalties, grammars or counts that differ from the
    aggregated server's because decode computed the turn, and against a prefill server that computes
    such a turn, or answers with an error."""
    pair, tokens = served, prompt_maker(model, seed=3)
    before, computed_before = turns(pair), metrics.scrape(pair.prefill_url)
    stock = reference.server.config.url

    def check(ids: Ids, params: dict[str, Any], **more: Any) -> tuple[Any, Any]:
        body = {"input_ids": ids, "sampling_params": params, **more}
        expected = requests.post(f"{stock}/generate", json=body, timeout=60).json()
        there, here = (answer.json() for answer in ask_both(pair, ids, params, **more))
        assert here["output_ids"] == expected["output_ids"]
        assert here["meta_info"]["prompt_tokens"] == len(ids)
        assert here["meta_info"]["completion_tokens"] == 12
        return there, {"here": here["meta_info"], "stock": expected["meta_info"]}

    history = tokens(300)
    (first,) = pair.generate([history], 24)  # through the router
    turn = [*history, *first, *tokens(70)]
    there, meta = check(turn, GREEDY)
    assert there["output_ids"] == [] and there["meta_info"]["finish_reason"]["type"] == "length"
    held = (len(history) + 23) // 16 * 16  # the last token of an answer has no KV
    assert meta["here"]["cached_tokens"] == held
    _, meta = check([*turn, *tokens(9)], GREEDY, return_logprob=True, top_logprobs_num=2)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        ours, theirs = (_numbers(meta[side][name]) for side in ("here", "stock"))
        assert ours == pytest.approx(theirs, abs=1e-3)
    check([*turn, *tokens(7)], {**GREEDY, "min_new_tokens": 12})
    check([*turn, *tokens(8)], {**GREEDY, "presence_penalty": 1.5})
    # The grammar also restricts and accepts the first token.
    check([*turn, *tokens(6)], {**GREEDY, "regex": "([0-9] ?){40}"})
    # Log probabilities of the prompt are left to prefill, which alone computes them.
    check([*turn, *tokens(5)], GREEDY, return_logprob=True, logprob_start_len=0)
    counted = turns(pair, before)
    assert counted["local", "short"] == 5 and counted["remote", "input_logprobs"] == 1
    # Through SGLang's router, streaming and not.
    for stream in (False, True):
        ids = [*turn, *tokens(20)]
        body = {"input_ids": ids, "sampling_params": GREEDY, "stream": stream}
        answer = requests.post(f"{pair.target.url}/generate", json=body, timeout=60)
        assert answer.status_code == 200
        text = answer.text if not stream else answer.text.split("data: ")[-2]
        output_ids = json.loads(text)["output_ids"]
        expected = reference.answers([ids], 12)[0]
        assert output_ids[-1] == expected[-1] if stream else output_ids == expected
    assert turns(pair, before)["local", "short"] == 7
    # Prefill ran one prompt, and the request for the prompt's log probabilities.
    computed = metrics.gained(computed_before, metrics.scrape(pair.prefill_url))
    work = sum(v for k, v in computed.items() if "realtime_tokens" in k)
    assert work < 2 * len(turn) + 1000, computed
    settle(pair)


def _numbers(values: Any) -> list[float]:
    """Return all numbers in nested lists, in order."""
    if isinstance(values, list):
        return [number for value in values for number in _numbers(value)]
    return [float(values)] if isinstance(values, (int, float)) else []


@pytest.mark.parametrize("served", [16], indirect=True)
def test_prefill_is_gone(served: Pair, model: Path, reference: Reference, logs: Path) -> None:
    """Guards against a turn within the bound that fails with a prefill server it does not need, or
    that uses KV of an incomplete transfer; a new talk without the reason of its failure; and a
    restarted prefill server that is not used. Must be the last test of this pair, because its
    router has lost a server."""
    pair, tokens = served, prompt_maker(model, seed=11)

    def ask(prompts: list[Ids]) -> list[Result]:
        return asyncio.run(ask_decode(pair, prompts, 12))

    def next_turns(talks: list[Ids], new_tokens: int) -> list[Ids]:
        """Return each talk with its answer and ``new_tokens`` more tokens."""
        answers = reference.answers(talks, 12)
        return [
            [*talk, *answer, *tokens(new_tokens + number)]
            for number, (talk, answer) in enumerate(zip(talks, answers, strict=True))
        ]

    talks: list[Ids] = [tokens(300 + 40 * i) for i in range(2)]
    assert_right(ask(talks), reference.answers(talks, 12))
    talks = next_turns(talks, LIMIT + 7)
    before = turns(pair)
    # These are announced to a stopped scheduler, which is then killed.
    process = pair.processes["prefill"]

    async def lose() -> list[Result]:
        asked = asyncio.create_task(ask_decode(pair, talks, 12))
        while turns(pair, before)["remote", "long"] < 2:
            await asyncio.sleep(0.05)
        kill_group(process.pid)
        return await asked

    with frozen(process):
        assert_right(asyncio.run(lose()), reference.answers(talks, 12))
    assert turns(pair)["local", "transfer_failed"] == 2
    # The next turns find no prefill server.
    for new in (20, LIMIT + 7):
        talks = next_turns(talks, new)
        started = time.monotonic()
        assert_right(ask(talks), reference.answers(talks, 12))
        assert time.monotonic() - started < 10
    assert turns(pair)["local", "no_prefill"] == 4
    (new_talk,) = ask([tokens(WHEN_LOST + 90)])
    assert new_talk.error is not None and "fallback-prefill" in new_talk.error, new_talk.error
    # The restarted prefill server is used again.
    pair.processes["prefill"] = start(pair.layout[0], logs)
    pair.processes["prefill"].wait_ready()
    talks = [*next_turns(talks, 100), tokens(WHEN_LOST + 90)]
    assert_right(ask(talks), reference.answers(talks, 12))
    assert turns(pair)["local", "no_prefill"] == 4
    settle(pair)

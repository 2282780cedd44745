"""Turns that decode computes itself: the aggregated tokens, and nothing for prefill to do."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmark.harness import metrics
from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.fleet import start
from benchmark.harness.pair import Aggregated, Pair
from benchmark.harness.servers import HOST
from benchmark.harness.watchdog import kill_group
from chaos.faults import scheduler_of, signal_all
from e2e.support import (
    DOZE,
    Ids,
    Reference,
    balancer,
    pair_config,
    prompt_maker,
    settle,
    take_turns,
)

TURNS = "sglang:decode_turns_total"
LIMIT = 256


def local_config(model: Path, logs: Path, **changes: Any) -> Any:
    """A pair whose decode server computes every turn within ``LIMIT``, in small chunks."""
    env = {
        "SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK": "48",
        "SGLANG_DISAGGREGATION_DECODE_LOCAL_ALWAYS": "1",
        **changes.pop("decode_env", {}),
    }
    args = (*DOZE, "--disaggregation-decode-local-tokens", str(LIMIT))
    return pair_config(model, logs, decode_args=args, decode_env=env, **changes)


Turns = dict[tuple[str, str], float]


def turns(pair: Pair, before: Turns | None = None) -> Turns:
    """Turns by side and reason so far, or since ``before``."""
    found = re.findall(
        rf'^{TURNS}\{{.*reason="(\w+)".*where="(\w+)".*\}} (\S+)$',
        metrics.page(pair.decode_url),
        re.MULTILINE,
    )
    earlier = before or {}
    return {
        (where, reason): float(count) - earlier.get((where, reason), 0.0)
        for reason, where, count in found
    }


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A pair with pages of ``request.param`` tokens, behind SGLang's router. Decode's pool holds a
    part of the talks."""
    logs = tmp_path_factory.mktemp(f"page{request.param}")
    config = local_config(model, logs, page_size=request.param, decode_tokens=4096, router=True)
    with Pair(config, logs) as pair:
        yield pair


@pytest.mark.parametrize("served", [pytest.param(1, marks=pytest.mark.nightly), 16], indirect=True)
def test_talks(served: Pair, model: Path, reference: Reference) -> None:
    """Wrong slots or positions at a chunk's border, KV of a chunk that a step beside it reads too
    early, or a turn that both sides compute, would change what is generated or counted. The decode
    pool holds a part of the talks, so that some of their histories are gone."""
    pair, tokens = served, prompt_maker(model, seed=16)
    before = turns(pair)
    prompts: list[Ids] = [tokens(270 + 37 * i) for i in range(6)]
    for _ in range(4):
        expected = reference.answers(prompts, 24)
        assert pair.generate(prompts, 24) == expected
        prompts = [
            [*prompt, *answer, *tokens(19 + 23 * at)]
            for at, (prompt, answer) in enumerate(zip(prompts, expected, strict=True))
        ]
    counted = turns(pair, before)
    assert counted["remote", "long"] >= 6 and counted["local", "always"] >= 10
    # Full hits, at once: at least one token of each is computed.
    tokens_before = pair.metrics()[0]["sglang:prompt_tokens_total"]
    assert pair.generate(prompts[:3] * 2, 24) == reference.answers(prompts[:3] * 2, 24)
    # Answered there, too.
    assert pair.metrics()[0]["sglang:prompt_tokens_total"] >= tokens_before
    settle(pair)


@pytest.mark.nightly
def test_the_choice(model: Path, reference: Reference, logs: Path) -> None:
    """Guards against a choice that is made by other numbers than those of real servers, and against
    answers that depend on it. Both sides are measured, and both are tried."""
    tokens = prompt_maker(model, seed=7)
    always = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_ALWAYS": "0"}
    with Pair(local_config(model, logs, page_size=16, decode_env=always), logs) as pair:
        prompts = [tokens(40 + 31 * i) for i in range(4)]
        take_turns(pair, reference, prompts, 6, 8, lambda: tokens(21))
        counted = turns(pair)
        assert counted["local", "unmeasured"] > 0 and counted["remote", "unmeasured"] > 0
        assert sum(n for (_, reason), n in counted.items() if reason == "cheaper") > 5, counted
        samples = pair.metrics()[1]
        assert samples["sglang:decode_turn_actual_seconds_count"] == sum(counted.values())
        assert 0 < samples["sglang:decode_turn_expected_seconds_count"] < sum(counted.values())
        settle(pair)


@pytest.mark.nightly
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (1, 2), (2, 1)])
def test_several_ranks(
    model: Path, reference: Reference, logs: Path, prefill_tp: int, decode_tp: int
) -> None:
    """Ranks that choose differently, compute other chunks, or of which one alone ends a request
    that decode computes, would stop the server, or change what is generated; as
    ``component/decode/test_random_lives.py`` in every run, with two ranks in one process."""
    tokens = prompt_maker(model, seed=5)
    env = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_ALWAYS": "0"} if decode_tp == 2 else {}
    config = local_config(
        model, logs, page_size=16, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_env=env
    )
    with Pair(config, logs) as pair:
        prompts = [tokens(270 + 31 * i) for i in range(4)]
        take_turns(pair, reference, prompts, 4, 8, lambda: tokens(61))
        counted = turns(pair)
        assert counted["remote", "long"] == 4
        assert sum(n for (where, _), n in counted.items() if where == "local") > 0, counted
        settle(pair)


def ask_both(pair: Pair, ids: Ids, params: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """One request to both servers: their answers."""
    prefill = pair.layout[0]
    target = Target(pair.decode_url, prefill.url, HOST, prefill.bootstrap_port)
    body = {"input_ids": ids, "sampling_params": params, **target.route(), **more}
    urls = [f"{url}/generate" for url in (pair.prefill_url, pair.decode_url)]
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(requests.post, url, json=body, timeout=60) for url in urls]
        answers = [each.result() for each in sent]
    assert [answer.status_code for answer in answers] == [200, 200]
    return tuple(answer.json() for answer in answers)  # type: ignore[return-value]


@pytest.mark.parametrize("served", [16], indirect=True)
def test_kinds_of_requests(served: Pair, model: Path, reference: Reference) -> None:
    """Guards against log probabilities, penalties or counts that are not the aggregated server's
    because decode computed the turn; and against a prefill server that works for it, or answers
    with an error."""
    pair, tokens = served, prompt_maker(model, seed=3)
    before, computed_before = turns(pair), metrics.scrape(pair.prefill_url)
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    stock = reference.server.config.url

    def check(ids: Ids, params: dict[str, Any], **more: Any) -> tuple[Any, Any]:
        body = {"input_ids": ids, "sampling_params": params, **more}
        expected = requests.post(f"{stock}/generate", json=body, timeout=60).json()
        there, here = ask_both(pair, ids, params, **more)
        assert here["output_ids"] == expected["output_ids"]
        assert here["meta_info"]["prompt_tokens"] == len(ids)
        assert here["meta_info"]["completion_tokens"] == 12
        return there, {"here": here["meta_info"], "stock": expected["meta_info"]}

    history = tokens(300)
    (first,) = pair.generate([history], 24)  # through the router
    turn = [*history, *first, *tokens(70)]
    there, meta = check(turn, greedy)
    assert there["output_ids"] == [] and there["meta_info"]["finish_reason"]["type"] == "length"
    held = (len(history) + 23) // 16 * 16  # the last token of an answer has no KV
    assert meta["here"]["cached_tokens"] == held
    _, meta = check([*turn, *tokens(9)], greedy, return_logprob=True, top_logprobs_num=2)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        ours, theirs = (_numbers(meta[side][name]) for side in ("here", "stock"))
        assert ours == pytest.approx(theirs, abs=1e-3)
    check([*turn, *tokens(7)], {**greedy, "min_new_tokens": 12})
    check([*turn, *tokens(8)], {**greedy, "presence_penalty": 1.5})
    # What only prefill can send is left to it.
    check([*turn, *tokens(5)], greedy, return_logprob=True, logprob_start_len=0)
    counted = turns(pair, before)
    assert counted["local", "always"] == 4 and counted["remote", "input_logprobs"] == 1
    # Through SGLang's router, streaming and not.
    for stream in (False, True):
        ids = [*turn, *tokens(20)]
        body = {"input_ids": ids, "sampling_params": greedy, "stream": stream}
        answer = requests.post(f"{pair.target.url}/generate", json=body, timeout=60)
        assert answer.status_code == 200
        text = answer.text if not stream else answer.text.split("data: ")[-2]
        found = json.loads(text)["output_ids"]
        expected = reference.answers([ids], 12)[0]
        assert found[-1] == expected[-1] if stream else found == expected
    assert turns(pair, before)["local", "always"] == 6
    # Prefill ran one prompt, and what only it can do.
    computed = metrics.gained(computed_before, metrics.scrape(pair.prefill_url))
    work = sum(v for k, v in computed.items() if "realtime_tokens" in k)
    assert work < 2 * len(turn) + 1000, computed
    settle(pair)


@pytest.mark.nightly
def test_the_mini_load_balancer(model: Path, reference: Reference, logs: Path) -> None:
    """SGLang's small load balancer in Python reads prefill's half of an answer where it is asked
    for log probabilities: an empty one that it cannot read would be the client's error."""
    tokens = prompt_maker(model, seed=17)
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    config = local_config(model, logs, page_size=16)
    with Pair(config, logs) as pair, balancer(pair, logs, mini=True) as url:

        def ask(ids: Ids, **more: Any) -> Any:
            """The answer; the last piece of it, where it streams."""
            body = {"input_ids": ids, "sampling_params": params, **more}
            answer = requests.post(f"{url}/generate", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            streams = more.get("stream", False)
            return json.loads(answer.text.split("data: ")[-2] if streams else answer.text)

        talk = tokens(300)
        for number, stream in enumerate((False, True, False, True)):
            (expected,) = reference.answers([talk], 12)
            more = {"return_logprob": True} if number > 1 else {}
            found = ask(talk, stream=stream, **more)
            # A server that streams sends pieces, with ``--incremental-streaming-output``.
            assert found["output_ids"] == expected[-len(found["output_ids"]) :] != []
            assert found["meta_info"]["completion_tokens"] == 12
            if number > 1:
                probabilities = found["meta_info"]["output_token_logprobs"]
                assert [token for _, token, _ in probabilities][-1] == expected[-1]
            talk = [*talk, *expected, *tokens(60 + number)]
        counted = turns(pair)
        assert counted["remote", "long"] == 1 and counted["local", "always"] == 3, counted
        settle(pair)


@pytest.mark.nightly
def test_grammars(model: Path, logs: Path) -> None:
    """Guards against a first token that is outside of the grammar, or that the grammar was not
    told of. (On a CPU no other backend of SGLang's can mask logits.)"""
    backend = ("--grammar-backend", "llguidance")
    tokens = prompt_maker(model, seed=9)
    params = {"temperature": 0, "max_new_tokens": 12, "regex": "([0-9] ?){40}"}
    config = local_config(model, logs, page_size=16, prefill_args=(*DOZE, *backend))
    config = replace(config, decode_args=(*config.decode_args, *backend))
    with Pair(config, logs) as pair:
        history = tokens(300)
        (first,) = pair.generate([history], 24)
        prompts = [[*history, *first, *tokens(70 + i)] for i in range(3)]
        found = [ask_both(pair, prompt, params)[1] for prompt in prompts]
        assert turns(pair)["local", "always"] == 3
        settle(pair)
    with Aggregated(model, logs / "stock", extra_args=backend) as stock:
        for prompt, ours in zip(prompts, found, strict=True):
            body = {"input_ids": prompt, "sampling_params": params}
            theirs = requests.post(f"{stock.config.url}/generate", json=body, timeout=60).json()
            assert ours["output_ids"] == theirs["output_ids"]
            assert re.fullmatch("([0-9] ?)*", ours["text"]), ours["text"]


def _numbers(values: Any) -> list[float]:
    """All numbers in nested lists, in order."""
    if isinstance(values, list):
        return [number for value in values for number in _numbers(value)]
    return [float(values)] if isinstance(values, (int, float)) else []


# ---- prefill is gone ----

NEW_TOKENS = 12
WHEN_LOST = 200
HEARTBEAT_S = 2.0  # the least that SGLang takes


async def _ask(pair: Pair, prompts: list[Ids]) -> list[Result]:
    """Decode's answers to requests whose prefill halves nobody waits for."""
    prefill = pair.layout[0]

    async def ask(session: Any, prompt: Ids) -> Result:
        route = Target("", "", HOST, prefill.bootstrap_port).route()
        request = Request(prompt, NEW_TOKENS, extra=route)
        half = asyncio.create_task(send(session, Target(prefill.url), request))
        try:
            return await send(session, Target(pair.decode_url), request)
        finally:
            half.cancel()
            await asyncio.gather(half, return_exceptions=True)

    async with open_session() as session:
        return list(await asyncio.gather(*(ask(session, prompt) for prompt in prompts)))


def next_turns(talks: list[Ids], answers: list[Ids], new: list[Ids]) -> list[Ids]:
    """Each talk with its answer and what its client says next."""
    return [[*talk, *answer, *more] for talk, answer, more in zip(talks, answers, new, strict=True)]


def lossy_config(model: Path, logs: Path, **changes: Any) -> Any:
    """A pair whose decode server computes turns of up to ``WHEN_LOST`` where prefill is lost, and
    notices that soon."""
    args = (
        "--disaggregation-decode-local-tokens",
        "30",
        "--disaggregation-decode-fallback-prefill-tokens",
        str(WHEN_LOST),
    )
    env = {
        "SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK": "48",
        "SGLANG_DISAGGREGATION_DECODE_LOCAL_ALWAYS": "1",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(HEARTBEAT_S),
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
    }
    return pair_config(
        model, logs, page_size=16, decode_args=(*DOZE, *args), decode_env=env, **changes
    )


def ask_right(pair: Pair, reference: Reference, prompts: list[Ids]) -> list[Ids]:
    """The answers, which are all right."""
    results = asyncio.run(_ask(pair, prompts))
    assert [result.error for result in results] == [None] * len(prompts)
    expected = reference.answers(prompts, NEW_TOKENS)
    assert [result.output_ids for result in results] == expected
    return expected


def test_prefill_is_gone(model: Path, reference: Reference, logs: Path) -> None:
    """A turn within the bound fails with a prefill server that it does not need, or is answered
    with KV of a transfer that never ended; or a new talk is not told why it fails."""
    tokens = prompt_maker(model, seed=11)

    def ask(prompts: list[Ids]) -> list[Ids]:
        return ask_right(pair, reference, prompts)

    with Pair(lossy_config(model, logs), logs) as pair:
        talks: list[Ids] = [tokens(300 + 40 * i) for i in range(4)]
        talks = next_turns(talks, ask(talks), [tokens(100 + 7 * i) for i in range(4)])
        # These are announced to a scheduler that stands still, and then to one that is gone.
        process = pair.processes["prefill"]
        signal_all([scheduler_of(process.pid)], signal.SIGSTOP)

        async def lose() -> list[Result]:
            asked = asyncio.create_task(_ask(pair, talks))
            while sum(turns(pair).values()) < 8:
                await asyncio.sleep(0.05)
            kill_group(process.pid)
            return await asked

        lost = asyncio.run(lose())
        answers = reference.answers(talks, NEW_TOKENS)
        assert [(result.error, result.output_ids) for result in lost] == [
            (None, answer) for answer in answers
        ]
        assert turns(pair)["local", "transfer_failed"] == 4
        # The next ones find nobody.
        for new in (20, 150):
            talks = next_turns(talks, answers, [tokens(new + i) for i in range(4)])
            started = time.monotonic()
            answers = ask(talks)
            assert time.monotonic() - started < 10
        assert turns(pair)["local", "no_prefill"] == 8
        (new_talk,) = asyncio.run(_ask(pair, [tokens(WHEN_LOST + 90)]))
        assert new_talk.error is not None and "fallback-prefill" in new_talk.error, new_talk.error
        # It comes back, and is used again.
        pair.processes["prefill"] = start(pair.layout[0], logs / "again")
        pair.processes["prefill"].wait_ready()
        talks = next_turns(talks, answers, [tokens(100 + i) for i in range(4)])
        ask([*talks, tokens(WHEN_LOST + 90)])
        assert turns(pair)["local", "no_prefill"] == 8
        settle(pair)


OUTAGE_S, ROUND_S = 60.0, 4.0


@pytest.mark.nightly
def test_a_minute_without_prefill(model: Path, reference: Reference, logs: Path) -> None:
    """A turn within the bound fails while its prefill server is away for a minute; a new talk is
    not told why it fails, or waits for the end of it; or afterwards decode goes on without."""
    tokens = prompt_maker(model, seed=13)
    config = lossy_config(model, logs, decode_tokens=16_000)
    waited: dict[str, list[float]] = {"turn": [], "new talk": []}
    with Pair(config, logs) as pair:
        talks: list[Ids] = [tokens(300 + 40 * i) for i in range(4)]
        answers = ask_right(pair, reference, talks)
        kill_group(pair.processes["prefill"].pid)
        killed = time.monotonic()
        while (began := time.monotonic()) < killed + OUTAGE_S:
            talks = next_turns(talks, answers, [tokens(35 + i) for i in range(4)])
            *later, new = asyncio.run(_ask(pair, [*talks, tokens(WHEN_LOST + 90)]))
            answers = reference.answers(talks, NEW_TOKENS)
            found = [(result.error, result.output_ids) for result in later]
            assert found == [(None, answer) for answer in answers], time.monotonic() - killed
            assert new.error is not None and "fallback-prefill" in new.error, new.error
            waited["turn"] += [result.latency_s for result in later]
            waited["new talk"].append(new.latency_s)
            time.sleep(max(0.0, began + ROUND_S - time.monotonic()))
        for who, seconds in waited.items():
            print(f"{who}: {len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f} s")
        noticed = 2 * 2 * HEARTBEAT_S + 5  # as in the docs, and the turns themselves
        assert max(waited["turn"]) < noticed and len(waited["turn"]) >= 4 * 5
        counted = turns(pair)
        saved = counted["local", "no_prefill"] + counted.get(("local", "transfer_failed"), 0)
        assert saved == len(waited["turn"])
        pair.processes["prefill"] = start(pair.layout[0], logs / "again")
        pair.processes["prefill"].wait_ready()
        for _ in range(2):
            talks = next_turns(talks, answers, [tokens(35 + i) for i in range(4)])
            *answers, _ = ask_right(pair, reference, [*talks, tokens(WHEN_LOST + 90)])
        assert {key: n for key, n in turns(pair).items() if key[0] == "local"} == {
            key: n for key, n in counted.items() if key[0] == "local"
        }
        settle(pair)

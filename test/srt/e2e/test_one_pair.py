"""Answers of a pair with the decode radix cache, and the KV that is sent for them.

The scenarios of a backend share one pair and leave it idle, balanced and without errors.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from benchmark.harness import metrics
from benchmark.harness.client import Request
from benchmark.harness.fleet import Pair
from benchmark.harness.metrics import HIT_TOKENS
from benchmark.harness.models import kv_bytes_per_token
from e2e import fuzz
from e2e.support import (
    DOZE,
    RETRACTS,
    EventLogs,
    Reference,
    ask_both,
    assert_tiled,
    balancer,
    pair_config,
    prompt_maker,
    send_and_leave,
    settle,
    take_turns,
)
from unit.documents import alert_rules

POOL_TOKENS = 3200
"""Decode's pool: a fraction of the scenarios' tokens, so that it evicts all the time."""
NIXL = ("nixl", 16)
MOONCAKE = ("mooncake", 1)
EVERY_RUN = [pytest.param(served, id=f"{served[0]}-{served[1]}") for served in (NIXL, MOONCAKE)]
OTHER_PAGES = [
    pytest.param(served, id=f"{served[0]}-{served[1]}", marks=pytest.mark.nightly)
    for served in (("nixl", 1), ("mooncake", 16))
]
"""Backends and page sizes."""


@dataclass(frozen=True)
class Served:
    """A running pair."""

    pair: Pair
    logs: Path
    events: EventLogs
    page: int
    page_bytes: int


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A pair with backend and page size ``request.param``. Prompts exceed prefill's chunks."""
    backend, page = request.param
    env = {}
    if backend == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
        env = {"MC_FORCE_TCP": "1"}
    logs = tmp_path_factory.mktemp(f"{backend}{page}")
    # A small reserve, so that running requests outgrow the pool.
    arguments = (*DOZE, "--num-reserved-decode-tokens", "16")
    config = pair_config(
        model,
        logs,
        backend=backend,
        page_size=page,
        decode_tokens=POOL_TOKENS,
        decode_args=arguments,
        env=env,
        decode_env=RETRACTS,
    )
    with Pair(config, logs) as pair:
        yield Served(pair, logs, EventLogs(logs), page, page * kv_bytes_per_token(model))


@pytest.mark.hazard("bad-kv-in-tree", "tenants-share")
@pytest.mark.parametrize("served", [pytest.param(MOONCAKE, id="mooncake-1")], indirect=True)
def test_warmup_health_and_other_namespaces_never_hit(
    served: Served, model: Path, reference: Reference
) -> None:
    """Guards against hits on the ids of warm-ups (10 to 13) and health checks (0), which have no
    KV: at page size 1 a prompt that starts like them would be answered from garbage. Equal tokens
    under another ``extra_key`` (tenant, adapter, salt) must not hit either."""
    pair, tokens = served.pair, prompt_maker(model, seed=4)
    before = pair.metrics()[1]
    for url in (pair.prefill_url, pair.decode_url):
        urllib.request.urlopen(f"{url}/health_generate", timeout=60).read()
    settle(pair)
    colliding = [[10, 11, 12, 13, *tokens(30)], [0, *tokens(30)]]
    assert pair.generate(colliding, 8) == reference.answers(colliding, 8)
    settle(pair)
    assert metrics.gained(before, pair.metrics()[1])[HIT_TOKENS] == 0

    prompt = tokens(200)
    salted = [Request(prompt, 8, extra={"extra_key": key}) for key in ("a", "b", "a")]
    for request in salted:
        assert pair.send([request])[0].output_ids == reference.answers([prompt], 8)[0]
    settle(pair)
    assert metrics.gained(before, pair.metrics()[1])[HIT_TOKENS] == len(prompt)


@pytest.mark.hazard("retraction-of-shared-pages")
@pytest.mark.parametrize("served", [*EVERY_RUN, *OTHER_PAGES], indirect=True)
def test_conversations_and_shared_prefixes_on_a_pool_that_evicts(
    served: Served, model: Path, reference: Reference
) -> None:
    """Guards against wrong slots, stale tree content, a prefix cut at the wrong token, and pages
    evicted while in use; also against a retracted request that restores its shared prefix from its
    CPU copy, over pages that other requests read, instead of from the tree."""
    pair, events = served.pair, served.events
    tokens = prompt_maker(model, seed=served.page)
    events.read()
    before = pair.metrics()[1]
    # 8 conversations of 5 turns.
    first = [tokens(200 + 37 * i) for i in range(8)]
    take_turns(pair, reference, first, turns=5, new_tokens=24, more=partial(tokens, 19))
    # 16 requests at once over two prefixes longer than a chunk; two prompts are a prefix.
    prefixes = [tokens(600), tokens(640)]
    burst = [[*prefixes[i % 2], *tokens(3 + 5 * i)] for i in range(14)] + prefixes
    assert pair.generate(burst, 32) == reference.answers(burst, 32)
    retracted = re.findall(r"#retracted_reqs: (\d+)", pair.processes["decode"].log_text())
    assert sum(map(int, retracted)) > 0
    # The prefixes again: they are in the tree now, and full hits transfer no KV.
    assert pair.generate(prefixes, 32) == reference.answers(prefixes, 32)
    settle(pair)
    assert_tiled(*events.read(), served.page_bytes)
    assert metrics.gained(before, pair.metrics()[1])[HIT_TOKENS] > 0


@pytest.mark.parametrize("served", [pytest.param(NIXL, id="nixl-16")], indirect=True)
def test_alert_rules_are_tested_on_series_of_this_shape(served: Served) -> None:
    """Guards against an alert that fires in promtool but cannot fire with a server's metrics."""
    exported = {
        role: {(s.name, frozenset(s.labels)) for family in families for s in family.samples}
        for role, families in served_families(served.pair).items()
    }
    missing = {
        (name, role)
        for name, role, labels in alert_rules.series()
        if role in exported and (name, labels) not in exported[role]
    }
    # SGLang's own counter is not exported before its first event.
    assert {
        series for series in missing if series[0] != "sglang:num_retracted_requests_total"
    } == set()


def served_families(pair: Pair) -> dict[str, list[Metric]]:
    """Return the metrics that each server exports."""
    families = {}
    for role, url in (("prefill", pair.prefill_url), ("decode", pair.decode_url)):
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            families[role] = list(text_string_to_metric_families(answer.read().decode()))
    return families


@pytest.mark.hazard("cached-tokens-twice")
@pytest.mark.parametrize("served", EVERY_RUN, indirect=True)
def test_second_turn_moves_only_new_pages(
    served: Served, model: Path, reference: Reference
) -> None:
    """Guards against pages that are sent again: turn two must reuse turn one's prompt *and* answer.
    A full hit sends none, and the client must still see prefill's own cached tokens."""
    pair, events, page, page_bytes = served.pair, served.events, served.page, served.page_bytes
    tokens = prompt_maker(model, seed=2)
    events.read()
    first = tokens(333)
    answer = pair.generate([first], 40)[0]
    settle(pair)
    (admitted,), sent = events.read()
    assert (admitted.prefix_tokens, len(admitted.pages)) == (0, -(-len(first) // page))
    assert_tiled([admitted], sent, page_bytes)

    second = [*first, *answer, *tokens(50)]
    before = pair.metrics()
    result = pair.send([Request(second, 8)])[0]
    settle(pair)
    (admitted,), sent = events.read()
    kept = admitted.prefix_tokens
    # The last generated token has KV if the overlapped next step had begun.
    held = len(first) + len(answer)
    assert kept in {(held - 1) // page * page, held // page * page}
    assert len(admitted.pages) == -(-len(second) // page) - kept // page
    assert_tiled([admitted], sent, page_bytes)
    assert result.output_ids == reference.answers([second], 8)[0]

    gained = [metrics.gained(b, a) for b, a in zip(before, pair.metrics(), strict=True)]
    assert gained[0][metrics.SENT_BYTES] == len(admitted.pages) * page_bytes
    assert gained[1]["sglang:kv_transfer_requested_bytes_total"] == len(admitted.pages) * page_bytes
    assert gained[0][metrics.SKIPPED_TOKENS] == gained[1][metrics.HIT_TOKENS] == kept
    # Clients see prefill's cached tokens: turn one's prompt, without its answer.
    assert result.cached_tokens == len(first) // page * page

    whole = second[: len(second) // page * page]
    assert pair.generate([whole], 8) == reference.answers([whole], 8)
    settle(pair)
    (admitted,), sent = events.read()
    assert (admitted.prefix_tokens, admitted.pages, sent) == (len(whole), [], [])


#: Sampling parameters, other fields, and decode's status.
AT_THE_EDGE: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    # SGLang passes these to the tokenizer as tensors; metadata hold 128 of them.
    ({}, {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [1, 2]}, 200),
    ({}, {"return_logprob": True, "top_logprobs_num": 129}, 400),
    # SGLang drops the room of such a request.
    ({}, {"session_params": {"id": "unknown"}}, 400),
    ({"structural_tag": "{}"}, {}, 400),
    ({"structural_tag": ""}, {}, 400),
    ({"regex": "\0"}, {}, 400),
    ({"json_schema": "[" * 100_000}, {}, 400),
    ({"json_schema": '{"type": "unknown"}'}, {}, 400),
    ({"ebnf": "root ::= root"}, {}, 500),  # the grammar accepts no token
    ({"ebnf": 'root ::= "1" x\nx ::= x', "temperature": 1}, {}, 200),  # ends after a token
]


@pytest.mark.parametrize("served", [pytest.param(NIXL, id="nixl-16")], indirect=True)
def test_requests_at_the_edge(served: Served, model: Path, reference: Reference) -> None:
    """Guards against a request that ends both servers: xgrammar raises for grammars that it cannot
    compile, and the sampler for one that allows no token; prefill freed the pages of such a request
    twice. The other half must neither wait for its deadline nor leak."""
    pair, prompt = served.pair, prompt_maker(model, seed=14)(300)
    for sampling, more, status in AT_THE_EDGE:
        params = {"temperature": 0, "max_new_tokens": 8, **sampling}
        prefill, decode = ask_both(pair, prompt, params, **more)
        assert decode.status_code == status, (sampling, more, decode.text)
        assert prefill.status_code in (200, status), (sampling, more, prefill.text)
        if more and status == 200:
            tops = decode.json()["meta_info"]["output_top_logprobs"]
            assert [len(top) for top in tops] == [3] * 8
    pair.check()
    assert pair.generate([prompt], 8) == reference.answers([prompt], 8)
    pair.check()


def greedy(**more: Any) -> dict[str, Any]:
    """Sampling parameters for eight tokens, each the most probable one."""
    return {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **more}


#: Fields of a request, and its sampling parameters. If log probabilities are requested, a load
#: balancer reads prefill's answer, too.
WISHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"return_logprob": True}, {}),
    ({}, {"json_schema": '{"type": "integer"}'}),
]


def three_samples(
    served: Served, tokens: Any, reference: Reference, balancer_url: str | None = None
) -> None:
    """Send a request for three samples in every way, to both servers or to a load balancer.

    Each sample must be the reference's answer, and the prompt's KV is sent once.
    """
    served.events.read()
    for (wish, sampling), stream in itertools.product(WISHES, (False, True)):
        prompt, params, more = tokens(300), greedy(n=3, **sampling), {**wish, "stream": stream}
        if balancer_url is None:
            answers = ask_both(served.pair, prompt, params, **more)
        else:
            body = {"input_ids": prompt, "sampling_params": params, **more}
            answers = [requests.post(f"{balancer_url}/generate", json=body, timeout=30)]
        assert {answer.status_code for answer in answers} == {200}, answers[-1].text
        # The end of a grammar may be detected one step later: there may be one more id.
        field = "text" if sampling else "output_ids"
        samples = samples_in(answers[-1].text, field, streamed=stream)
        settle(served.pair)
        if sampling:
            assert samples == [samples[0]] * 3 != [""] * 3
        else:
            assert samples == reference.answers([prompt], 8) * 3
        admitted, sent = served.events.read()
        assert len(admitted) == 4  # the prompt and three samples
        assert len(admitted[0].pages) == -(-len(prompt) // served.page)
        assert all(len(admission.pages) <= 1 for admission in admitted[1:])
        assert_tiled(admitted, sent, served.page_bytes)


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize("served", EVERY_RUN, indirect=True)
def test_parallel_samples(served: Served, model: Path, reference: Reference) -> None:
    """Guards against a client that waits for ever or gets an error, against samples from KV that
    was never written, and against a prompt's KV that is sent more than once: SGLang gives all
    samples of a request (``n`` above 1) one room number."""
    three_samples(served, prompt_maker(model, seed=8), reference)


@pytest.mark.parametrize("mini", [False, True], ids=["router", "mini-lb"])
@pytest.mark.parametrize("served", [pytest.param(NIXL, id="nixl-16")], indirect=True)
def test_parallel_samples_through_a_load_balancer(
    served: Served, model: Path, reference: Reference, mini: bool
) -> None:
    """Guards against the same through SGLang's load balancers, which give a request one room."""
    with balancer(served.pair, served.logs, mini=mini) as url:
        three_samples(served, prompt_maker(model, seed=12 + mini), reference, url)


def samples_in(body: str, field: str, *, streamed: bool) -> list[Any]:
    """Return the complete samples in a server's response, in order."""
    if not streamed:
        return [sample[field] for sample in json.loads(body)]
    lines = (line[6:] for line in body.splitlines() if line.startswith("data: {"))
    last = {event["index"]: event[field] for event in map(json.loads, lines)}
    return [last[index] for index in sorted(last)]


@pytest.mark.hazard("abort-leaves-something")
@pytest.mark.parametrize("served", EVERY_RUN, indirect=True)
def test_disconnected_clients(served: Served, model: Path, reference: Reference) -> None:
    """Guards against pages that leak, or that are written after their reuse, when a client leaves
    while its request waits for memory, is transferred, or generates. The other clients get the
    right answers, and afterwards both servers are idle, balanced and empty."""
    pair, rng, new = served.pair, random.Random(6), 24
    tokens = prompt_maker(model, seed=6)
    prefixes = [tokens(500), tokens(700)]
    prompts = [[*prefixes[i % 2], *tokens(30 + i)] for i in range(36)]
    expected = reference.answers(prompts, new)
    # Seeded times from "at once" to "nearly answered"; every third client stays.
    patience = [None if i % 3 == 0 else rng.uniform(0.05, 6.0) for i in range(len(prompts))]
    asked = [Request(prompt, new) for prompt in prompts]
    results = send_and_leave(pair.target, asked, patience)
    stayed = [i for i, result in enumerate(results) if result is not None]
    assert len(stayed) >= len(prompts) // 3
    for i in stayed:
        result = results[i]
        assert result is not None and result.error is None, result
        assert result.output_ids == expected[i]
    settle(pair)
    # The aborted requests left nothing behind: the same prompts are answered right.
    assert pair.generate(prompts[:6], new) == expected[:6]
    settle(pair)


@pytest.mark.fuzz
@pytest.mark.parametrize("served", [pytest.param(NIXL, id="nixl-16")], indirect=True)
@pytest.mark.parametrize(
    "seconds", [20, pytest.param(600, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
def test_requests_of_any_shape(
    served: Served, model: Path, reference: Reference, seconds: int
) -> None:
    """Guards against a client that ends a server with a request that the server's description
    allows. The last test of this pair, because SGLang logs a traceback for unexpected types."""
    pair, prompt = served.pair, prompt_maker(model, seed=11)(300)
    before = pair.generate([prompt], 8)
    with balancer(pair, served.logs, mini=True) as url:
        fuzz.send_for(pair, url, seconds, workers=4 if seconds > 20 else 1)
    pair.check()
    assert pair.generate([prompt], 8) == before == reference.answers([prompt], 8)
    pair.check()
    assert all("InvariantError" not in process.log_text() for process in pair.processes.values())

"""The replay against stub servers on real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.load.prepare import PromptSource
from benchmark.agentic.load.run import Settings, replay
from benchmark.harness.client import Target
from benchmark.harness.ports import allocate_ports
from benchmark.traces.record import Record
from component.agentic.stub import Stub, serve

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROMPTS = PromptSource(range(1000), block_tokens=4)


def event(total: int, reason: object = None) -> bytes:
    meta = {"completion_tokens": total, "prompt_tokens": 3, "cached_tokens": 1}
    return b"data: %s\n\n" % json.dumps({"meta_info": {**meta, "finish_reason": reason}}).encode()


def whole(tokens: int) -> bytes:
    return event(tokens, {"type": "length", "length": tokens}) + b"data: [DONE]\n\n"


async def fine(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    return web.Response(body=whole(body["sampling_params"]["max_new_tokens"]))


def app(handler: Handler) -> web.Application:
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/generate", handler)
    return application


def send(
    handlers: list[Handler],
    records: list[Record],
    settings: Settings = Settings(timeout_s=30.0),  # noqa: B008
    **more: Any,
) -> list[Outcome]:
    """Replay to one handler, or to a prefill and a decode handler."""

    async def go() -> list[Outcome]:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serve(app(h))) for h in handlers]
            target = Target(urls[-1], urls[0] if len(urls) > 1 else None, "127.0.0.1", 8998)
            return await asyncio.wait_for(replay(target, records, PROMPTS, settings, **more), 60)

    return asyncio.run(go())


def turns(count: int, apart_ms: float = 1.0) -> list[Record]:
    return [Record(i * apart_ms, 3, 2, (i,), session_id="s", turn=i) for i in range(count)]


def test_the_number_of_streams_is_not_limited() -> None:
    """Guards against a limit of connections, ours or aiohttp's 100, that would hide the server's
    queue: no request is answered before all 300 have arrived."""
    arrived = 0
    all_arrived = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        if arrived == 300:
            all_arrived.set()
        await all_arrived.wait()
        return await fine(request)

    records = [Record(float(i), 3, 2, (i,), session_id=f"s{i}", turn=0) for i in range(300)]
    outcomes = send([answer], records)
    assert [o.error for o in outcomes] == [None] * 300
    assert [o.index for o in outcomes] == list(range(300))


@pytest.mark.parametrize("think_s", [None, 0.05])
def test_think_time_counts_from_the_end_of_the_turn_before(think_s: float | None) -> None:
    """Guards against a turn that is sent before the previous answer has ended: one answer is slow,
    and the trace's turns are 100 ms apart."""
    order = []

    async def answer(request: web.Request) -> web.StreamResponse:
        order.append(("begin", request.headers["X-Session-Id"]))
        await asyncio.sleep(0.3)
        order.append(("end", request.headers["X-Session-Id"]))
        return await fine(request)

    outcomes = send([answer], turns(3, 100.0), Settings(think_s))
    assert order == [("begin", "s"), ("end", "s")] * 3
    for before, after in zip(outcomes, outcomes[1:], strict=False):
        assert after.scheduled_s == pytest.approx(before.finished_s + (think_s or 0.1), abs=1e-5)
        assert after.started_s >= after.scheduled_s - 0.001


async def _refused(request: web.Request) -> web.StreamResponse:
    return web.Response(status=400, text="too long")


async def _never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(event(1))
    assert request.transport is not None
    request.transport.abort()
    return response


def _says(body: bytes) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    return answer


@pytest.mark.parametrize(
    ("handler", "kind", "text"),
    [
        (_refused, "http_4xx", "400 too long"),
        (_never, "timeout", "Timeout"),
        (_cut, "broken_stream", ""),
        (_says(event(1)), "broken_stream", "after 1 of 2 tokens"),
        (_says(whole(1)), "short_answer", "1 of 2 tokens"),
    ],
)
def test_errors_by_kind(handler: Handler, kind: str, text: str) -> None:
    """Guards against one error kind for all failures, and against a failure that ends the replay:
    the next request is answered."""
    handlers = iter([handler, fine])

    async def first_fails(request: web.Request) -> web.StreamResponse:
        return await next(handlers)(request)

    limit_s = 1.0 if kind == "timeout" else 30.0
    bad, good = send([first_fails], turns(2), Settings(0.0, timeout_s=limit_s))
    assert bad.error == kind
    assert bad.message is not None and text in bad.message
    assert good.error is None


def test_a_server_that_is_down() -> None:
    """Guards against a server that is down and looks like one with broken streams, and against
    sessions that fail and start again without a pause."""
    (port,) = allocate_ports(1)
    records = [Record(0, 3, 2, (i,), session_id=f"s{i}", turn=0) for i in range(3)]
    work = replay(f"http://127.0.0.1:{port}", records, PROMPTS, Settings(sessions=1))
    outcomes = asyncio.run(work)
    assert [(o.error, o.sent_s) for o in outcomes] == [("connect", None)] * 3
    assert outcomes[2].started_s > 0.2


def test_a_busy_client_is_distinguished_from_a_slow_server() -> None:
    """Guards against a wrong ``late_s``: this process is blocked while requests are due."""
    records = [Record(0, 3, 2, (0,)), *(Record(1000, 3, 2, (i,)) for i in range(1, 5))]
    blocked = []

    def block(outcome: Outcome) -> None:
        if not blocked:
            blocked.append(outcome)
            time.sleep(1.3)

    outcomes = send([fine], records, on_outcome=block)
    assert all(o.late_s > 0.1 for o in outcomes[1:])


def test_a_bad_record_ends_the_replay() -> None:
    """Guards against prompts of another length than the trace's, and against waiting for a body
    that cannot be made."""
    with pytest.raises(ValueError, match="hash_ids"):
        send([fine], [Record(0, 30, 2, (0,), session_id="s", turn=0)])


def test_both_halves_of_a_pair() -> None:
    """Guards the pair's protocol: one body, a new room a request, one session id for both halves;
    and different workers in the outcome even if no server reports its name."""
    seen: list[dict[str, Any]] = []

    async def half(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        assert request.headers["X-Session-Id"] == "s"
        return await fine(request)

    outcomes = send([half, half], turns(2), Settings(0.0))
    assert [o.error for o in outcomes] == [None, None]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert seen[0]["bootstrap_room"] != seen[2]["bootstrap_room"]
    assert outcomes[0].prefill_worker != outcomes[0].decode_worker


def test_a_failed_prefill_does_not_wait_for_decode() -> None:
    """Guards against a decode half that waits for KV until its timeout, and against that timeout
    reported in place of prefill's error."""
    (outcome,) = send([_refused, _never], turns(1))
    assert (outcome.error, outcome.message) == ("http_4xx", "prefill: 400 too long")
    assert outcome.e2e_s < 20


@pytest.mark.parametrize("cumulative", [True, False])
def test_times_of_tokens(cumulative: bool) -> None:
    """Guards TTFT, TPOT and ITL at a known pace, with cumulative and incremental ids. A second
    request with the same prompt is cached."""
    records = [Record(i * 400, 256, 10, tuple(range(64))) for i in range(2)]
    stub = Stub(first_s=0.02, gap_s=0.02, cumulative=cumulative)

    async def go() -> list[Outcome]:
        async with serve(stub.app()) as url:
            return await asyncio.wait_for(replay(url, records, PROMPTS), 30)

    outcomes = asyncio.run(go())
    assert [o.error for o in outcomes] == [None, None]
    assert [o.cached_tokens for o in outcomes] == [0, 256]
    for o in outcomes:
        assert o.output_tokens == 10 and len(o.itl_s) == 9
        assert o.tpot_s is not None and o.tpot_s >= 0.015
        assert o.first_token_s is not None and o.ttft_s is not None
        assert o.started_s <= (o.sent_s or 0) <= o.first_token_s <= o.finished_s
        assert sum(o.itl_s) == pytest.approx(o.tpot_s * 9, abs=1e-3)
    assert stub.served == 2

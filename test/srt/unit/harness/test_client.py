"""The client against a small server of our own: how it reads a stream, and what is an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from benchmark.harness.client import Request, Result, Target, send_all

BUSY = 503
Answer = list[dict[str, Any]] | int
"""The events of a stream, or a status."""


def event(ids: list[int], total: int, finish: object = None) -> dict[str, Any]:
    """With cumulative or incremental token ids, as a flag of SGLang's says."""
    details = {"device": 0, "host": 0, "storage": 1, "storage_backend": "file"}
    meta = {"completion_tokens": total, "prompt_tokens": 3, "cached_tokens": 1}
    meta |= {"cached_tokens_details": details, "finish_reason": finish}
    return {"output_ids": ids, "text": "", "meta_info": meta}


def aborted(message: str) -> dict[str, str]:
    return {"type": "abort", "message": message}


def ask(decode: Answer, prefill: Answer) -> Result:
    """Sends one request to two servers, which answer so."""

    async def reply(request: web.Request) -> web.StreamResponse:
        answer = prefill if request.match_info["role"] == "prefill" else decode
        if isinstance(answer, int):
            return web.Response(status=answer, text="busy")
        response = web.StreamResponse()
        await response.prepare(request)
        payload = b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in answer)
        payload += b"data: [DONE]\n\n"
        for at in range(0, len(payload), 7):  # lines arrive in pieces
            await response.write(payload[at : at + 7])
        return response

    async def go() -> Result:
        app = web.Application()
        app.router.add_post("/{role}/{path:.*}", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0])
        target = Target(f"{url}/decode", f"{url}/prefill", "127.0.0.1", 8998)
        (result,) = await send_all(target, [Request([1, 2, 3], 3)], timeout_s=20)
        await runner.cleanup()
        return result

    return asyncio.run(go())


@pytest.mark.parametrize(
    "events",
    [
        [event([5], 1), event([5, 6], 2), event([5, 6, 7], 3)],
        [event([5], 1), event([6, 7], 3)],
    ],
    ids=["cumulative", "incremental"],
)
def test_tokens_of_a_stream(events: list[dict[str, Any]]) -> None:
    """Guards against doubled or lost tokens."""
    result = ask(events, prefill=[])
    assert (result.error, result.output_ids) == (None, [5, 6, 7])
    assert (result.completion_tokens, result.cached_tokens) == (3, 1)
    assert len(result.token_times) == len(events)
    assert 0 < result.ttft_s <= result.latency_s


@pytest.mark.parametrize(
    ("decode", "prefill", "error"),
    [
        (BUSY, [], "503 busy"),
        ([event([5], 1)], BUSY, "prefill: 503 busy"),
        ([event([], 0, aborted("transfer failed"))], [], "transfer failed"),
        # SGLang's answer to an abort of what has not begun.
        ([{"text": "", "meta_info": {"finish_reason": aborted("queued")}}], [], "queued"),
    ],
)
def test_errors_become_results(decode: Answer, prefill: Answer, error: str) -> None:
    """Guards against a run that ends at the first failed request, or that counts it as served."""
    assert ask(decode, prefill).error == error

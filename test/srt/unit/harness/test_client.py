"""The client against a small server of our own: what it sends, and how it reads a stream."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from aiohttp import web

from benchmark.harness.client import Request, Result, Target, send_all

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _stream(request: web.Request, events: list[object]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    payload = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    payload += b"data: [DONE]\n\n"
    for at in range(0, len(payload), 7):  # lines arrive in pieces
        await response.write(payload[at : at + 7])
    return response


def event(ids: list[int], total: int, finish: object = None) -> dict[str, object]:
    meta = {"completion_tokens": total, "prompt_tokens": 3, "cached_tokens": 1}
    details = {"device": 0, "host": 0, "storage": 1, "storage_backend": "file"}
    meta["cached_tokens_details"] = details
    return {"output_ids": ids, "text": "", "meta_info": {**meta, "finish_reason": finish}}


def ask(prefill: Handler, decode: Handler, request: Request, direct: bool = True) -> Result:
    """Serves both handlers on free ports and sends one request."""

    async def go() -> Result:
        runners = []
        urls = []
        for handler in (prefill, decode):
            app = web.Application()
            app.router.add_post("/{path:.*}", handler)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            runners.append(runner)
            urls.append("http://{}:{}".format(*runner.addresses[0]))
        target = Target(urls[1], urls[0], "127.0.0.1", 8998) if direct else Target(urls[1])
        result = (await send_all(target, [request], timeout_s=20))[0]
        for runner in runners:
            await runner.cleanup()
        return result

    return asyncio.run(go())


async def fine(request: web.Request) -> web.StreamResponse:
    return web.json_response({})


def test_token_ids_whether_cumulative_or_incremental() -> None:
    """Guards against doubled or lost tokens: SGLang has a flag that changes what a piece holds."""

    async def cumulative(request: web.Request) -> web.StreamResponse:
        return await _stream(request, [event([5], 1), event([5, 6], 2), event([5, 6, 7], 3)])

    async def incremental(request: web.Request) -> web.StreamResponse:
        return await _stream(request, [event([5], 1), event([6, 7], 3)])

    for handler in (cumulative, incremental):
        result = ask(fine, handler, Request([1, 2, 3], 3))
        assert result.error is None
        assert result.output_ids == [5, 6, 7]
        assert (result.completion_tokens, result.cached_tokens) == (3, 1)
        assert result.cached_by_source == {"device": 0, "host": 0, "storage": 1}
    assert len(result.token_times) == 2
    assert 0 < result.ttft_s <= result.latency_s


def test_errors_become_results() -> None:
    """Guards against a run that ends at the first failed request, or that counts it as served."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="busy")

    async def abort(request: web.Request) -> web.StreamResponse:
        reason = {"type": "abort", "message": "transfer failed"}
        return await _stream(request, [event([], 0, reason)])

    async def answer(request: web.Request) -> web.StreamResponse:
        return await _stream(request, [event([5], 1)])

    async def early(request: web.Request) -> web.StreamResponse:
        reason = {"type": "abort", "message": "in the queue"}
        return await _stream(request, [{"text": "", "meta_info": {"finish_reason": reason}}])

    request = Request([1, 2, 3], 1)
    assert ask(fine, refuse, request).error == "503 busy"
    aborted = ask(fine, abort, request)
    assert (aborted.error, len(aborted.finish_reasons)) == ("transfer failed", 1)
    aborted = ask(fine, early, request)  # SGLang's answer to an abort of what has not begun
    assert (aborted.error, len(aborted.finish_reasons)) == ("in the queue", 1)
    assert ask(refuse, answer, request).error == "prefill: 503 busy"

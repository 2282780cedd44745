"""A server without a model, with SGLang's HTTP API, in this event loop or in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

Json = dict[str, Any]


@dataclass
class Stub:
    """Answers as SGLang does, at fixed times.

    Tests subclass it to delay answers, or to let them fail at a chosen point.
    """

    role: str = "colocated"
    tokens: int | None = None
    """Tokens of an answer, one an event; None: as requested. Prefill answers with one."""
    first_s: float = 0.0
    """Seconds to the first token."""
    gap_s: float = 0.0
    """Seconds from one token to the next."""
    pool_tokens: int = 100_000
    prompt_tokens: int | None = None
    """Reported prompt length; None: the length of ``input_ids``."""
    cached_tokens: int | None = None
    """Reported cached tokens; None: all of a prompt that was sent before."""
    cumulative: bool = True
    """Events repeat all output ids, as without SGLang's ``--incremental-streaming-output``."""
    served: int = 0
    """Number of complete answers."""
    aborted: list[str] = field(default_factory=list)
    """``rid`` of each abort request."""
    _asked: set[tuple[int, ...]] = field(default_factory=set, init=False)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/v1/chat/completions", self.openai),
                web.post("/v1/completions", self.openai),
                web.post("/abort_request", self.abort),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/server_info", self.server_info),
                web.post("/flush_cache", self.flush),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        self._asked.clear()
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        text = f"sglang:token_usage 0.25\nsglang:num_running_reqs 1\nstub:served {self.served}\n"
        return web.Response(text=text)

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"max_total_num_tokens": self.pool_tokens, "internal_states": []})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def arrived(self, body: bytes) -> None:
        """Called with the complete body of a request."""

    async def token(self, number: int) -> None:
        """Wait before token ``number`` of an answer, from 0."""
        pause = self.gap_s if number else self.first_s
        if pause:
            await asyncio.sleep(pause)

    def _count(self, asked: int | None) -> int:
        return 1 if self.role == "prefill" else self.tokens or asked or 8

    async def generate(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        await self.arrived(data)
        body = orjson.loads(data)
        ids = body.get("input_ids") or []
        count = self._count((body.get("sampling_params") or {}).get("max_new_tokens"))
        prompt = len(ids) if self.prompt_tokens is None else self.prompt_tokens
        cached = self.cached_tokens
        if cached is None:
            cached = len(ids) if tuple(ids) in self._asked else 0
        self._asked.add(tuple(ids))

        def event(tokens: int) -> Json:
            meta = {
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "completion_tokens": tokens,
                "finish_reason": {"type": "length", "length": count} if tokens == count else None,
            }
            ids = list(range(tokens)) if self.cumulative else [tokens - 1]
            return {"text": "x" * tokens, "output_ids": ids, "meta_info": meta}

        if not body.get("stream"):
            for number in range(count):
                await self.token(number)
            return web.json_response(event(count))
        return await self._stream(request, [event(tokens + 1) for tokens in range(count)])

    async def openai(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        await self.arrived(data)
        body = orjson.loads(data)
        count = self._count(body.get("max_tokens"))
        is_chat = request.path.endswith("chat/completions")
        piece: Json = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
        events: list[Json] = [{"choices": [{"index": 0, **piece}]} for _ in range(count)]
        events[-1]["choices"][0]["finish_reason"] = "length"
        if (body.get("stream_options") or {}).get("include_usage"):
            text = body.get("prompt") or " ".join(m["content"] for m in body["messages"]).split()
            usage = {"prompt_tokens": len(text), "completion_tokens": count}
            events.append({"choices": [], "usage": usage})
        return await self._stream(request, events)

    async def _stream(self, request: web.Request, events: list[Json]) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for number, event in enumerate(events):
            await self.token(number)
            await out.write(b"data: %b\n\n" % orjson.dumps(event))
        await out.write(b"data: [DONE]\n\n")
        self.served += 1
        return out


@asynccontextmanager
async def serve(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve an app in this event loop; yield its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


@contextmanager
def thread(role: str, gap_s: float = 0.0) -> Iterator[str]:
    """Run a stub in its own thread and event loop until exit; yield its URL."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    worker = threading.Thread(target=loop.run_forever)
    worker.start()
    served = stack.enter_async_context(serve(Stub(role, gap_s=gap_s).app()))
    try:
        yield asyncio.run_coroutine_threadsafe(served, loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        worker.join()

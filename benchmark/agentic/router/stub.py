"""A worker without a model, for tests and for measuring the router alone.

python -m benchmark.agentic.router.stub --port 20001 --role decode
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from benchmark.agentic.router.cli import new_loop


@dataclass
class Stub:
    """Answers as SGLang does, at fixed times.

    Subclassed by tests, which hold it back or let it fail at a point of their choice.
    """

    role: str = "colocated"
    tokens: int = 8
    """Of an answer, one an event."""
    first_s: float = 0.0
    """To the first token."""
    gap_s: float = 0.0
    """From one token to the next."""
    pool_tokens: int = 100_000
    cached_tokens: int = 0
    """What it says it found in its cache."""
    aborted: list[str] = field(default_factory=list)
    """``rid`` of each request that it was told to abort."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/v1/chat/completions", self.chat),
                web.post("/abort_request", self.abort),
                web.get("/health", self.health),
                web.get("/server_info", self.server_info),
                web.post("/flush_cache", self.health),
                web.get("/v1/models", self.models),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub"}]})

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"max_total_num_tokens": self.pool_tokens, "internal_states": []})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def arrived(self, body: bytes) -> None:
        """The whole body of a request is here."""

    async def token(self, number: int) -> None:
        """Before token ``number`` of an answer, from 0."""
        pause = self.gap_s if number else self.first_s
        if pause:
            await asyncio.sleep(pause)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        await self.arrived(body)
        count = 1 if self.role == "prefill" else self.tokens
        if b'"stream":true' not in body.replace(b" ", b""):
            for number in range(count):
                await self.token(number)
            return web.json_response(self._event(count, count))
        return await self._stream(request, [self._event(i + 1, count) for i in range(count)])

    def _event(self, made: int, count: int) -> dict[str, Any]:
        meta = {
            "prompt_tokens": 64,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": made,
            "finish_reason": {"type": "length", "length": count} if made == count else None,
        }
        return {"text": "x" * made, "output_ids": list(range(made)), "meta_info": meta}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        await self.arrived(await request.read())
        pieces = [{"choices": [{"index": 0, "delta": {"content": "x"}}]}] * self.tokens
        return await self._stream(request, pieces)

    async def _stream(
        self, request: web.Request, events: list[dict[str, Any]]
    ) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for number, event in enumerate(events):
            await self.token(number)
            await out.write(b"data: %s\n\n" % msgspec.json.encode(event))
        await out.write(b"data: [DONE]\n\n")
        return out


def main(argv: list[str]) -> int:
    """Serves until interrupted."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--port", type=int, required=True)
    made.add_argument("--role", default="colocated", choices=("colocated", "prefill", "decode"))
    made.add_argument("--first-ms", type=float, default=0.0, help="to the first token")
    made.add_argument("--gap-ms", type=float, default=0.0, help="between tokens")
    args = made.parse_args(argv)
    stub = Stub(args.role, first_s=args.first_ms / 1000, gap_s=args.gap_ms / 1000)
    web.run_app(
        stub.app(),
        host="127.0.0.1",
        port=args.port,
        loop=new_loop(),
        access_log=None,
        print=lambda text: None,
        handler_cancellation=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

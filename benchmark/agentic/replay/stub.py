"""A server without a model that speaks SGLang's streaming ``/generate``.

    python -m benchmark.agentic.replay.stub --port N [--tokens-per-s X]

Every request gets its tokens at a fixed pace. All open streams get theirs in the same step, as from
a decode batch, which is harder on a client than streams that are out of step. The prompt cache is
endless. ``GET /streams`` tells how many are open, were open at most, and have been served.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass

import orjson
from aiohttp import web

from benchmark.harness.ports import allocate_ports

PAGE_TOKENS = 64
_MODEL_TOKEN = b"1234"


@dataclass
class Streams:
    open: int = 0
    most: int = 0
    served: int = 0


class PrefixCache:
    """Has seen every page of every prompt, and never forgets one."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def cached(self, ids: list[int]) -> int:
        """Leading tokens of ``ids`` that were seen before, in whole pages."""
        key, hits, leading = 0, 0, True
        for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS):
            key = hash((key, *ids[end - PAGE_TOKENS : end]))
            leading = leading and key in self._seen
            hits = end if leading else hits
            self._seen.add(key)
        return hits


class Stub:
    """``tokens_per_s``: of each stream. ``cumulative``: every event repeats all output ids, as
    SGLang's do without ``--incremental-streaming-output``. ``worker``: sent back as ``X-Worker``.
    """

    def __init__(
        self, tokens_per_s: float = 20.0, cumulative: bool = True, worker: str | None = None
    ) -> None:
        self._step_s, self._cumulative, self._worker = 1 / tokens_per_s, cumulative, worker
        self._cache = PrefixCache()
        self.streams = Streams()
        self._step = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/streams", self.count)
        app.cleanup_ctx.append(self._steps)
        return app

    async def count(self, request: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(asdict(self.streams)))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        ids = body["input_ids"]
        wanted = body["sampling_params"]["max_new_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self._worker:
            response.headers["X-Worker"] = self._worker
        prompt, cached = len(ids), self._cache.cached(ids)
        await response.prepare(request)
        self.streams.open += 1
        self.streams.most = max(self.streams.most, self.streams.open)
        try:
            output = b""
            for token in range(1, wanted + 1):
                await self._step.wait()
                output = output + b"," + _MODEL_TOKEN if output else _MODEL_TOKEN
                reason = b'{"type":"length","length":%d}' % wanted if token == wanted else b"null"
                await response.write(
                    b'data: {"output_ids":[%b],"meta_info":{"id":"stub","finish_reason":%b,'
                    b'"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":%d}}\n\n'
                    % (output if self._cumulative else _MODEL_TOKEN, reason, prompt, token, cached)
                )
            await response.write(b"data: [DONE]\n\n")
            self.streams.served += 1
        finally:
            self.streams.open -= 1
        return response

    async def _steps(self, app: web.Application) -> AsyncIterator[None]:
        async def forever() -> None:
            due = time.monotonic()
            while True:
                # A step that comes late does not make later ones so.
                due = max(due + self._step_s, time.monotonic() - self._step_s)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._step, now = asyncio.Event(), self._step
                now.set()

        task = asyncio.create_task(forever())
        yield
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def serve(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """An app in this event loop; yields its URL."""
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


@contextmanager
def process(*arguments: str) -> Iterator[str]:
    """The stub as a process of its own; yields its URL. It ends on exit."""
    (port,) = allocate_ports(1)
    command = [sys.executable, "-m", "benchmark.agentic.replay.stub", "--port", str(port)]
    popen = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert popen.stdout is not None
        if not popen.stdout.readline():
            raise RuntimeError(f"the stub ended with status {popen.wait()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        popen.terminate()
        popen.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic.replay.stub")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of each stream")
    parser.add_argument("--incremental", action="store_true", help="events hold new ids only")
    parser.add_argument("--worker", help="name in the X-Worker header")
    parser.add_argument("--core", type=int, help="the CPU to run on")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})

    async def forever() -> None:
        stub = Stub(args.tokens_per_s, not args.incremental, args.worker)
        async with serve(stub.app(), args.port) as url:
            print(url, flush=True)
            await asyncio.Event().wait()

    try:
        asyncio.run(forever())
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()

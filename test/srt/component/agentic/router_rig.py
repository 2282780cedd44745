"""A router and stub workers in one event loop, on ports chosen by the kernel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmark.agentic.router.proxy import Router
from benchmark.agentic.router.schedule import Settings
from component.agentic.stub import Stub


class Worker(Stub):
    """A stub that can be held before any token, can fail, and can be killed."""

    def __init__(self, role: str = "colocated", tokens: int = 3) -> None:
        super().__init__(role, tokens, prompt_tokens=64, cached_tokens=0)
        self.bodies: list[dict[str, Any]] = []
        self.holds: dict[int, asyncio.Event] = {}
        """Token number -> event that releases the token."""
        self.status = 200
        """Status of /generate and /health."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hold(self, number: int) -> asyncio.Event:
        return self.holds.setdefault(number, asyncio.Event())

    async def arrived(self, body: bytes) -> None:
        self.bodies.append(json.loads(body))
        if self.status != 200:
            raise _Refuse(self.status)

    async def token(self, number: int) -> None:
        if number in self.holds:
            await self.holds[number].wait()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def start(self) -> None:
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Stop listening and cut every connection, as the end of a process does, once."""
        for site in list(self._runner.sites):
            await site.stop()
        server = self._runner.server
        for connection in list(server.connections if server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()


class _Refuse(web.HTTPException):
    def __init__(self, status: int) -> None:
        self.status_code = status
        super().__init__(text="stub fails")


class Rig:
    """The router's side of a test: its URL, a client session, and its counts."""

    def __init__(self, router: Router, url: str, session: aiohttp.ClientSession) -> None:
        self.router, self.url, self.session = router, url, session

    async def post(self, body: dict[str, Any], path: str = "/generate", **more: Any) -> Answer:
        async with self.session.post(self.url + path, json=body, **more) as got:
            return Answer(got.status, dict(got.headers), await got.text())

    def ask(self, ids: list[int] | None = None, **more: Any) -> asyncio.Task[Answer]:
        """Start a streaming request."""
        body = {"input_ids": ids or [1, 2, 3], "stream": True, **more}
        return asyncio.create_task(self.post(body))

    def load(self) -> dict[str, int]:
        """Return the number of requests that the router counts at each worker."""
        return {w.url: w.requests for w in self.router.scheduler.workers}

    def advance(self, seconds: float) -> None:
        """Move the clock of the loop's timers forward."""
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + seconds  # type: ignore[method-assign]

    def assert_idle(self) -> None:
        for w in self.router.scheduler.workers:
            assert (w.requests, w.pending_tokens, w.ongoing_tokens, w.added_tokens) == (0,) * 4

    def counts(self, worker: Worker) -> dict[str, int]:
        """Return the router's counts of a worker's outcomes."""
        return next(w.counts for w in self.router.scheduler.workers if w.url == worker.url)


class Answer:
    """The client's answer."""

    def __init__(self, status: int, headers: dict[str, str], text: str) -> None:
        self.status, self.headers, self.text = status, headers, text

    @property
    def events(self) -> list[Any]:
        datas = [line[5:].strip() for line in self.text.splitlines() if line.startswith("data:")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]

    @property
    def errors(self) -> list[str]:
        """Messages of the answer's errors, in either form."""
        if self.status != 200:
            return [json.loads(self.text)["error"]["message"]]
        return [event["error"]["message"] for event in self.events if "error" in event]

    @property
    def whole(self) -> bool:
        """True if a stream ended properly and without an error."""
        return self.status == 200 and not self.errors and self.events[-1] == "[DONE]"


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until other tasks of this loop make ``condition`` true."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, (
            "the condition did not become true in time"
        )
        await asyncio.sleep(0.002)


def run(
    test: Callable[[Rig], Awaitable[None]],
    workers: list[Worker],
    decisions: Path | None = None,
    **settings: Any,
) -> None:
    """Start workers and router, wait until the router is ready, run the test, stop everything.

    Health is checked once at the start, and afterwards only by the test (``check``).
    """

    async def go() -> None:
        async with AsyncExitStack() as stack:
            for worker in workers:
                await worker.start()
                stack.push_async_callback(worker.kill)
            roles = {role: [w.url for w in workers if w.role == role] for role in _ROLES}
            chosen = {
                "policy": "round_robin",
                "prefill_policy": "round_robin",
                "decode_policy": "round_robin",
                "block_tokens": 4,
                "health_interval": 3600.0,
                **settings,
            }
            router = Router(
                Settings(
                    workers=tuple(roles["colocated"]),
                    prefills=tuple((url, 8000 + i) for i, url in enumerate(roles["prefill"])),
                    decodes=tuple(roles["decode"]),
                    **chosen,
                ),
                decisions,
            )
            runner = web.AppRunner(router.app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            session = await stack.enter_async_context(aiohttp.ClientSession())
            rig = Rig(router, "http://{}:{}".format(*runner.addresses[0]), session)
            await until(lambda: all(w.checked for w in router.scheduler.workers))
            await asyncio.wait_for(test(rig), 30)

    # Not the loop of a policy that SGLang has set in this process: uvloop has a clock of its own.
    loop = asyncio.SelectorEventLoop()
    try:
        loop.run_until_complete(go())
    finally:
        loop.close()


_ROLES = ("colocated", "prefill", "decode")

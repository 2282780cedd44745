"""The router as an aiohttp application: health checks, and each request from its arrival to the end
of its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from benchmark.agentic.router.body import CHAT, COMPLETIONS, GENERATE, BadRequest, read
from benchmark.agentic.router.schedule import NoWorker, Scheduler, Settings
from benchmark.agentic.router.workers import AGGREGATED, DECODE, PREFILL, Half, Worker
from benchmark.harness import client

logger = logging.getLogger(__name__)

UPSTREAM_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""Errors of a worker that is not there, or goes away."""
_HEADERS = {
    AGGREGATED: client.WORKER_HEADER,
    PREFILL: client.PREFILL_HEADER,
    DECODE: client.DECODE_HEADER,
}
_MAX_BODY_BYTES = 256 << 20
_CONNECT_S = 5.0
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=25)
"""Above SGLang's response time of 1 to 20 s, during which it waits for its scheduler."""
_ABORT_TIMEOUT = aiohttp.ClientTimeout(total=5)
"""Short, because an abort is only an optimization: the worker also notices closed connections."""
_FLUSH_TIMEOUT = aiohttp.ClientTimeout(total=60)
"""Long enough for a worker with ``?timeout=`` to finish its requests first."""


class ClientGone(Exception):
    """The client has closed its connection."""


class Failed(Exception):
    """A worker failed a request before anything was sent to the client."""

    def __init__(self, worker: Worker, why: str, status: int = 502) -> None:
        super().__init__(f"{worker.role} worker {worker.url} {why}")
        self.url, self.status = worker.url, status


class Unreached(Failed):
    """A worker refused the connection, and no worker has received the request."""


class Router:
    """One router. Serve ``app`` with ``handler_cancellation=True``, so that a request ends when its
    client disconnects."""

    def __init__(self, settings: Settings, decisions: Path | None = None) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings, decisions)
        self._tasks: set[asyncio.Task[Any]] = set()
        """Health checks, halves of pairs, and aborts."""
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES)
        self.app.cleanup_ctx.append(self._run)
        routes = [web.post(path, self._generate) for path in (GENERATE, CHAT, COMPLETIONS)]
        routes += [web.get(path, self._ready) for path in ("/health", "/readiness")]
        routes += [web.route("*", "/flush_cache", self._flush_cache)]
        routes += [web.get("/workers", self._workers)]
        self.app.add_routes(routes)

    async def _run(self, app: web.Application) -> AsyncIterator[None]:
        # Below SGLang's 5 s, so that no request uses a connection that SGLang is closing.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            for worker in self.scheduler.workers:
                self._start(self._watch(worker))
            yield
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, worker: Worker) -> None:
        while True:
            await self.check(worker)
            await asyncio.sleep(self.settings.health_interval)

    async def check(self, worker: Worker) -> None:
        """Check the worker once. When it becomes available, read the size of its pool."""
        tokens = None
        try:
            async with self._session.get(worker.url + "/health", timeout=_HEALTH_TIMEOUT) as answer:
                if answer.status != 200:
                    worker.failed(f"/health answered {answer.status}")
                    return
            if not worker.up:
                url = worker.url + "/server_info"
                async with self._session.get(url, timeout=_HEALTH_TIMEOUT) as info_answer:
                    info = (
                        await info_answer.json(content_type=None)
                        if info_answer.status == 200
                        else {}
                    )
                tokens = info.get("max_total_num_tokens")
        except UPSTREAM_ERRORS as error:
            worker.failed(reason(error), gone=isinstance(error, aiohttp.ClientConnectorError))
        except (ValueError, AttributeError):  # not an SGLang server: its pool size is unknown
            worker.passed()
        else:
            worker.passed(tokens)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Route a request. Retry on another worker only if no worker has received it."""
        body = await request.read()
        settings = self.settings
        try:
            ask = read(
                request.path,
                body,
                request.headers.get(client.SESSION_HEADER),
                block_tokens=settings.block_tokens,
                reserve_limit=settings.reserve_tokens,
            )
        except BadRequest as error:
            return failure(400, str(error))
        unreached: dict[str, str] = {}
        for _ in range(settings.max_attempts):
            try:
                halves = self.scheduler.route(ask, unreached)
            except NoWorker as error:
                unreached[""] = str(error)
                break
            try:
                return await self._serve(request, halves)
            except Unreached as error:
                unreached[error.url] = str(error)
            except Failed as error:
                return failure(error.status, str(error))
            except ClientGone:
                return web.Response(status=499)
        return failure(503, "; ".join(unreached.values()))

    async def _serve(self, request: web.Request, halves: dict[str, Half]) -> web.StreamResponse:
        """Connect to every worker, then send the request. Until then it can be routed again."""
        try:
            for half in halves.values():
                await self._reach(half)
            headers = {_HEADERS[role]: half.worker.url for role, half in halves.items()}
            if AGGREGATED in halves:
                half = halves[AGGREGATED]
                return await self._relay(request, half, half.ask.payload(), headers)
            prefill, decode = halves[PREFILL], halves[DECODE]
            payload = decode.ask.payload(prefill.worker.bootstrap)
            drain = self._start(self._drain(request, prefill, payload))
            relay = self._start(self._relay(request, decode, payload, headers))
            try:
                await asyncio.wait({drain, relay}, return_when=asyncio.FIRST_COMPLETED)
                failed = drain.result() if drain.done() else None
                # Once decode has begun to answer, it needs nothing more from prefill.
                if failed is not None and not decode.begun and not relay.done():
                    raise failed
                return await relay
            finally:
                relay.cancel()
                if decode.outcome != "ok":
                    drain.cancel()
                    self._end(prefill, "abandoned")
        except BaseException:
            for half in halves.values():
                self._end(half, "abandoned")
            raise

    async def _reach(self, half: Half) -> None:
        parts = urlsplit(half.worker.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connecting = asyncio.open_connection(parts.hostname, port)
        try:
            _, writer = await asyncio.wait_for(connecting, _CONNECT_S)
        except UPSTREAM_ERRORS as error:
            half.worker.failed(reason(error), gone=isinstance(error, ConnectionRefusedError))
            half.end("unreached")
            raise Unreached(half.worker, f"cannot be reached: {reason(error)}") from error
        writer.close()

    @asynccontextmanager
    async def _post(
        self, request: web.Request, half: Half, payload: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request and provide the worker's answer.

        Raises:
            Failed: the worker did not complete its answer.
        """
        headers = {"Content-Type": "application/json"}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        url = half.worker.url + half.ask.path
        timeout = aiohttp.ClientTimeout(total=self.settings.request_timeout)
        half.sent = True
        try:
            async with self._session.post(
                url, data=payload, headers=headers, timeout=timeout
            ) as answer:
                yield answer
        except UPSTREAM_ERRORS as error:
            if not half.done:
                self._end(half, "lost")
                status = 504 if isinstance(error, asyncio.TimeoutError) else 502
                raise Failed(half.worker, f"was lost: {reason(error)}", status) from error

    async def _drain(self, request: web.Request, half: Half, payload: bytes) -> Failed | None:
        """Read prefill's answer, which the client does not get. Return an error or None. Prefill
        may end after decode."""
        try:
            async with self._post(request, half, payload) as answer:
                data = await answer.read()
        except Failed as error:
            return error
        self._finish(half, answer.status, data)
        if half.outcome == "ok":
            return None
        why = f"answered {answer.status}: {data[:500].decode(errors='replace')}"
        return Failed(half.worker, why, answer.status if answer.status != 200 else 502)

    async def _relay(
        self, request: web.Request, half: Half, payload: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Send the request to one worker and relay its answer to the client."""
        out = web.StreamResponse(headers=headers)
        tail = b""
        try:
            async with self._post(request, half, payload) as answer:
                kind = answer.headers.get("Content-Type", "application/json")
                out.headers["Content-Type"] = kind
                if answer.status != 200 or not kind.startswith("text/event-stream"):
                    data = await answer.read()
                    self._finish(half, answer.status, data)
                    return web.Response(body=data, status=answer.status, headers=out.headers)
                async for chunk in answer.content.iter_any():
                    # Write only whole events, so that an event can be added if the worker dies.
                    events, end, tail = (tail + chunk).rpartition(b"\n\n")
                    if end:
                        begins = half.take(events)
                        await _write(request, out, events + end)
                        if begins:  # after the write, which the client waits for
                            half.worker.index.learn(half.ask.hashes)
        except Failed as error:
            if not half.begun:
                raise
            tail = b"data: %s\n\ndata: [DONE]\n\n" % _error(error.status, str(error))
        if tail:
            await _write(request, out, tail)
        await _write(request, out, b"")
        self._finish(half, 200, tail)
        return out

    def _finish(self, half: Half, status: int, data: bytes) -> None:
        """Note the end of an answer. ``data``: the part of it that was not taken yet."""
        half.failed = half.failed or status != 200
        if half.take(data):
            half.worker.index.learn(half.ask.hashes)
        self._end(half, "error" if half.failed else "ok")

    def _end(self, half: Half, outcome: str) -> None:
        """End a half. If its answer is incomplete, abort it on the worker, because SGLang checks
        for closed connections only occasionally."""
        if half.end(outcome) and half.sent and outcome in ("lost", "abandoned"):
            self._start(self._abort(half))

    async def _abort(self, half: Half) -> None:
        url, json = half.worker.url + "/abort_request", {"rid": half.ask.rid}
        try:
            async with self._session.post(url, json=json, timeout=_ABORT_TIMEOUT) as answer:
                await answer.read()
        except UPSTREAM_ERRORS as error:
            logger.info("%s of %s: %s", url, half.ask.rid, reason(error))

    async def _ready(self, request: web.Request) -> web.Response:
        """Answer 200 if every worker was checked and a request can be served, else 503."""
        workers = self.scheduler.workers
        up = {worker.role for worker in workers if worker.up}
        served = AGGREGATED in up or {PREFILL, DECODE} <= up
        ready = served and all(worker.checked for worker in workers)
        states = {worker.url: "up" if worker.up else "out" for worker in workers}
        return web.json_response(states, status=200 if ready else 503)

    async def _workers(self, request: web.Request) -> web.Response:
        """Answer with the router's state of each worker."""
        return web.json_response([worker.state() for worker in self.scheduler.workers])

    async def _flush_cache(self, request: web.Request) -> web.Response:
        """Flush all workers' caches and the router's view of each flushed cache. If all succeed,
        forget the sessions' workers too."""

        async def flush(worker: Worker) -> str:
            url = worker.url + request.path_qs
            try:
                async with self._session.post(url, timeout=_FLUSH_TIMEOUT) as answer:
                    if answer.status == 200:
                        worker.index.clear()
                    return str(answer.status)
            except UPSTREAM_ERRORS as error:
                return reason(error)

        workers = self.scheduler.workers
        answers = await asyncio.gather(*map(flush, workers))
        fine = set(answers) == {"200"}
        if fine:
            for pins in self.scheduler.pins.values():
                pins.clear()
        results = {worker.url: text for worker, text in zip(workers, answers, strict=True)}
        return web.json_response(results, status=200 if fine else 502)


async def _write(request: web.Request, out: web.StreamResponse, data: bytes) -> None:
    """Write to the client; ``b""`` ends the answer."""
    try:
        if not out.prepared:
            await out.prepare(request)
        await (out.write(data) if data else out.write_eof())
    except ConnectionResetError as error:
        raise ClientGone from error


def reason(error: BaseException) -> str:
    """Return an error as text for the client. Some errors have no text, or too much of it."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer was cut short"
    if isinstance(error, asyncio.TimeoutError):
        return f"timed out {error}".rstrip()
    return f"{type(error).__name__}: {error}".rstrip(": ")


def failure(status: int, message: str) -> web.Response:
    """Return an error of the router itself, in the form of SGLang's errors."""
    body = _error(status, message)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, message: str) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": "router_error", "code": status}}
    )

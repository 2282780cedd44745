"""One request, from the client's bytes to the end of the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from benchmark.agentic.router import health
from benchmark.agentic.router.body import Ask, BadRequest, read
from benchmark.agentic.router.half import Answer, Failed, Half, Unreached
from benchmark.agentic.router.health import UPSTREAM_ERRORS, reason
from benchmark.agentic.router.schedule import DecisionLog, NoWorker, Route, Scheduler
from benchmark.agentic.router.state import COLOCATED, DECODE, PREFILL
from benchmark.harness import client

logger = logging.getLogger(__name__)

_WORKER_HEADERS = {
    COLOCATED: client.WORKER_HEADER,
    PREFILL: client.PREFILL_HEADER,
    DECODE: client.DECODE_HEADER,
}
_ABORT_TIMEOUT = aiohttp.ClientTimeout(total=5)


class ClientGone(Exception):
    """The client has closed its connection."""


class Proxy:
    """Sends requests where the scheduler says, and tells it how they ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        session: aiohttp.ClientSession,
        log: DecisionLog | None,
    ) -> None:
        self._scheduler, self._session = scheduler, session
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()
        """What outlives its request: prefill's drains, aborts."""

    async def close(self) -> None:
        """Ends what is left."""
        await _cancel(*self._tasks)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Routes a request; tries another worker only while nothing was sent."""
        body = await request.read()
        settings = self._scheduler.settings
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
        for attempt in range(settings.max_attempts):
            try:
                route = self._route(ask, unreached, attempt)
            except NoWorker as error:
                unreached.setdefault("", str(error))
                break
            try:
                return await self._serve(request, ask, route)
            except Unreached as error:
                unreached[error.half.worker.url] = str(error)
            except Failed as error:
                return failure(error.status, str(error))
            except ClientGone:
                return web.Response(status=499)
        return failure(503, "; ".join(unreached.values()))

    def _route(self, ask: Ask, exclude: Iterable[str], attempt: int) -> Route:
        route = self._scheduler.route(ask, tuple(exclude))
        if self._log is not None:
            self._log.write(ask, route, attempt, time.time())
        return route

    async def _serve(self, request: web.Request, ask: Ask, route: Route) -> web.StreamResponse:
        """First every worker has to take a connection, then the request is sent: it may still go
        anywhere while nothing of it was."""
        halves = {role: Half(route, role) for role in route.charges}
        headers = {_WORKER_HEADERS[role]: half.worker.url for role, half in halves.items()}
        sent = False
        try:
            for half in halves.values():
                await self._reach(half)
            bootstrap = None
            if PREFILL in halves:
                worker = halves[PREFILL].worker
                bootstrap = (worker.bootstrap_host, worker.bootstrap_port)
            payload = ask.payload(bootstrap)
            limit = self._scheduler.settings.request_timeout
            authorization = request.headers.get("Authorization")
            sent = True
            for half in halves.values():
                half.post(self._session, request.path, payload, authorization, limit)
            if COLOCATED in halves:
                return await self._relay(request, ask, halves[COLOCATED], headers)
            return await self._pair(request, ask, halves[PREFILL], halves[DECODE], headers)
        except BaseException as error:
            for half in halves.values():
                half.end("given_up" if isinstance(error, Failed) else "client_gone")
            raise
        finally:
            if sent:
                for half in halves.values():
                    if half.outcome in ("lost", "client_gone", "given_up"):
                        self._keep(asyncio.create_task(self._abort(half, ask.rid)))

    async def _reach(self, half: Half) -> None:
        try:
            await health.reach(half.worker.url, self._scheduler.settings.connect_timeout)
        except UPSTREAM_ERRORS as error:
            gone = isinstance(error, ConnectionRefusedError)
            health.failed(half.worker, reason(error), gone=gone)
            half.end("unreached")
            raise Unreached(half, f"cannot be reached: {reason(error)}") from error

    async def _pair(
        self, request: web.Request, ask: Ask, first: Half, second: Half, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Prefill's half and decode's at once; the client gets decode's answer."""
        prefill = asyncio.create_task(self._drain(ask, first, second))
        self._keep(prefill)
        try:
            response = await self._relay(request, ask, second, headers)
        except BaseException:
            await _cancel(prefill)
            raise
        if second.outcome != "ok":
            await _cancel(prefill)
            first.end("given_up")
        return response

    async def _drain(self, ask: Ask, half: Half, other: Half) -> None:
        """Prefill's half, whose answer nobody wants. What goes wrong there ends decode's too,
        unless that has begun to answer: then it has all that it needs of prefill."""
        try:
            got = await half.response()
            data = await got.read()
        except UPSTREAM_ERRORS as error:
            failed = self._lost(half, error)
        else:
            half.begin()
            _take(half.answer, got, data)
            if got.status == 200 and not half.answer.got.error:
                self._learn(half, ask, ask.prompt.hashes)
                half.end("ok")
                return
            half.end("error")
            why = half.answer.got.error or data[:500].decode(errors="replace")
            failed = Failed(
                half, f"answered {got.status}: {why}", got.status if got.status != 200 else 502
            )
        if other.outcome is None and not other.begun:
            other.abandon(failed)

    async def _relay(
        self, request: web.Request, ask: Ask, half: Half, headers: dict[str, str]
    ) -> web.StreamResponse:
        """The half whose answer the client gets."""
        out: web.StreamResponse | None = None
        tail = b""
        try:
            got = await half.response()
            headers["Content-Type"] = got.headers.get("Content-Type", "application/json")
            if got.status != 200 or not _is_stream(got):
                data = await got.read()
                half.begin()
                _take(half.answer, got, data)
                self._finish(half, ask, got.status)
                return web.Response(body=data, status=got.status, headers=headers)
            async for chunk in got.content.iter_any():
                first = out is None
                if out is None:
                    half.begin()
                    out = await _prepare(request, headers)
                # Only whole events, so that we can add one if the worker dies.
                tail += chunk
                end = tail.rfind(b"\n\n") + 2
                if end > 1:
                    events, tail = tail[:end], tail[end:]
                    await _write(out, events)
                    half.answer.take_stream(events)
                if first:  # after the write: the client waits for that one
                    half.worker.index.learn(ask.prompt.hashes)
        except UPSTREAM_ERRORS as error:
            if not half.answer.done:
                failed = self._lost(half, error)
                if out is None:
                    raise failed from error
                tail = b"data: %s\n\ndata: [DONE]\n\n" % _error(failed.status, str(failed))
        if out is None:
            out = await _prepare(request, headers)
        if tail:
            await _write(out, tail)
        await _write(out, None)
        self._finish(half, ask, 200)
        return out

    def _lost(self, half: Half, error: BaseException) -> Failed:
        """A worker did not finish what it was sent."""
        cause = half.cause(error)
        if isinstance(cause, Failed):
            half.end("given_up")
            return cause
        half.end("lost")
        status = 504 if isinstance(cause, asyncio.TimeoutError) else 502
        return Failed(half, f"was lost: {reason(cause)}", status)

    def _finish(self, half: Half, ask: Ask, status: int) -> None:
        """The answer has come to its end, good or not."""
        if status != 200 or half.answer.got.error:
            half.end("error")
            return
        if half.outcome is None:
            answer = half.answer.got
            self._learn(half, ask, ask.prompt.answered(answer.output_ids, answer.text))
        half.end("ok")

    def _learn(self, half: Half, ask: Ask, hashes: tuple[int, ...]) -> None:
        """What the worker holds now, and what it said it held before."""
        worker, share = half.worker, half.answer.held_share
        # Decode reports what prefill held, which says nothing about decode's own tree.
        if share is not None and worker.role != DECODE:
            worker.correct(ask.prompt.hashes, half.believed_blocks, share)
            worker.counts["believed_tokens"] += half.believed_blocks * worker.block_tokens
            worker.counts["reported_tokens"] += round(share * ask.work.tokens)
        worker.index.learn(hashes)

    async def _abort(self, half: Half, rid: str) -> None:
        """Ends a request at a worker now; SGLang looks for closed connections only now and then."""
        url = half.worker.url + "/abort_request"
        try:
            async with self._session.post(url, json={"rid": rid}, timeout=_ABORT_TIMEOUT) as got:
                await got.read()
        except UPSTREAM_ERRORS as error:
            logger.info("abort of %s at %s: %s", rid, half.worker.url, reason(error))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _prepare(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    out = web.StreamResponse(headers=headers)
    try:
        await out.prepare(request)
    except ConnectionResetError as error:
        raise ClientGone from error
    return out


async def _write(out: web.StreamResponse, data: bytes | None) -> None:
    """``None``: the end."""
    try:
        await (out.write_eof() if data is None else out.write(data))
    except ConnectionResetError as error:
        raise ClientGone from error


def _is_stream(got: aiohttp.ClientResponse) -> bool:
    return got.headers.get("Content-Type", "").startswith("text/event-stream")


def _take(answer: Answer, got: aiohttp.ClientResponse, data: bytes) -> None:
    """An answer that came as a whole."""
    if _is_stream(got):
        answer.take_stream(data)
    elif got.status == 200:
        answer.take(data)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def failure(status: int, message: str) -> web.Response:
    """An error of the router's own, in the form that SGLang gives its errors."""
    body = _error(status, message)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, message: str) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": "router_error", "code": status}}
    )

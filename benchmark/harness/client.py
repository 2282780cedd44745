"""The streaming client: sends requests like a PD load balancer, and records token arrival times.

A pair is addressed either directly, with two requests to prefill and decode that carry the same
random bootstrap room, or by the URL of a load balancer that adds the room.

A ``Request`` is read completely, to compare answers. A ``Message`` is for replays, where hundreds
of streams share a core: its body is prepared, token ids are dropped, its answer must have exactly
the requested length, and a failure of one half of a pair ends the other half at once.
"""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from benchmark.harness.stream import TEXT, ErrorKind, Failed, Json, Result, take

SESSION_HEADER = "X-Session-Id"
PREFILL_HEADER = "X-Prefill-Worker"
DECODE_HEADER = "X-Decode-Worker"
WORKER_HEADER = "X-Worker"
__all__ = ["Json", "Message", "Request", "Result", "Target", "open_session", "send", "send_all"]

_rooms = random.SystemRandom()


@dataclass(frozen=True)
class Target:
    """Target of requests. Without ``prefill_url``, ``url`` is a server or a load balancer."""

    url: str
    prefill_url: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None

    def route(self) -> Json:
        """Return the fields that connect a request's two halves; each call makes a new room."""
        if self.prefill_url is None:
            return {}
        return {
            "bootstrap_host": self.bootstrap_host,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": _rooms.getrandbits(63),
        }


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids, text, or chat messages."""

    prompt: Sequence[int] | str | Sequence[Mapping[str, str]]
    max_new_tokens: int
    ignore_eos: bool = True
    """Generate exactly ``max_new_tokens``, so that two arms do the same work."""
    label: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request body, such as ``extra_key``."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str) and bool(
            len(self.prompt) and isinstance(self.prompt[0], Mapping)
        )

    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/generate"

    def body(self) -> Json:
        if self.is_chat:
            return {
                "model": "default",
                "messages": list(self.prompt),
                "max_tokens": self.max_new_tokens,
                "temperature": 0,
                "ignore_eos": self.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.extra,
            }
        key = "text" if isinstance(self.prompt, str) else "input_ids"
        return {
            key: self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self.max_new_tokens,
                "ignore_eos": self.ignore_eos,
            },
            "stream": True,
            **self.extra,
        }


@dataclass(frozen=True)
class Message:
    """A prepared request; see the module."""

    body: bytes
    """A JSON object."""
    wanted_tokens: int
    session_id: str | None = None
    path: str = "/generate"


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: Request | Message,
    result: Result | None = None,
) -> Result:
    """Send one request and read its stream to the end. Errors of a server do not raise.

    ``result``: a new record to fill, for callers that cancel and need what arrived until then.
    """
    if exact := isinstance(request, Message):
        message, label = request, ""
    else:
        message = Message(orjson.dumps(request.body()), 0, path=request.path())
        label = request.label
    result = result or Result(label, time.monotonic())
    try:
        if target.prefill_url is None:
            await _stream(session, target.url, message, result, exact)
        else:
            await _pair(session, target, message, result, exact)
        if exact:
            _check(result, message.wanted_tokens)
    except Failed as failure:
        result.fail(failure.kind, str(failure))
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        result.fail(_kind(error, result), f"{type(error).__name__}: {error}".removesuffix(": "))
    result.finished_at = time.monotonic()
    result.decode_worker = result.decode_worker or target.url
    result.prefill_worker = result.prefill_worker or target.prefill_url or result.decode_worker
    return result


async def send_all(
    target: Target,
    requests: Sequence[Request],
    concurrency: int | None = None,
    timeout_s: float = 600.0,
) -> list[Result]:
    """Send the requests, at most ``concurrency`` at once (None: all). Return results in order."""
    gate = asyncio.Semaphore(concurrency or max(1, len(requests)))

    async def send_one(request: Request) -> Result:
        async with gate:
            return await send(session, target, request)

    async with open_session(timeout_s) as session:
        return list(await asyncio.gather(*(send_one(request) for request in requests)))


def open_session(
    timeout_s: float = 600.0, *, reuse: bool = True, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session without aiohttp's limit of 100 connections, which would queue requests.

    ``timeout_s``: for each request, from connecting to the last byte. ``reuse=False`` opens a
    connection for each request, because a server may close a connection that was idle for its
    keep-alive time just as the next request is sent. ``headers``: sent with each request.
    """
    trace = aiohttp.TraceConfig()

    async def sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if isinstance(result := context.trace_request_ctx, Result):  # not so for other requests
            result.sent_at = time.monotonic()

    # Called in the same step of the event loop as the write of the body, just before it.
    trace.on_request_chunk_sent.append(sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not reuse),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        trace_configs=[trace],
        read_bufsize=2**18,
        headers=headers,
    )


async def _pair(
    session: aiohttp.ClientSession, target: Target, message: Message, result: Result, exact: bool
) -> None:
    """Send both halves at once, connected by a room. With ``exact``, if one half fails the other is
    dropped; otherwise decode is read to its end first, because its answer about a failed prefill
    counts."""
    assert target.prefill_url is not None
    message = replace(message, body=message.body[:-1] + b"," + orjson.dumps(target.route())[1:])
    prefill = asyncio.ensure_future(_drain(session, target.prefill_url, message, result))
    decode = asyncio.ensure_future(_stream(session, target.url, message, result, exact))
    halves = {prefill, decode}
    try:
        if exact:
            await asyncio.wait(halves, return_when=asyncio.FIRST_EXCEPTION)
            if prefill.done():
                prefill.result()
        try:
            await decode
        except Failed as failure:
            if exact:
                raise
            result.fail(failure.kind, str(failure))
        await prefill
    finally:
        for half in halves:
            half.cancel()
        await asyncio.wait(halves)


def _post(
    session: aiohttp.ClientSession, url: str, message: Message, result: Result
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    headers = {"Content-Type": "application/json"}
    if message.session_id is not None:
        headers[SESSION_HEADER] = message.session_id
    return session.post(
        url + message.path, data=message.body, headers=headers, trace_request_ctx=result
    )


async def _drain(
    session: aiohttp.ClientSession, url: str, message: Message, result: Result
) -> None:
    """Send prefill's half, and discard its answer."""
    async with _post(session, url, message, result) as response:
        try:
            await _check_status(response)
        except Failed as failure:
            raise Failed(failure.kind, f"prefill: {failure}") from None
        await response.read()


async def _stream(
    session: aiohttp.ClientSession, url: str, message: Message, result: Result, exact: bool
) -> None:
    async with _post(session, url, message, result) as response:
        colocated = response.headers.get(WORKER_HEADER)
        result.prefill_worker = response.headers.get(PREFILL_HEADER, colocated)
        result.decode_worker = response.headers.get(DECODE_HEADER, colocated)
        await _check_status(response)
        tail = b""
        async for chunk in response.content.iter_any():
            now = time.monotonic()
            *lines, tail = (tail + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and b"[DONE]" not in line[:14]:
                    take(result, line[5:], now, exact)


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        kind: ErrorKind = "http_4xx" if response.status < 500 else "http_5xx"
        raise Failed(kind, f"{response.status} {(await response.text())[:TEXT]}")


def _check(result: Result, wanted: int) -> None:
    tokens = result.completion_tokens
    if not result.ended:
        raise Failed("broken_stream", f"the stream ended after {tokens} of {wanted} tokens")
    cut = {"type": "length"} in result.finish_reasons
    if tokens < wanted and cut and not result.counted and result.totals:
        # Pieces held several tokens or none, and no usage was sent: "length" means a full answer.
        result.completion_tokens = result.totals[-1] = wanted
    elif tokens < wanted:
        raise Failed("short_answer", f"{tokens} of {wanted} tokens")


def _kind(error: BaseException, result: Result) -> ErrorKind:
    if isinstance(error, asyncio.TimeoutError):  # aiohttp's timeouts are connection errors as well
        return "timeout"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "open_files"
    if isinstance(error, aiohttp.ClientConnectorError) or result.sent_at is None:
        return "connect"
    return "broken_stream"

"""One request: its stream, the time of each token, errors by kind.

``benchmark.harness.client`` keeps whole answers, to compare them. Here hundreds of streams share a
core: events are decoded into the few fields that are counted, and token ids are dropped.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import orjson

from benchmark.agentic.replay.outcome import ErrorKind
from benchmark.agentic.replay.prepare import Endpoint
from benchmark.harness.client import Target

SESSION_HEADER = "X-Session-Id"
PREFILL_HEADER, DECODE_HEADER, WORKER_HEADER = "X-Prefill-Worker", "X-Decode-Worker", "X-Worker"
PATHS: Mapping[Endpoint, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_TEXT = 300  # characters of an error page that are kept


@dataclass(frozen=True)
class Message:
    """What goes out."""

    body: bytes
    """A JSON object."""
    wanted_tokens: int
    session_id: str | None = None
    path: str = "/generate"


@dataclass
class Answer:
    """What came back. Times are seconds on this process's monotonic clock."""

    started: float
    sent: float | None = None
    finished: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each piece came that brought new tokens."""
    totals: list[int] = field(default_factory=list)
    """Output tokens so far, after each piece."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: ErrorKind | None = None
    message: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    ended: bool = False
    """The server gave a reason for the end."""

    @property
    def output_tokens(self) -> int:
        return self.totals[-1] if self.totals else 0


class Failed(Exception):
    """A request that has no full answer."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        self.kind: ErrorKind = kind
        super().__init__(message)


class _Meta(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None


class _Piece(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Piece | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def open_session(
    timeout_s: float, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """No limit of connections, and none used twice: one that idled for the server's keep-alive time
    may be closed by it just as the next request goes out, which would count as the server's error.
    ``timeout_s`` is for each request, from connecting to the last byte; ``headers`` go with each.
    """
    trace = aiohttp.TraceConfig()

    async def sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.sent = time.monotonic()

    # Called in the step of the event loop that writes the body, just before it does.
    trace.on_request_chunk_sent.append(sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        trace_configs=[trace],
        read_bufsize=2**18,
        headers=headers,
    )


async def send(session: aiohttp.ClientSession, target: Target, message: Message) -> Answer:
    """Sends one request and reads its answer to the end. Never raises for what a server did."""
    answer = Answer(time.monotonic())
    try:
        await (_pair if target.prefill_url else _single)(session, target, message, answer)
        _check(answer, message.wanted_tokens)
    except Failed as failure:
        answer.error, answer.message = failure.kind, str(failure)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        answer.error, answer.message = _kind(error, answer), _describe(error)
    answer.finished = time.monotonic()
    answer.decode_worker = answer.decode_worker or target.url
    answer.prefill_worker = answer.prefill_worker or target.prefill_url or answer.decode_worker
    return answer


async def _single(
    session: aiohttp.ClientSession, target: Target, message: Message, answer: Answer
) -> None:
    await _stream(session, target.url, message, answer)


async def _pair(
    session: aiohttp.ClientSession, target: Target, message: Message, answer: Answer
) -> None:
    """Both halves at once, brought together by a room. If one fails, the other is dropped."""
    assert target.prefill_url is not None
    body = message.body[:-1] + b"," + orjson.dumps(target.route())[1:]
    prefill = asyncio.ensure_future(
        _drain(session, target.prefill_url, replace(message, body=body), answer)
    )
    decode = asyncio.ensure_future(
        _stream(session, target.url, replace(message, body=body), answer)
    )
    halves = {prefill, decode}
    try:
        await asyncio.wait(halves, return_when=asyncio.FIRST_EXCEPTION)
        if prefill.done() and (error := prefill.exception()):
            if isinstance(error, Failed):
                raise Failed(error.kind, f"prefill: {error}")
            raise error
        await decode
        await prefill
    finally:
        for half in halves:
            half.cancel()
        await asyncio.wait(halves)


def _post(
    session: aiohttp.ClientSession, url: str, message: Message, answer: Answer
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    headers = {"Content-Type": "application/json"}
    if message.session_id is not None:
        headers[SESSION_HEADER] = message.session_id
    return session.post(
        url + message.path, data=message.body, headers=headers, trace_request_ctx=answer
    )


async def _drain(
    session: aiohttp.ClientSession, url: str, message: Message, answer: Answer
) -> None:
    async with _post(session, url, message, answer) as response:
        await _check_status(response)
        await response.read()


async def _stream(
    session: aiohttp.ClientSession, url: str, message: Message, answer: Answer
) -> None:
    async with _post(session, url, message, answer) as response:
        _workers(response.headers, answer)
        await _check_status(response)
        tail = b""
        async for chunk in response.content.iter_any():
            now = time.monotonic()
            *lines, tail = (tail + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and b"[DONE]" not in line[:14]:
                    take(answer, line[5:], now)


def take(answer: Answer, data: bytes, now: float) -> None:
    """One event of the stream, without its ``data:``, that was read at ``now``."""
    try:
        event = _decode(data)
    except ValueError as error:
        raise Failed("broken_stream", f"unreadable event: {error}: {data[:_TEXT]!r}") from error
    meta = event.meta_info
    if meta is None and not event.error and (event.choices is not None or event.usage is not None):
        _take_openai(answer, event, now)
        return
    if meta is None:
        raise Failed("abort", _text(event.error or data))
    if answer.ended:
        raise Failed("broken_stream", "an event after the answer's end")
    reason = meta.finish_reason
    if reason is not None and reason.get("type") == "abort":
        raise Failed("abort", _text(reason.get("message", "aborted")))
    if meta.completion_tokens > answer.output_tokens:
        answer.times.append(now)
        answer.totals.append(meta.completion_tokens)
    answer.prompt_tokens = meta.prompt_tokens
    answer.cached_tokens = meta.cached_tokens
    answer.ended = reason is not None


def _take_openai(answer: Answer, event: _Event, now: float) -> None:
    """A chunk of OpenAI's endpoints: a token for each piece of text, unless the server counts."""
    pieces = 0
    for choice in event.choices or ():
        piece = choice.delta
        said = choice.text or (piece and (piece.content or piece.reasoning_content))
        pieces += bool(said)
        if choice.finish_reason == "abort":
            raise Failed("abort", "the server aborted the request")
        answer.ended = answer.ended or choice.finish_reason is not None
    total = answer.output_tokens + pieces
    if (usage := event.usage) is not None:
        answer.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
        total = max(answer.output_tokens, usage.completion_tokens or total)
    if total <= answer.output_tokens:
        return
    if pieces or not answer.times:
        answer.times.append(now)
        answer.totals.append(total)
    else:  # the count at the end: pieces had several tokens
        answer.totals[-1] = total


def _check(answer: Answer, wanted: int) -> None:
    got = answer.output_tokens
    if not answer.ended:
        raise Failed("broken_stream", f"the stream ended after {got} of {wanted} tokens")
    if got < wanted:
        raise Failed("short_answer", f"{got} of {wanted} tokens")


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        kind: ErrorKind = "http_4xx" if response.status < 500 else "http_5xx"
        raise Failed(kind, f"{response.status} {(await response.text())[:_TEXT]}")


def _workers(headers: Mapping[str, str], answer: Answer) -> None:
    colocated = headers.get(WORKER_HEADER)
    answer.prefill_worker = headers.get(PREFILL_HEADER, colocated)
    answer.decode_worker = headers.get(DECODE_HEADER, colocated)


def _kind(error: BaseException, answer: Answer) -> ErrorKind:
    if isinstance(error, asyncio.TimeoutError):  # aiohttp's timeouts are connection errors as well
        return "timeout"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "open_files"
    if isinstance(error, aiohttp.ClientConnectorError) or answer.sent is None:
        return "connect"
    return "broken_stream"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _text(value: object) -> str:
    """The message of an error, whatever form it has."""
    if isinstance(value, Mapping) and "message" in value:
        value = value["message"]
    return str(value)[:_TEXT]

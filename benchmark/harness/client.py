"""Sends requests the way SGLang's PD load balancer does, and records when each token came.

A pair is addressed either directly, with one request to prefill and decode at once that carry the
same random bootstrap room, or by the URL of a load balancer that does that for us.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

Json = dict[str, Any]

_rooms = random.SystemRandom()


@dataclass(frozen=True)
class Target:
    """Where requests go. With ``prefill_url`` unset, ``url`` is a server or a load balancer."""

    url: str
    prefill_url: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None

    def route(self) -> Json:
        """The fields that bring a request's two halves together; a new room each time."""
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


@dataclass
class Result:
    """What came back. Times are seconds on this process's monotonic clock."""

    label: str
    started_at: float
    token_times: list[float] = field(default_factory=list)
    """When each piece of the answer arrived; a piece is one token unless the server merged some."""
    output_ids: list[int] = field(default_factory=list)
    """Empty for chat requests, whose endpoint returns text only."""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that prefill found in its cache, as the server reports them."""
    cached_by_source: Mapping[str, int] = field(default_factory=dict)
    """The same by where they were: ``device``, ``host``, ``storage`` (``/generate`` only)."""
    completion_tokens: int = 0
    verify_steps: int = 0
    """With speculation: steps of the target, each of which said at least one token."""
    drafted_tokens: int = 0
    """With speculation: tokens that the draft model proposed in them."""
    accepted_tokens: int = 0
    """Those of them that the target said too."""
    finished_at: float = 0.0
    http_bytes: int = 0
    """Bodies of all requests and answers, bytes; headers are not counted."""
    error: str | None = None
    finish_reasons: list[Json] = field(default_factory=list)
    """What the server said as it ended the answer (``/generate`` only): one entry, unless it ended
    it twice or never."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return (self.token_times[0] if self.token_times else self.finished_at) - self.started_at

    @property
    def latency_s(self) -> float:
        return self.finished_at - self.started_at

    @property
    def itl_s(self) -> float | None:
        """Seconds from one token to the next, the mean over the answer; None below two tokens.

        A mean, as single gaps say more about when this process got to read: tokens that arrive
        while it is busy all seem to come at once.
        """
        if self.completion_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.completion_tokens - 1)

    @property
    def answer(self) -> Sequence[int] | str:
        """What to compare between arms: token ids where there are any, else text."""
        return self.output_ids or self.text


async def send(
    session: aiohttp.ClientSession, target: Target, request: Request, result: Result | None = None
) -> Result:
    """Sends one request and reads its stream to the end. Never raises for what a server did.

    ``result``: a new record to fill, for callers that want what had arrived when they cancelled.
    """
    body = {**request.body(), **target.route()}
    result = result or Result(request.label, time.monotonic())
    prefill: asyncio.Task[str | None] | None = None
    try:
        if target.prefill_url is not None:
            url = target.prefill_url + request.path()
            prefill = asyncio.create_task(_drain(session, url, body, result))
        async for event in _events(session, target.url + request.path(), body, result):
            _take(result, event, request.is_chat)
        if prefill is not None and (error := await prefill):
            result.error = result.error or f"prefill: {error}"
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        if prefill is not None:
            prefill.cancel()
    result.finished_at = time.monotonic()
    return result


async def send_all(
    target: Target,
    requests: Sequence[Request],
    concurrency: int | None = None,
    timeout_s: float = 600.0,
) -> list[Result]:
    """Sends the requests, at most ``concurrency`` at once (None: all); results in their order."""
    gate = asyncio.Semaphore(concurrency or max(1, len(requests)))

    async def one(request: Request) -> Result:
        async with gate:
            return await send(session, target, request)

    async with open_session(timeout_s) as session:
        return list(await asyncio.gather(*(one(request) for request in requests)))


def open_session(timeout_s: float = 600.0, *, reuse: bool = True) -> aiohttp.ClientSession:
    """A session without aiohttp's limit of 100 connections, which would queue on our side.

    ``reuse=False`` opens a connection for each request: one that idled for the server's keep-alive
    time may be closed by it just as the next request goes out.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not reuse),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


async def _drain(
    session: aiohttp.ClientSession, url: str, body: Json, result: Result
) -> str | None:
    """Prefill's half of a request; returns what went wrong there."""
    async with _post(session, url, body, result) as answer:
        text = await answer.text()
        result.http_bytes += len(text)
        return None if answer.status == 200 else f"{answer.status} {text[:300]}"


def _post(
    session: aiohttp.ClientSession, url: str, body: Json, result: Result
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    data = orjson.dumps(body)
    result.http_bytes += len(data)
    return session.post(url, data=data, headers={"Content-Type": "application/json"})


async def _events(
    session: aiohttp.ClientSession, url: str, body: Json, result: Result
) -> AsyncIterator[Json]:
    """The JSON objects of a server-sent event stream."""
    async with _post(session, url, body, result) as answer:
        if answer.status != 200:
            yield {"error": f"{answer.status} {(await answer.text())[:300]}"}
            return
        buffer = b""
        async for chunk in answer.content.iter_any():
            result.http_bytes += len(chunk)
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield orjson.loads(data)


def _take(result: Result, event: Json, is_chat: bool) -> None:
    """Adds one event of the stream to the result."""
    if "error" in event:
        result.error = str(event["error"])
    elif is_chat:
        _take_chat(result, event)
    else:
        _take_generate(result, event)


def _take_chat(result: Result, event: Json) -> None:
    for choice in event.get("choices", ()):
        if piece := choice["delta"].get("content"):
            result.text += piece
            result.token_times.append(time.monotonic())
    if usage := event.get("usage"):
        result.prompt_tokens = usage["prompt_tokens"]
        result.completion_tokens = usage["completion_tokens"]
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _take_generate(result: Result, event: Json) -> None:
    meta = event["meta_info"]
    if reason := meta.get("finish_reason"):
        result.finish_reasons.append(reason)
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        result.error = str(meta["finish_reason"].get("message", "aborted"))
        return
    count = meta["completion_tokens"]
    if count > result.completion_tokens:
        result.token_times.append(time.monotonic())
    result.completion_tokens = count
    result.prompt_tokens = meta["prompt_tokens"]
    result.cached_tokens = meta["cached_tokens"]
    details = meta.get("cached_tokens_details") or {}
    # The name of the storage backend is among them.
    result.cached_by_source = {k: n for k, n in details.items() if isinstance(n, int)}
    result.verify_steps = meta.get("spec_verify_ct", 0)
    result.drafted_tokens = meta.get("spec_draft_token_num", 0)
    result.accepted_tokens = meta.get("spec_accept_token_num", 0)
    # Cumulative by default; only the new ones with --incremental-streaming-output.
    ids = event.get("output_ids", [])
    result.output_ids = list(ids) if len(ids) == count else result.output_ids + list(ids)
    result.text = event.get("text", "")

"""Connections to workers: connecting and sending are two steps.

A request, or both halves of one, is sent only once each worker concerned has given a connection. So
a worker that cannot be reached is found out while nothing was sent and the request may still go
anywhere. aiohttp's client does both in one step, and takes longer for it; its protocol and parser
are what is used here.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError, RawResponseMessage
from aiohttp.streams import StreamReader

UPSTREAM_ERRORS = (aiohttp.ClientError, HttpProcessingError, asyncio.TimeoutError, OSError)
"""What a worker that is not there, or goes away, raises."""
_IDLE_SECONDS = 3.0
"""Less than SGLang's 5 s: a request must not meet a connection that is just being closed."""


class Connection:
    """One connection, used for one request at a time."""

    def __init__(self, pool: Pool, url: str, protocol: ResponseHandler) -> None:
        self._pool, self._url, self._protocol = pool, url, protocol
        self._abandoned: BaseException | None = None

    @property
    def usable(self) -> bool:
        return self._protocol.is_connected()

    def post(self, path: str, body: bytes, authorization: str | None) -> None:
        """Sends a request. Never raises: a broken connection shows when its answer is read."""
        parts = urlsplit(self._url)
        head = f"POST {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if authorization is not None:
            head += f"Authorization: {authorization}\r\n"
        self._protocol.set_response_params(read_until_eof=True, auto_decompress=False)
        if self._protocol.transport is not None:
            self._protocol.transport.write(f"{head}\r\n".encode() + body)

    async def answer(self) -> tuple[RawResponseMessage, StreamReader]:
        """Status and headers, and the body as it comes; either raises ``UPSTREAM_ERRORS``."""
        return await self._protocol.read()

    def abandon(self, why: BaseException) -> None:
        """Closes it under whoever reads from it; they find ``why`` in ``cause``."""
        if self._abandoned is None:
            self._abandoned = why
        if self._protocol.transport is not None:
            self._protocol.transport.abort()

    def cause(self, error: BaseException) -> BaseException:
        """Why reading raised ``error``."""
        return self._abandoned or error

    def release(self) -> None:
        """Back to the pool if the answer was read to its end, else closed."""
        if self._abandoned is None and not self._protocol.should_close and self.usable:
            self._pool.put(self._url, self._protocol)
        else:
            self._protocol.abort()


class Pool:
    """Idle connections, by worker; as many as there were requests at once, for a few seconds."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._idle: dict[str, deque[tuple[ResponseHandler, float]]] = {}

    async def connect(self, url: str) -> Connection:
        """An idle connection or a new one. Raises ``UPSTREAM_ERRORS``."""
        idle = self._idle.setdefault(url, deque())
        oldest = time.monotonic() - _IDLE_SECONDS
        while idle and idle[0][1] < oldest:
            idle.popleft()[0].close()
        while idle:
            protocol, _ = idle.pop()
            if protocol.is_connected() and not protocol.should_close:
                return Connection(self, url, protocol)
            protocol.close()
        loop = asyncio.get_running_loop()
        parts = urlsplit(url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        _, protocol = await asyncio.wait_for(
            loop.create_connection(
                lambda: ResponseHandler(loop), parts.hostname or "", port, ssl=secure
            ),
            self._connect_timeout,
        )
        return Connection(self, url, protocol)

    def put(self, url: str, protocol: ResponseHandler) -> None:
        self._idle[url].append((protocol, time.monotonic()))

    def close(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop()[0].close()


def reason(error: BaseException) -> str:
    """What went wrong, for a client: some errors have no text of their own, or too much."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer broke off"
    if isinstance(error, asyncio.TimeoutError):
        return f"timed out {error}".rstrip()
    return f"{type(error).__name__}: {error}".rstrip(": ")

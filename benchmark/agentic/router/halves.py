"""A request's connections to its workers, and when it is safe to send it elsewhere.

A request goes to a worker, or in two halves to prefill and decode. Nothing is sent before every
half has a connection, so a worker that cannot be reached is found out while the request may still
go anywhere. Once a byte is sent, a worker may have begun to work on it, and it is never sent again.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from aiohttp.client import ClientRequest, ClientTimeout
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace


UPSTREAM_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What a worker that is not there, or goes away, raises."""


class Start:
    """Holds the halves of one request back until each has a connection."""

    def __init__(self, halves: int) -> None:
        self._missing = halves
        self._open = asyncio.Event()

    @property
    def opened(self) -> bool:
        """Whether anything may have been sent."""
        return self._open.is_set()

    async def connected(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._open.set()
        await self._open.wait()


start_of_request: ContextVar[Start | None] = ContextVar("start_of_request", default=None)


class Connector(aiohttp.TCPConnector):
    """A connector whose connections wait for the other halves of their request."""

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        start = start_of_request.get()
        if start is not None:
            try:
                await start.connected()
            except BaseException:
                connection.close()
                raise
        return connection


def open_session(connect_timeout: float, request_timeout: float) -> aiohttp.ClientSession:
    """The session for all requests to workers.

    Idle connections are closed before SGLang closes them (after 5 s): a request must not meet a
    connection that is just being closed, as it could not be sent again.
    """
    return aiohttp.ClientSession(
        connector=Connector(limit=0, keepalive_timeout=3.0, ttl_dns_cache=60),
        timeout=aiohttp.ClientTimeout(total=request_timeout, sock_connect=connect_timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept-Encoding", "User-Agent"),
    )


def reason(error: BaseException) -> str:
    """What went wrong, for a client: some of these errors have no text of their own."""
    if isinstance(error, asyncio.TimeoutError):
        return f"timed out {error}".rstrip()
    return f"{type(error).__name__}: {error}".rstrip(": ")

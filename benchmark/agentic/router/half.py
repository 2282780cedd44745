"""A request at one of its workers: its charge, its exchange with the worker, and how it ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp

from benchmark.agentic.router.schedule import Route
from benchmark.harness import stream
from benchmark.harness.stream import Result, take


class Half:
    """A request at one of its workers."""

    def __init__(self, route: Route, role: str) -> None:
        self.worker = route.charges[role].worker
        self.believed_blocks = route.matched_blocks[role]
        self.answer = Answer()
        self.begun = False
        """Whether its answer has begun: the worker has the prompt's KV."""
        self.outcome: str | None = None
        """``ok``, ``error`` (its own answer), ``lost``, ``unreached``, ``client_gone``,
        ``given_up`` (for the other half's sake); None while it runs."""
        self._charge = route.charges[role]
        self._posted: asyncio.Future[aiohttp.ClientResponse] | None = None
        self._abandoned: BaseException | None = None

    def post(
        self,
        session: aiohttp.ClientSession,
        path: str,
        payload: bytes,
        authorization: str | None,
        limit: float,
    ) -> None:
        """Sends the request; after ``limit`` seconds it is over."""
        headers = {"Content-Type": "application/json"}
        if authorization is not None:
            headers["Authorization"] = authorization
        timeout = aiohttp.ClientTimeout(total=limit)
        url = self.worker.url + path
        self._posted = asyncio.ensure_future(
            session.post(url, data=payload, headers=headers, timeout=timeout)
        )

    async def response(self) -> aiohttp.ClientResponse:
        """Status and headers, and the body to be read; either raises ``UPSTREAM_ERRORS``."""
        assert self._posted is not None
        await asyncio.wait({self._posted})
        if self._posted.cancelled():
            raise aiohttp.ClientConnectionError("abandoned")
        return self._posted.result()

    def abandon(self, why: BaseException) -> None:
        """Ends the exchange under whoever reads from it; they find ``why`` in ``cause``."""
        self._abandoned = self._abandoned or why
        self._close()

    def cause(self, error: BaseException) -> BaseException:
        """Why reading raised ``error``."""
        return self._abandoned or error

    def begin(self) -> None:
        self.begun = True
        self._charge.computed()

    def end(self, outcome: str) -> None:
        """The first call counts, and gives the charge back."""
        if self.outcome is None:
            self.outcome = outcome
            self._charge.release()
            self._close()
            self.worker.counts[outcome] += 1

    def _close(self) -> None:
        """An answer that was read to its end has given its connection back already."""
        if self._posted is None or self._posted.cancelled():
            return
        if not self._posted.done():
            self._posted.cancel()
        elif self._posted.exception() is None:
            self._posted.result().close()


class Answer:
    """What routing learns from an answer, streamed or whole, of any of the three routes."""

    def __init__(self) -> None:
        self.got = Result("", 0.0)
        self.done = False
        """Whether a stream's last event has come."""

    @property
    def held_share(self) -> float | None:
        """Share of the prompt that the server had in its cache, where it says so. With a PD pair
        that is prefill's cache, in decode's answer too."""
        known = self.got.cached_told and self.got.prompt_tokens
        return self.got.cached_tokens / self.got.prompt_tokens if known else None

    def take_stream(self, events: bytes) -> None:
        """Whole server-sent events."""
        for line in events.split(b"\n"):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                else:
                    self.take(data)

    def take(self, data: bytes) -> None:
        """One JSON object: an event, or an answer that was not streamed. What cannot be read is
        passed on all the same."""
        with suppress(stream.Failed):
            take(self.got, data, 0.0, exact=False)


class Failed(Exception):
    """A worker failed a request of which the client has seen nothing yet."""

    def __init__(self, half: Half, why: str, status: int = 502) -> None:
        super().__init__(f"{half.worker.role} worker {half.worker.url} {why}")
        self.half, self.status = half, status


class Unreached(Failed):
    """A worker took no connection, and nothing of the request was sent to anyone."""

"""A request at one of its workers: the charge, the connection, the time limit, and how it ended."""

from __future__ import annotations

import asyncio

from benchmark.agentic.router.answer import Answer
from benchmark.agentic.router.schedule import Route
from benchmark.agentic.router.upstream import Connection


class Half:
    """A request at one of its workers."""

    def __init__(self, route: Route, role: str) -> None:
        self.worker = route.charges[role].worker
        self.believed_blocks = route.matched_blocks[role]
        self.connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.answer = Answer()
        self.begun = False
        """Whether its answer has begun: the worker has the prompt's KV."""
        self.outcome: str | None = None
        """``ok``, ``error`` (its own answer), ``lost``, ``unreached``, ``client_gone``,
        ``given_up`` (for the other half's sake); None while it runs."""
        self._charge = route.charges[role]

    def post(self, path: str, payload: bytes, authorization: str | None, limit: float) -> None:
        """Sends the request; after ``limit`` seconds it is over."""
        assert self.connection is not None
        self.connection.post(path, payload, authorization)
        why = asyncio.TimeoutError(f"after {limit:g} s")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(limit, self.connection.abandon, why)

    def begin(self) -> None:
        self.begun = True
        self._charge.computed()

    def end(self, outcome: str) -> None:
        """The first call counts, and gives the charge back."""
        if self.outcome is None:
            self.outcome = outcome
            self._charge.release()
            if self._timer is not None:
                self._timer.cancel()
            if self.connection is not None:
                self.connection.release()
            self.worker.counts[outcome] += 1


class Failed(Exception):
    """A worker failed a request of which the client has seen nothing yet."""

    def __init__(self, half: Half, why: str, status: int = 502) -> None:
        super().__init__(f"{half.worker.role} worker {half.worker.url} {why}")
        self.half, self.status = half, status


class Unreached(Failed):
    """A worker gave us no connection, and nothing of the request was sent to anyone."""

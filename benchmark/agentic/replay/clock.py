"""The replay's time, and how late this process's event loop runs."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType


class Clock:
    """Seconds since the trace's first request; ``offset`` is what it shows now."""

    def __init__(self, offset: float) -> None:
        self._zero = time.monotonic() - offset

    def of(self, monotonic: float) -> float:
        return round(monotonic - self._zero, 6)

    async def until(self, due: float) -> None:
        """Returns at ``due``, or at once if that is past."""
        wait = due + self._zero - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)


class LoopLag:
    """Wakes up every ``PERIOD_S`` and notes by how much it came too late.

    What delays this task delays every other one: the times of tokens that arrive meanwhile, and
    requests that are due. A context manager.
    """

    PERIOD_S = 0.02

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    def mark(self) -> int:
        """Now, for ``since``."""
        return len(self._lags)

    def since(self, mark: int) -> float:
        """The longest lag after ``mark``, seconds."""
        return round(max(self._lags[mark:], default=0.0), 6)

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self._lags.append(max(0.0, time.monotonic() - due))

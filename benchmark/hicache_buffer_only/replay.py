"""Sends a trace as it was recorded: at its times, whether or not earlier requests have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.traces.prompts import Prompts
from benchmark.traces.record import Record


@dataclass(frozen=True)
class Replayed:
    """Results in the order of the trace."""

    results: list[Result]
    late_s: float
    """The longest that a request was sent after its time, by this process being slow."""


async def replay(urls: Sequence[str], records: Iterable[Record], prompts: Prompts) -> Replayed:
    """Request ``i`` goes to server ``i % len(urls)``, as a round-robin load balancer does."""
    running: list[asyncio.Task[Result]] = []
    late = 0.0
    # A connection for each request: one that idled may be closed by the server as it is used again.
    async with open_session(reuse=False) as session:
        began: float | None = None
        for i, record in enumerate(records):
            request = Request(prompts.prompt(record), record.output_length, label=str(i))
            now = time.monotonic()
            began = now - record.timestamp / 1000 if began is None else began
            due = began + record.timestamp / 1000
            await asyncio.sleep(max(0.0, due - now))
            late = max(late, time.monotonic() - due)
            target = Target(urls[i % len(urls)])
            running.append(asyncio.create_task(send(session, target, request)))
        return Replayed(list(await asyncio.gather(*running)), late)

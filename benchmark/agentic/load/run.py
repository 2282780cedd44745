"""The replay itself. Nothing here waits for a free slot: there are none."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp

from benchmark.agentic.load.outcome import Classes, Outcome, gaps, tpot
from benchmark.agentic.load.plan import Chain, Turn, chains, gap_s, jobs
from benchmark.agentic.load.prepare import Bodies, PromptSource
from benchmark.harness.client import Message, Result, Target, open_session, send
from benchmark.traces.record import Record

AHEAD_TOKENS = 4_000_000
"""Prompt tokens that are made ahead, about 25 MB of JSON; at least one request always is."""
OTHERS = 64
"""Files that this process needs besides its streams."""


@dataclass(frozen=True)
class Settings:
    """How the records are sent."""

    think_s: float | None = None
    """Between two turns; None: as recorded."""
    timeout_s: float = 600.0
    """Of each request."""
    classes: Classes = Classes()
    sessions: int | None = None
    """So many chains at once, each begun as another ends, instead of at its time."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of each request, such as a key."""


async def replay(
    target: Target | str,
    records: Iterable[Record],
    prompts: PromptSource,
    settings: Settings = Settings(),  # noqa: B008
    *,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Send the records and wait for all answers; outcomes in the order of the trace.

    ``target``: a pair, or the URL of a server or router. ``records``: already scaled, by time.
    ``on_outcome``: called as each request ends, in this thread.

    Raises:
        ValueError: a record is not valid. Errors of ``on_outcome`` pass through. Either ends the
            replay; what servers do never does.
    """
    target = Target(target) if isinstance(target, str) else target
    outcomes: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        if on_outcome is not None:
            on_outcome(outcome)
        outcomes.append(outcome)

    async with AsyncExitStack() as stack:
        bodies = stack.enter_context(Bodies(prompts))
        session = await stack.enter_async_context(
            open_session(settings.timeout_s, reuse=False, headers=settings.headers)
        )
        lag = LoopLag()
        stack.callback(lag.stop)  # before the session is closed, which lets it end
        replayer = _Replayer(target, settings, bodies, session, lag, ended, prompts.path)
        await replayer.run(chains(jobs(records, prompts.block_tokens)))
    return sorted(outcomes, key=lambda outcome: outcome.index)


class _Replayer:
    """Owns the tasks of one replay."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        bodies: Bodies,
        session: aiohttp.ClientSession,
        lag: LoopLag,
        ended: Callable[[Outcome], None],
        path: str,
    ) -> None:
        self._target, self._settings, self._path = target, settings, path
        self._free = asyncio.Semaphore(settings.sessions) if settings.sessions else None
        self._bodies, self._session, self._lag, self._ended = bodies, session, lag, ended
        self._running: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, work: Iterable[Chain]) -> None:
        self._start(self._feed(work))
        try:
            await self._over
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """The replay is over with its last task, or with the first that failed."""
        self._running.discard(task)
        if task.cancelled() or self._over.done():
            return
        if error := task.exception():
            self._over.set_exception(error)
        elif not self._running:
            self._over.set_result(None)

    async def _feed(self, work: Iterable[Chain]) -> None:
        """Starts each chain at its time; the bodies of the next ones are being made meanwhile."""
        waiting: deque[tuple[Chain, asyncio.Future[bytes]]] = deque()
        source = iter(work)
        ahead = 0

        def fill() -> None:
            nonlocal ahead
            while not waiting or ahead < AHEAD_TOKENS:
                chain = next(source, None)
                if chain is None:
                    return
                waiting.append((chain, self._bodies.submit(chain.jobs[0].record)))
                ahead += chain.jobs[0].record.input_length

        fill()
        if not waiting:
            return
        await asyncio.wait([body for _, body in waiting])
        clock = Clock(waiting[0][0].start_s)
        while waiting:
            chain, future = waiting.popleft()
            ahead -= chain.jobs[0].record.input_length
            fill()
            body = await future
            due = chain.start_s
            if self._free is None:
                await clock.until(due)
            else:
                await self._free.acquire()
                due = clock.of(time.monotonic())
            self._start(self._converse(clock, chain, body, due))

    async def _converse(self, clock: Clock, chain: Chain, body: bytes, due: float) -> None:
        """The requests of a chain, one after the other; the first is due at ``due``."""
        for job, after in zip(chain.jobs, (*chain.jobs[1:], None), strict=True):
            next_body = None if after is None else self._bodies.submit(after.record)
            mark = self._lag.mark()
            record = job.record
            message = Message(body, record.output_length, record.session_id, self._path)
            answer = await send(self._session, self._target, message)
            result = outcome(
                job.turn(self._settings.classes), answer, clock, due, self._lag.since(mark)
            )
            self._ended(result)
            if after is not None and next_body is not None:
                due = clock.of(answer.finished_at) + gap_s(job, after, self._settings.think_s)
                body = await next_body
                await clock.until(due)
        if self._free is not None:
            self._free.release()


def outcome(of: Turn, answer: Result, clock: Clock, due: float, lag_s: float) -> Outcome:
    """The line of the output file."""
    cached = answer.cached_tokens if answer.cached_told else None
    prompt = answer.prompt_tokens or of.prompt_tokens
    started, finished = clock.of(answer.started_at), clock.of(answer.finished_at)
    sent = None if answer.sent_at is None else clock.of(answer.sent_at)
    first = clock.of(answer.token_times[0]) if answer.token_times else None
    each = tpot(answer.token_times, answer.totals)
    return Outcome(
        index=of.index,
        session_id=of.session_id,
        turn=of.turn,
        prompt_tokens=prompt,
        wanted_tokens=of.wanted_tokens,
        trace_new_tokens=of.new_tokens,
        cached_tokens=cached,
        output_tokens=answer.completion_tokens,
        request_class=of.kind,
        scheduled_s=round(due, 6),
        started_s=started,
        sent_s=sent,
        first_token_s=first,
        finished_s=finished,
        late_s=round((started if sent is None else sent) - due, 6),
        ttft_s=None if first is None else round(first - started, 6),
        tpot_s=None if each is None else round(each, 6),
        e2e_s=round(finished - started, 6),
        itl_s=gaps(answer.token_times, answer.totals),
        loop_lag_s=lag_s,
        error=answer.kind,
        message=answer.error,
        prefill_worker=answer.prefill_worker,
        decode_worker=answer.decode_worker,
    )


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
    requests that are due.
    """

    PERIOD_S = 0.02

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        self._task.cancel()

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


def raise_open_files(streams: int) -> int:
    """Raise the soft limit to the hard one; returns it.

    ``streams``: as many may be open at once, each of two sockets for a pair.

    Raises:
        OSError: the hard limit is lower than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * streams + OTHERS
    if hard != resource.RLIM_INFINITY and hard < need:
        raise OSError(
            f"{streams} streams need {need} open files, and the hard limit is {hard}: raise it "
            "(ulimit -Hn, LimitNOFILE=), or send fewer sessions at once"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

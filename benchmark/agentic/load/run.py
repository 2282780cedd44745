"""The load: a constant number of concurrent sessions, or each session at its recorded time. No
request waits for a free connection.

A steady load is measured: each session that ends is replaced. Requests that begin before the
window, while caches fill, or after it, while the load ends, do not count. The window closes when
enough requests have begun in it, in total and of each class that the page reports; the load goes on
until all of these have ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmark.agentic.load.outcome import Classes, Outcome, gaps
from benchmark.agentic.load.prepare import Bodies, PromptSource
from benchmark.agentic.load.sessions import Session, Turn, by_session, trace_sessions, turns
from benchmark.harness.client import Result, Target, open_session, send
from benchmark.traces.record import Record

OTHER_FILES = 64
"""Open files that this process needs besides its streams."""
MIN_PAUSE_AFTER_FAILURE_S = 0.1
"""Pause before the next turn after a failed request, because a dead server fails at once."""


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured part of a steady load."""

    warm_up: int = 30
    """Requests that end before the window opens. At least two per concurrent session are used, so
    that the initial burst is over."""
    requests: int = 200
    """Minimum number of requests that begin in it."""
    of_class: int = 30
    """Minimum number of each class, if the load has requests of that class."""
    limit_s: float = 300.0
    """Latest time at which it closes, seconds after the first request; the page reports the number
    of requests."""


@dataclass(frozen=True)
class Settings:
    """How sessions are sent."""

    think_s: float | None = None
    """Pause between two turns; None: as recorded. A trace has arrivals only, so its gaps include
    the time in which the recorded server answered."""
    timeout_s: float = 600.0
    """Time limit of each request."""
    sessions: int | None = None
    """Number of concurrent sessions: each one that ends is replaced. None: each at its time."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of each request, such as a key."""


async def replay(
    target: Target | str,
    records: Iterable[Record],
    prompts: PromptSource,
    settings: Settings = Settings(),  # noqa: B008
    *,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send the records at their times. Return all outcomes in the order of the trace.

    ``target``: a pair, or the URL of a server or router. See ``load``.
    """
    outcomes: list[Outcome] = []

    def record_outcome(outcome: Outcome) -> None:
        on_outcome(outcome)
        outcomes.append(outcome)

    target = Target(target) if isinstance(target, str) else target
    sessions = by_session(turns(records, prompts.block_tokens, Classes()))
    with Bodies(prompts) as bodies:
        await load(target, trace_sessions(sessions, bodies), settings, record_outcome)
    return sorted(outcomes, key=lambda outcome: outcome.index)


async def load(
    target: Target,
    sessions: Iterator[tuple[float, Session]],
    settings: Settings,
    on_outcome: Callable[[Outcome], None],
    window: Window | None = None,
    classes: Sequence[str] = (),
) -> tuple[float, float] | None:
    """Send the sessions, each with the time of its first request, and pass each outcome to
    ``on_outcome`` as it ends, in this thread. Return the span in which the window was open.

    ``window``: what counts, and when the load is over; None: all requests count, and the load is
    over when no session is left. ``classes``: classes that the window waits for.

    Raises:
        ValueError: a record is not valid. Errors of ``on_outcome`` are passed on. Either ends the
            load; errors of servers do not.
    """
    counting, clock = Counting(window, classes, settings.sessions or 0), Clock()
    running: set[asyncio.Task[None]] = set()
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        running.add(task)
        task.add_done_callback(stopped)

    def stopped(task: asyncio.Task[None]) -> None:
        """End the load with its last task, or with the first one that failed."""
        running.discard(task)
        if over.done() or task.cancelled():
            return
        if error := task.exception():
            over.set_exception(error)
        elif not running:
            over.set_result(None)

    async def converse(session: Session, due: float | None) -> None:
        """Send the requests of a session one after the other, the first at ``due`` (None: now)."""
        following = next(session, None)
        while following is not None and not counting.over:
            turn, request = following
            message = await request if inspect.isawaitable(request) else request
            due = clock.now() if due is None else due
            mark, counts = lag.mark(), counting.begins(turn.kind, clock.now())
            result = await send(http, target, message)
            if result.error is None and result.completion_tokens < turn.wanted_tokens:
                answer_length = f"{result.completion_tokens} of {turn.wanted_tokens} tokens"
                result.fail("short_answer", answer_length)
            counting.ended(counts)
            on_outcome(outcome(turn, result, clock, due, lag.since(mark), counts))
            min_pause = MIN_PAUSE_AFTER_FAILURE_S if result.error else 0.0
            try:
                following = session.send([] if result.error else result.output_ids)
            except StopIteration:
                await asyncio.sleep(min_pause)
                return
            pause = settings.think_s
            if pause is None:
                pause = following[0].at_s - turn.at_s
            due = clock.of(result.finished_at) + max(pause, min_pause)
            await clock.until(due)

    async def slot() -> None:
        while not counting.over and (following := next(sessions, None)) is not None:
            await converse(following[1], None)

    async def by_time() -> None:
        for at_s, session in sessions:
            await clock.until(at_s)
            if counting.over:
                return
            start(converse(session, at_s))

    async with open_session(settings.timeout_s, reuse=False, headers=settings.headers) as http:
        lag = LoopLag()
        for _ in range(settings.sessions or 1):
            start(slot() if settings.sessions else by_time())
        try:
            await over
        finally:
            lag.stop()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return counting.span(clock.now())


class Counting:
    """State of the window and of the load. Times in seconds since the load began."""

    def __init__(self, window: Window | None, classes: Sequence[str], sessions: int = 0) -> None:
        self._window, self._classes, self._burst = window, classes, sessions
        self._ended = self._open = 0
        self._begun: Counter[str] = Counter()
        self._opened = math.inf
        self.closed = 0.0
        """Time at which the window closed; 0 while it is open."""

    @property
    def over(self) -> bool:
        """True if the window is closed and all requests that count have ended."""
        return self.closed > 0 and not self._open

    def begins(self, kind: str, now: float) -> bool:
        """Note that a request is sent. Return True if it counts."""
        if (window := self._window) is None:
            return True
        if self._opened > now and self._ended >= max(window.warm_up, 2 * self._burst):
            self._opened = now
        enough = self._begun.total() >= window.requests and all(
            self._begun[name] >= window.of_class for name in self._classes
        )
        if not self.closed and (enough or now > window.limit_s):
            self.closed = now
        if self.closed or self._opened > now:
            return False
        self._begun[kind] += 1
        self._open += 1
        return True

    def ended(self, counts: bool) -> None:
        """Note that a request was answered or failed."""
        self._ended += 1
        self._open -= counts

    def span(self, end: float) -> tuple[float, float] | None:
        """Return when the window opened and closed; it closes at ``end`` at the latest. The span is
        empty if it never opened, because earlier requests are part of the warm-up."""
        closed = self.closed or end
        return self._window and (min(self._opened, closed), closed)


def outcome(
    turn: Turn, answer: Result, clock: Clock, due: float, lag_s: float, counts: bool
) -> Outcome:
    """Return the line of the output file."""
    started, finished = clock.of(answer.started_at), clock.of(answer.finished_at)
    sent = None if answer.sent_at is None else clock.of(answer.sent_at)
    first = clock.of(answer.token_times[0]) if answer.token_times else None
    itl_s = gaps(answer.token_times, answer.totals)
    answer_ids = None if answer.error else answer.output_ids
    return Outcome(
        index=turn.index,
        session_id=turn.session_id,
        turn=turn.turn,
        prompt_tokens=answer.prompt_tokens or turn.prompt_tokens,
        wanted_tokens=turn.wanted_tokens,
        trace_new_tokens=turn.new_tokens,
        load_new_tokens=turn.load_new_tokens,
        cached_tokens=answer.cached_tokens if answer.cached_told else None,
        output_tokens=answer.completion_tokens,
        request_class=turn.kind,
        scheduled_s=round(due, 6),
        started_s=started,
        sent_s=sent,
        first_token_s=first,
        finished_s=finished,
        late_s=round((started if sent is None else sent) - due, 6),
        ttft_s=None if first is None else round(first - started, 6),
        tpot_s=round(sum(itl_s) / len(itl_s), 6) if itl_s else None,
        e2e_s=round(finished - started, 6),
        itl_s=itl_s,
        loop_lag_s=lag_s,
        counted=counts,
        answer=hashlib.sha256(repr(answer_ids).encode()).hexdigest()[:12] if answer_ids else None,
        error=answer.kind,
        message=answer.error,
        prefill_worker=answer.prefill_worker,
        decode_worker=answer.decode_worker,
    )


class Clock:
    """Seconds since the load began."""

    def __init__(self) -> None:
        self._zero = time.monotonic()

    def of(self, monotonic: float) -> float:
        return round(monotonic - self._zero, 6)

    def now(self) -> float:
        return self.of(time.monotonic())

    async def until(self, due: float) -> None:
        """Return at ``due``, or at once if ``due`` is past."""
        # uvloop, which SGLang installs on import, rounds a sleep to milliseconds, also down.
        while (wait := due + self._zero - time.monotonic()) > 0:
            await asyncio.sleep(wait)


class LoopLag:
    """Wakes up every ``PERIOD_S`` and records each delay.

    A delay of this task equally delays requests that are due, and the timestamps of tokens.
    """

    PERIOD_S = 0.02

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        self._task.cancel()

    def mark(self) -> int:
        """Return the present position, for ``since``."""
        return len(self._lags)

    def since(self, mark: int) -> float:
        """Return the maximum delay after ``mark``, in seconds."""
        return round(max(self._lags[mark:], default=0.0), 6)

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self._lags.append(max(0.0, time.monotonic() - due))


def raise_open_files(streams: int) -> int:
    """Raise the soft limit of open files to the hard limit, and return that.

    ``streams``: requests that may be open at once, each with two sockets for a pair.

    Raises:
        OSError: the hard limit is too low for ``streams``.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * streams + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < need:
        raise OSError(
            f"{streams} streams need {need} open files, and the hard limit is {hard}: raise it "
            "(ulimit -Hn, LimitNOFILE=), or send fewer sessions at once"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

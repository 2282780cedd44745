"""A load that stays the same: so many sessions under way all the time, measured in a window.

A session that ends is replaced. What begins before the window, as caches fill, does not count; nor
does what begins after it, as the load ends. The window closes once enough requests have begun in
it, of each class that the page speaks of as well; the load goes on until all of these have ended.

Sessions are made of numbers, with each answer in the next prompt, or are those of a trace. Session
``k`` is the same in every arm and round.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count

import msgspec

from benchmark.agentic.load.outcome import Classes, Outcome
from benchmark.agentic.load.plan import Chain, Turn
from benchmark.agentic.load.prepare import PromptSource, body
from benchmark.agentic.load.run import Clock, LoopLag, Settings, outcome
from benchmark.harness.client import Message, Request, Result, Target, open_session, send

FIRST, LATER, COLD = MADE_CLASSES = ("FIRST", "LATER", "COLD")
FAILED_S = 0.1
"""After a request that failed, before the next session: a dead server fails at once."""
Ids = Sequence[int]


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a steady load counts."""

    warm_up: int = 30
    """Requests that end before the window opens."""
    requests: int = 200
    """That begin in it, at least."""
    of_class: int = 30
    """Of each class, at least; a class that the load has none of is not waited for."""
    limit_s: float = 300.0
    """It closes then in any case; the page says with how many."""


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions of these sizes, in tokens."""

    first_tokens: int = 512
    """Of a session's first turn, after the prefix."""
    turns: int = 10
    turn_tokens: int = 112
    """New ones of each later turn, behind the history with all answers."""
    answer_tokens: int = 40
    prefixes: int = 0
    """Shared ones, which sessions begin with by turns; 0: sessions share nothing."""
    prefix_tokens: int = 0
    cold_share: float = 0.0
    """Of all requests, those with a prompt that shares nothing with anything, each a session."""
    cold_tokens: int = 5000
    cold_answer_tokens: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.turns < 1 or not 0 <= self.cold_share < 1:
            raise ValueError("`turns` must be 1 or more, and `cold_share` at least 0 and below 1")

    @property
    def classes(self) -> list[str]:
        """That it has requests of."""
        shares = (1.0, self.turns - 1, self.cold_share)
        return [name for name, some in zip(MADE_CLASSES, shares, strict=True) if some > 0]

    @property
    def largest(self) -> int:
        """Tokens of the longest request with its answer."""
        grown = self.turns * self.answer_tokens + (self.turns - 1) * self.turn_tokens
        whole = self.prefix_tokens + self.first_tokens + grown
        return max(whole, self.cold_tokens + self.cold_answer_tokens if self.cold_share else 0)


Sent = tuple[Turn, Request | Message]
Session = Generator[Sent, Ids, None]
"""Its requests; it is sent the answer to the one before."""


def made_sessions(made: Made, vocabulary: range) -> Iterator[Session]:
    """Without end."""
    once = made.cold_share * made.turns
    share = once / (1 - made.cold_share + once)  # of the sessions, as a cold one has one request
    prefixes = [
        _ids(f"{made.seed} prefix {i}", vocabulary, made.prefix_tokens)
        for i in range(made.prefixes)
    ]
    for number in count():
        if random.Random(f"{made.seed} kind {number}").random() < share:
            yield _cold(made, vocabulary, number)
        else:
            prefix = prefixes[number % len(prefixes)] if prefixes else []
            yield _warm(made, vocabulary, number, prefix)


def _ids(seed: str, vocabulary: range, tokens: int) -> list[int]:
    return random.Random(seed).choices(vocabulary, k=tokens)


def _cold(made: Made, vocabulary: range, number: int) -> Session:
    prompt, wanted = (
        _ids(f"{made.seed} {number}", vocabulary, made.cold_tokens),
        made.cold_answer_tokens,
    )
    turn = Turn(number * made.turns, f"c{number}", 0, len(prompt), wanted, len(prompt), COLD)
    yield turn, Request(prompt, wanted)


def _warm(made: Made, vocabulary: range, number: int, prefix: Ids) -> Session:
    prompt, wanted = list(prefix), made.answer_tokens
    for turn in range(made.turns):
        new = made.turn_tokens if turn else made.first_tokens
        prompt = [*prompt, *_ids(f"{made.seed} {number} {turn}", vocabulary, new)]
        of = Turn(
            number * made.turns + turn,
            f"s{number}",
            turn,
            len(prompt),
            wanted,
            new,
            LATER if turn else FIRST,
        )
        answer = yield of, Request(prompt, wanted, label=f"{number}.{turn}")
        prompt = [*prompt, *answer]


def trace_sessions(
    chains: Iterable[Chain], source: PromptSource, classes: Classes
) -> Iterator[Session]:
    """Those of a trace, in its order; an answer is not part of the next prompt."""
    prompts = source.make()

    def turns(chain: Chain) -> Session:
        for job in chain.jobs:
            record = job.record
            content = body(prompts, record, source)
            sent = Message(content, record.output_length, record.session_id, source.path)
            yield job.turn(classes), sent

    return map(turns, chains)


async def steady(
    target: Target,
    sessions: Iterator[Session],
    window: Window,
    classes: Sequence[str],
    settings: Settings,
    on_outcome: Callable[[Outcome], None],
) -> tuple[float, float]:
    """Keeps ``settings.sessions`` sessions under way; every outcome as it ends, and the window.

    ``classes``: those that are waited for.
    """
    load = Counting(window, classes)
    clock = Clock(0.0)
    async with open_session(settings.timeout_s, reuse=False, headers=settings.headers) as http:
        lag = LoopLag()

        async def slot() -> None:
            while not load.over and (session := next(sessions, None)) is not None:
                following = next(session, None)
                while following is not None and not load.over:
                    turn, request = following
                    mark, due = lag.mark(), clock.of(time.monotonic())
                    counts = load.begins(turn.kind, due)
                    result = await send(http, target, request)
                    told = outcome(turn, result, clock, due, lag.since(mark))
                    load.ended(counts)
                    on_outcome(msgspec.structs.replace(told, counted=counts, answer=digest(result)))
                    if result.error is not None:
                        await asyncio.sleep(FAILED_S)
                        break  # what comes next would lack its answer
                    following = _next(session, result.output_ids)
                    if following is not None and settings.think_s:
                        await asyncio.sleep(settings.think_s)

        tasks = [asyncio.create_task(slot()) for _ in range(settings.sessions or 1)]
        try:
            await asyncio.gather(*tasks)
        finally:
            lag.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return load.opened, load.closed or clock.of(time.monotonic())


def digest(result: Result) -> str | None:
    """Of an answer's token ids, by which arms are compared."""
    if result.error is not None or not result.output_ids:
        return None
    return hashlib.sha256(repr(result.output_ids).encode()).hexdigest()[:12]


def _next(session: Session, answer: Ids) -> Sent | None:
    try:
        return session.send(answer)
    except StopIteration:
        return None


class Counting:
    """When the window opens and closes, and when the load is over. Seconds of the load's clock."""

    def __init__(self, window: Window, classes: Sequence[str]) -> None:
        self._window, self._classes = window, classes
        self._ended = self._open = 0
        self._begun: Counter[str] = Counter()
        self._is_open = window.warm_up == 0
        self.opened = 0.0
        self.closed = 0.0
        """0 while it is open."""

    @property
    def over(self) -> bool:
        """Whether it is closed and all that counts has ended."""
        return self.closed > 0 and not self._open

    def begins(self, kind: str, now: float) -> bool:
        """A request is sent; whether it counts."""
        if not self._is_open and self._ended >= self._window.warm_up:
            self._is_open, self.opened = True, now
        if not self._is_open or self.closed:
            return False
        enough = self._begun.total() >= self._window.requests and all(
            self._begun[name] >= self._window.of_class for name in self._classes
        )
        if enough or now - self.opened > self._window.limit_s:
            self.closed = now
            return False
        self._begun[kind] += 1
        self._open += 1
        return True

    def ended(self, counts: bool) -> None:
        """A request has its answer or failed."""
        self._ended += 1
        self._open -= counts

"""The sessions to send: those of a trace, or sessions made from sizes, whose answers become part of
the next prompt.

Session ``k`` is the same in every arm.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from benchmark.agentic.load.outcome import Classes
from benchmark.agentic.load.prepare import Bodies
from benchmark.harness.client import Message, Request
from benchmark.traces.record import Record
from benchmark.traces.sessions import EndlessCache, annotate

FIRST = "FIRST"
LATER = "LATER"
COLD = "COLD"
MADE_CLASSES = (FIRST, LATER, COLD)
"""Classes of made sessions: a session's first turn, its later turns, and unrelated prompts."""
COLD_ANSWER = 8
"""Tokens of a cold prompt's answer."""
GOLDEN = 0.618034
"""The fractional parts of its multiples are evenly spread."""
AHEAD = 16
"""Number of trace sessions whose first prompt is prepared before it is needed."""


@dataclass(frozen=True)
class Turn:
    """A request, as its outcome names it."""

    index: int
    """Number of the request, the same in every arm."""
    session_id: str | None
    turn: int | None
    """Position in its session, from 0."""
    prompt_tokens: int
    wanted_tokens: int
    new_tokens: int
    """Prompt tokens that an endless cache would not hold."""
    kind: str
    """Class of the request."""
    at_s: float = 0.0
    """Arrival, in seconds after the trace's first request."""
    record: Record | None = None
    """Its record, if it comes from a trace."""
    load_new_tokens: int | None = None
    """Prompt tokens that no earlier request of this load had, in whole blocks, at least one; None:
    unknown."""


Sent = tuple[Turn, Request | Awaitable[Message]]
Session = Generator[Sent, Sequence[int], None]
"""Yields the requests of a session. ``send`` takes the previous answer, empty if it failed."""


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of made sessions, in tokens."""

    first_tokens: int = 512
    """Prompt of a session's first turn, behind the prefix."""
    turns: int = 10
    turn_tokens: int = 112
    """New tokens of each later turn, behind the history with all answers."""
    answer_tokens: int = 40
    prefixes: int = 0
    """Number of shared prefixes, which sessions use in turn; 0: sessions share nothing."""
    prefix_tokens: int = 0
    cold_share: float = 0.0
    """Share of requests whose prompt shares nothing. Each one is a session."""
    cold_tokens: int = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.turns < 1 or not 0 <= self.cold_share < 1:
            raise ValueError("`turns` must be 1 or more, and `cold_share` at least 0 and below 1")

    @property
    def classes(self) -> list[str]:
        """Classes that it has requests of."""
        shares = (1.0, self.turns - 1, self.cold_share)
        return [name for name, part in zip(MADE_CLASSES, shares, strict=True) if part > 0]

    @property
    def cold_sessions(self) -> float:
        """Share of sessions that are cold. It differs from that of requests, because a cold session
        has one request."""
        weight = self.cold_share * self.turns
        return weight / (1 - self.cold_share + weight)

    @property
    def requests(self) -> float:
        """Mean number of requests of a session."""
        return self.cold_sessions + (1 - self.cold_sessions) * self.turns

    @property
    def largest(self) -> int:
        """Tokens of the longest request with its answer."""
        grown = self.turns * self.answer_tokens + (self.turns - 1) * self.turn_tokens
        whole = self.prefix_tokens + self.first_tokens + grown
        return max(whole, self.cold_tokens + COLD_ANSWER if self.cold_share else 0)


def middle(number: int, total: int) -> int:
    """Return the turn with which the ``number``-th session of a steady load begins, evenly spread
    over ``total`` turns. If all sessions began with their first turn, a load of many sessions would
    count other turns than a load of few."""
    return int(number * GOLDEN % 1 * total)


def made_sessions(
    made: Made,
    vocabulary: range,
    at_once: int = 0,
    block_tokens: int = 1,
    requests_per_s: float | None = None,
) -> Iterator[tuple[float, Session]]:
    """Yield sessions without end, each with its time: all due at once, or at the random times of
    ``requests_per_s``. The first ``at_once`` begin in their ``middle``. New tokens of the load are
    counted in blocks of ``block_tokens``."""
    arrivals, due = random.Random(f"{made.seed} arrivals"), 0.0
    sent_prefixes: set[int] = set()

    def new_of(prompt: list[int], known: int) -> int:
        """Return the number of tokens behind the whole blocks that are ``known``, at least one."""
        return len(prompt) - min(known, len(prompt) - 1) // block_tokens * block_tokens

    def ids(seed: str, tokens: int) -> list[int]:
        return random.Random(f"{made.seed} {seed}").choices(vocabulary, k=tokens)

    def cold(number: int) -> Session:
        prompt, wanted = ids(f"{number}", made.cold_tokens), COLD_ANSWER
        turn = Turn(number * made.turns, f"c{number}", 0, len(prompt), wanted, len(prompt), COLD)
        yield replace(turn, load_new_tokens=len(prompt)), Request(prompt, wanted)

    def warm(number: int) -> Session:
        prompt = list(prefixes[number % len(prefixes)]) if prefixes else []
        wanted = made.answer_tokens
        group = number % len(prefixes) if prefixes else 0
        known = len(prompt) if group in sent_prefixes else 0
        sent_prefixes.add(group)
        first = middle(number, made.turns) if number < at_once else 0
        prompt += ids(f"{number} before", first * (made.turn_tokens + wanted))
        for turn in range(first, made.turns):
            new = made.turn_tokens if turn > first else made.first_tokens
            prompt += ids(f"{number} {turn}", new)
            kind, index = LATER if turn else FIRST, number * made.turns + turn
            sent = Turn(index, f"s{number}", turn, len(prompt), wanted, new, kind)
            sent = replace(sent, load_new_tokens=new_of(prompt, known))
            answer = yield sent, Request(prompt, wanted, label=f"{number}.{turn}")
            if not answer:
                return  # the next prompt would lack this answer
            prompt = [*prompt, *answer]
            known = len(prompt) - 1  # the last token of an answer is not computed

    prefixes = [ids(f"prefix {i}", made.prefix_tokens) for i in range(made.prefixes)]
    for number in count():
        chance = random.Random(f"{made.seed} kind {number}").random()
        under_way = made.cold_share if number < at_once else made.cold_sessions
        if requests_per_s is not None:
            due += arrivals.expovariate(requests_per_s / made.requests)
        yield due, cold(number) if chance < under_way else warm(number)


def turns(records: Iterable[Record], block_tokens: int, classes: Classes) -> Iterator[Turn]:
    """Yield the records in their order, with sessions assigned if the trace names none."""
    cache = EndlessCache()
    began: float | None = None
    for index, record in enumerate(annotate(records, block_tokens)):
        began = record.timestamp if began is None else began
        new = max(0, record.input_length - cache.hits(record) * block_tokens)
        sizes = (record.input_length, record.output_length, new)
        at_s = (record.timestamp - began) / 1000
        yield Turn(index, record.session_id, record.turn, *sizes, classes.of(new), at_s, record)


def by_session(all_turns: Iterable[Turn]) -> list[list[Turn]]:
    """Return sessions in the order of their first turns. All records are held in memory, because a
    session's next turn may be anywhere in the trace."""
    sessions: dict[tuple[str | None, int], list[Turn]] = {}
    for turn in all_turns:
        # A record without a session is a session of its own.
        key = (turn.session_id, 0 if turn.session_id is not None else turn.index)
        sessions.setdefault(key, []).append(turn)
    return list(sessions.values())


def begun(sessions: list[list[Turn]], part: int, at_once: int) -> list[list[Turn]]:
    """Return the sessions, with ``at_once`` that are in their ``middle`` first. These belong to
    requests of the second half of the first ``part``, because a steady load has sessions in
    proportion to their requests."""
    places = [(n, i) for n in range(part // 2, part) for i in range(len(sessions[n]))]
    first: dict[int, int] = {}
    for k in range(len(places)):
        if len(first) < at_once:
            first.setdefault(*places[middle(k, len(places))])
    others = [session for n, session in enumerate(sessions) if n not in first]
    return [sessions[n][i:] for n, i in first.items()] + others


def trace_sessions(
    sessions: Iterable[Sequence[Turn]], bodies: Bodies
) -> Iterator[tuple[float, Session]]:
    """Yield the sessions in their order, each with its time; an answer is not part of the next
    prompt. Bodies are prepared ahead: the first one of ``AHEAD`` sessions, later ones while the
    previous turn is answered."""
    cache = EndlessCache()

    def counted(turn: Turn) -> Turn:
        """Count new tokens by the order of sending, which is not that of the trace."""
        if turn.record is None:
            return turn
        max_hits = (turn.prompt_tokens - 1) // bodies.block_tokens
        hits = min(cache.hits(turn.record), max_hits) * bodies.block_tokens
        return replace(turn, load_new_tokens=turn.prompt_tokens - hits)

    def played(session: Sequence[Turn], first: Awaitable[Message]) -> Session:
        made = first
        for turn, after in zip(session, (*session[1:], None), strict=True):
            now, made = made, bodies.submit(after.record) if after else made
            yield counted(turn), now

    waiting: deque[tuple[float, Session]] = deque()
    for session in sessions:
        waiting.append((session[0].at_s, played(session, bodies.submit(session[0].record))))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting

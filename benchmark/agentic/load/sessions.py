"""What is sent: sessions of a trace, or made of numbers with each answer in the next prompt.

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

FIRST, LATER, COLD = MADE_CLASSES = ("FIRST", "LATER", "COLD")
COLD_ANSWER = 8
"""Tokens of a cold prompt's answer."""
GOLDEN = 0.618034
"""Multiples of it, less their whole part, are evenly spread."""
AHEAD = 16
"""Sessions of a trace whose first prompt is made before it is needed."""


@dataclass(frozen=True)
class Turn:
    """A request as its outcome names it."""

    index: int
    """Of the request: the same in every arm."""
    session_id: str | None
    turn: int | None
    """In its session, from 0."""
    prompt_tokens: int
    wanted_tokens: int
    new_tokens: int
    """Prompt tokens that an endless cache would not hold."""
    kind: str
    """Its class."""
    at_s: float = 0.0
    """Arrival, seconds after the trace's first request."""
    record: Record | None = None
    """Of a trace."""
    load_new_tokens: int | None = None
    """Prompt tokens that no earlier request of this load had, in whole blocks, at least one; None:
    not counted."""


Sent = tuple[Turn, Request | Awaitable[Message]]
Session = Generator[Sent, Sequence[int], None]
"""Its requests; it is sent the answer to the one before, which is empty where that failed."""


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
        return max(whole, self.cold_tokens + COLD_ANSWER if self.cold_share else 0)


def middle(number: int, of: int) -> int:
    """One of so many, evenly spread over them: where the ``number``-th session of a steady load
    begins. Were all to begin with their first turn, a load of many sessions would count other turns
    than one of few."""
    return int(number * GOLDEN % 1 * of)


def made_sessions(
    made: Made, vocabulary: range, at_once: int = 0, block_tokens: int = 1
) -> Iterator[tuple[float, Session]]:
    """Without end, due at once; ``at_once`` of them begin in their ``middle``. New tokens of the
    load are counted in blocks of ``block_tokens``."""
    sent_prefixes: set[int] = set()

    def new_of(prompt: list[int], known: int) -> int:
        """Return the tokens behind the whole blocks that are ``known``, at least one."""
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
                return  # what comes next would lack it
            prompt = [*prompt, *answer]
            known = len(prompt) - 1  # the last token of an answer is not computed

    once = made.cold_share * made.turns
    share = once / (1 - made.cold_share + once)  # of the sessions, as a cold one has one request
    prefixes = [ids(f"prefix {i}", made.prefix_tokens) for i in range(made.prefixes)]
    for number in count():
        chance = random.Random(f"{made.seed} kind {number}").random()
        under_way = made.cold_share if number < at_once else share
        yield 0.0, cold(number) if chance < under_way else warm(number)


def turns(records: Iterable[Record], block_tokens: int, classes: Classes) -> Iterator[Turn]:
    """The records in their order, with sessions where the trace names none."""
    cache = EndlessCache()
    began: float | None = None
    for index, of in enumerate(annotate(records, block_tokens)):
        began = of.timestamp if began is None else began
        new = max(0, of.input_length - cache.hits(of) * block_tokens)
        sizes = (of.input_length, of.output_length, new)
        at_s = (of.timestamp - began) / 1000
        yield Turn(index, of.session_id, of.turn, *sizes, classes.of(new), at_s, of)


def by_session(found: Iterable[Turn]) -> list[list[Turn]]:
    """Sessions in the order of their first turns. Holds all records: the turn after next may stand
    anywhere in the trace."""
    sessions: dict[tuple[str | None, int], list[Turn]] = {}
    for turn in found:
        # A record without a session is a session of its own.
        key = (turn.session_id, 0 if turn.session_id is not None else turn.index)
        sessions.setdefault(key, []).append(turn)
    return list(sessions.values())


def begun(sessions: list[list[Turn]], part: int, at_once: int) -> list[list[Turn]]:
    """With so many in front that are in their ``middle``: those of requests from the second half of
    the first ``part``, as a steady load has sessions in proportion to their requests."""
    places = [(n, i) for n in range(part // 2, part) for i in range(len(sessions[n]))]
    first: dict[int, int] = {}
    for k in range(len(places)):
        if len(first) < at_once:
            first.setdefault(*places[middle(k, len(places))])
    others = [each for n, each in enumerate(sessions) if n not in first]
    return [sessions[n][i:] for n, i in first.items()] + others


def trace_sessions(
    sessions: Iterable[Sequence[Turn]], bodies: Bodies
) -> Iterator[tuple[float, Session]]:
    """In their order, each with its time; an answer is not part of the next prompt. Bodies are made
    ahead: the first ones of ``AHEAD`` sessions, later ones while the turn before is answered."""
    cache = EndlessCache()

    def counted(turn: Turn) -> Turn:
        """Sessions are not sent in the order of the trace, so its new tokens are not the load's."""
        if turn.record is None:
            return turn
        most = (turn.prompt_tokens - 1) // bodies.block_tokens
        hits = min(cache.hits(turn.record), most) * bodies.block_tokens
        return replace(turn, load_new_tokens=turn.prompt_tokens - hits)

    def played(each: Sequence[Turn], first: Awaitable[Message]) -> Session:
        made = first
        for turn, after in zip(each, (*each[1:], None), strict=True):
            now, made = made, bodies.submit(after.record) if after else made
            yield counted(turn), now

    waiting: deque[tuple[float, Session]] = deque()
    for each in sessions:
        waiting.append((each[0].at_s, played(each, bodies.submit(each[0].record))))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting

"""Talks on one prefill and one decode server, as events: what the choice is worth. No clock runs.

Decode's loop is ``LocalTurns``' in short: requests are admitted between two steps, chunks alternate
with decode steps as ``Pace`` has them. Prefill computes all that waits in one step. A router gives
the client an answer when prefill's half has ended and decode's has begun, as SGLang's Rust router
does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sglang.srt.disaggregation.delta.decode.turn_choice import (
    Choice,
    Decision,
    Limits,
    Load,
    Measured,
    Pace,
    read,
    read_there,
)

PREFILL = "prefill"
MOST_IN_A_STEP = 8192
REMOTE = Decision(False, "long")


@dataclass(frozen=True)
class World:
    """Who talks, and what the servers take: seconds and tokens. A pair is a constant and a slope
    over tokens (``chunk``, ``prefill``) or requests (``step``)."""

    talks: int = 6
    turns: int = 10
    first: int = 512
    new: int = 112
    answer: int = 40
    think: float = 0.0
    """From an answer to the next turn, on average."""
    cold: int = 0
    """Clients that send a prompt of ``cold_tokens`` when they have the answer to the last one."""
    cold_tokens: int = 5000
    chunk: tuple[float, float] = (0.014, 0.0001)
    step: tuple[float, float] = (0.004, 0.0006)
    prefill: tuple[float, float] = (0.012, 0.00008)
    wire: float = 0.015
    """To prefill's queue, and from its step to decode."""
    answering: float = 0.0
    """From prefill's look at a transfer that is over to the client's end of its answer."""
    front: float = 0.005
    """Between client and decode, each way."""
    noise: float = 0.15
    """Of each time, as the spread of its logarithm."""
    spikes: float = 0.0
    """Of all times, the part that takes five times as long: others use the machine, too."""


@dataclass(eq=False)
class Turn:
    """A request. ``number`` is 0 for the first of a talk, ``talk`` is negative for cold prompts."""

    talk: int
    number: int
    tokens: int
    answer: int
    sent: float
    admitted: float = 0.0
    decision: Decision = REMOTE
    left: int = 0
    got: int = 0
    first_at: float | None = None
    prefill_at: float | None = None
    ttft: float | None = None

    @property
    def is_later(self) -> bool:
        """Whether it is a later turn of a talk."""
        return self.talk >= 0 and self.number > 0


@dataclass
class Played:
    """What the clients saw."""

    ttft: list[float] = field(default_factory=list)
    """Of later turns, seconds."""
    turns: int = 0
    seconds: float = 0.0
    local: int = 0

    @property
    def ttft_p50(self) -> float:
        return median(self.ttft)

    @property
    def per_second(self) -> float:
        return self.turns / self.seconds


class Talks:
    """One run. ``where``: ``remote``, ``always`` (local) or ``chosen``."""

    def __init__(
        self, world: World, where: str, seed: int, measured: Measured | None = None
    ) -> None:
        self.world, self.where = world, where
        self._random = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = 0
        self._limits = Limits(256, 512, always=where == "always")
        self.measured = measured or Measured()
        self._choice, self._pace = Choice(self._limits), Pace(self._limits.share)
        self._arrived: list[Turn] = []
        self._landed: list[Turn] = []
        self._local: list[Turn] = []
        self._running: list[Turn] = []
        self._decode_is_busy = self._prefill_is_busy = False
        self._waiting: list[Turn] = []
        self._unanswered: list[Turn] = []
        self._open = world.talks
        self.played = Played()

    def play(self) -> Talks:
        """To the end of the last talk."""
        world = self.world
        for client in range(world.cold):
            self._send(-1 - client, 0)
        begin = 1.0 if world.cold else 0.0
        for talk in range(world.talks):
            self._at(begin + self._random.uniform(0, world.think), self._send, talk, 0)
        while self._open:
            self._now, _, happens, about = heapq.heappop(self._events)
            happens(*about)
        self.played.seconds = self._now - begin
        return self

    def _at(self, delay: float, happens: Callable[..., None], *about: Any) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (self._now + delay, self._numbers, happens, about))

    def _about(self, seconds: float) -> float:
        if self._random.random() < self.world.spikes:
            seconds *= 5
        return seconds * self._random.lognormvariate(0, self.world.noise)

    # ---- the clients ----

    def _send(self, talk: int, number: int) -> None:
        world = self.world
        tokens, answer = world.cold_tokens, 8
        if talk >= 0:
            tokens, answer = (world.new + 1 if number else world.first), world.answer
        self._at(
            self._about(world.front), self._arrive, Turn(talk, number, tokens, answer, self._now)
        )

    def _see(self, turn: Turn) -> None:
        """Something of the turn is at the router."""
        if turn.first_at is None or turn.prefill_at is None:
            return
        back = self._about(self.world.front)
        if turn.ttft is None:
            turn.ttft = self._now + back - turn.sent
        if turn.got == turn.answer:
            turn.got += 1  # told once
            self._at(back, self._ended, turn)

    def _ended(self, turn: Turn) -> None:
        world, played = self.world, self.played
        if turn.talk >= 0:
            played.turns += 1
            if turn.number:
                assert turn.ttft is not None
                played.ttft.append(turn.ttft)
                played.local += turn.decision.local
            if turn.number + 1 == world.turns:
                self._open -= 1
                return
        pause = (
            self._random.expovariate(1 / world.think) if world.think and turn.talk >= 0 else 0.004
        )
        self._at(pause, self._send, turn.talk, turn.number + 1)

    # ---- decode ----

    def _arrive(self, turn: Turn) -> None:
        self._arrived.append(turn)
        self._decode()

    def _decode(self) -> None:
        """One turn of decode's loop."""
        if self._decode_is_busy:
            return
        arrived, self._arrived = self._arrived, []
        for turn in arrived:
            self._admit(turn)
        if self._local and self._pace.may_run(len(self._running)):
            self._compute()
            return
        landed, self._landed = self._landed, []
        for turn in landed:
            self.measured.shown(PREFILL, turn.tokens, self._now - turn.admitted)
            self._running.append(turn)
            self._token(turn)
        if self._running:
            constant, slope = self.world.step
            self._pace.step()
            seconds = self._about(constant + slope * len(self._running))
            self._decode_is_busy = True
            self._at(seconds, self._stepped, list(self._running), seconds)

    def _admit(self, turn: Turn) -> None:
        turn.admitted = self._now
        if self.where != "remote":
            self._pace.costs = read(self.measured.votes())
            queued = sum(each.left for each in self._local)
            load = Load(queued, len(self._running), self._pace.debt)
            there = read_there(self.measured.vote_there(PREFILL, turn.tokens))
            turn.decision = self._choice.decide(turn.tokens, load, self._pace.costs, there)
            self._choice.made(turn.decision)
        if turn.decision.local:
            turn.left, turn.prefill_at = turn.tokens, self._now
            self._local.append(turn)
        else:
            self._at(self._about(self.world.wire), self._announced, turn)

    def _compute(self) -> None:
        """The next chunk."""
        room, turns = self._limits.chunk, []
        for turn in self._local:
            took = min(turn.left, room)
            turn.left, room = turn.left - took, room - took
            turns.append(turn)
            if not room:
                break
        tokens = self._limits.chunk - room
        self._local = [turn for turn in self._local if turn.left]
        self._pace.chunk(tokens, len(self._running))
        constant, slope = self.world.chunk
        seconds = self._about(constant + slope * tokens)
        self._decode_is_busy = True
        self._at(seconds, self._computed, [t for t in turns if not t.left], tokens, seconds)

    def _computed(self, turns: list[Turn], tokens: int, seconds: float) -> None:
        self._decode_is_busy = False
        self.measured.chunk.add(tokens, seconds)
        for turn in turns:
            self._running.append(turn)
            self._token(turn)
        self._decode()

    def _stepped(self, turns: list[Turn], seconds: float) -> None:
        self._decode_is_busy = False
        self.measured.step.add(seconds)
        for turn in turns:
            self._token(turn)
        self._decode()

    def _token(self, turn: Turn) -> None:
        turn.got += 1
        if turn.first_at is None:
            turn.first_at = self._now
        if turn.got == turn.answer:
            self._running.remove(turn)
        self._see(turn)

    # ---- prefill ----

    def _announced(self, turn: Turn) -> None:
        self._waiting.append(turn)
        self._prefill()

    def _prefill(self) -> None:
        """One turn of prefill's loop."""
        if self._prefill_is_busy:
            return
        for turn in self._unanswered:
            self._at(self._about(self.world.answering), self._answered, turn)
        self._unanswered.clear()
        turns: list[Turn] = []
        tokens = 0
        while self._waiting and (not turns or tokens < MOST_IN_A_STEP):
            turn = self._waiting.pop(0)
            # It never saw the KV of the last answer.
            tokens += turn.tokens + (self.world.answer if turn.is_later else 0)
            turns.append(turn)
        if turns:
            constant, slope = self.world.prefill
            self._prefill_is_busy = True
            self._at(self._about(constant + slope * tokens), self._prefilled, turns)

    def _prefilled(self, turns: list[Turn]) -> None:
        self._prefill_is_busy = False
        for turn in turns:
            self._at(self._about(self.world.wire), self._arrives, turn)
        self._prefill()

    def _arrives(self, turn: Turn) -> None:
        self._unanswered.append(turn)
        self._landed.append(turn)
        self._prefill()
        self._decode()

    def _answered(self, turn: Turn) -> None:
        turn.prefill_at = self._now
        self._see(turn)

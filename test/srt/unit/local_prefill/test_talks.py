"""The gain of the choice: talks on one prefill and one decode server, simulated as events, against
computing all turns on one side. No clock runs.

Decode's loop is a short form of ``LocalTurns``: requests are admitted between two steps, chunks
alternate with decode steps as ``Pace`` decides. Prefill computes its whole queue in one step. A
router answers the client when prefill's half has ended and decode's has begun, as SGLang's Rust
router does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest

from sglang.srt.disaggregation.local_prefill.chunk_times import Measured, agreed_costs
from sglang.srt.disaggregation.local_prefill.pace import Limits, Pace
from sglang.srt.disaggregation.local_prefill.policy import Decision, Load, choose

MOST_IN_A_STEP = 8192
REMOTE = Decision(False, "long")


@dataclass(frozen=True)
class World:
    """The clients, and the servers' times in seconds and sizes in tokens. A pair is a constant and
    a slope over tokens (``chunk``, ``prefill``) or requests (``step``)."""

    talks: int = 6
    turns: int = 10
    first: int = 512
    new: int = 112
    answer: int = 40
    think: float = 0.0
    """Mean time from an answer to the next turn."""
    cold: int = 0
    """Number of clients that send a prompt of ``cold_tokens`` after each answer."""
    cold_tokens: int = 5000
    chunk: tuple[float, float] = (0.014, 0.0001)
    step: tuple[float, float] = (0.004, 0.0006)
    prefill: tuple[float, float] = (0.012, 0.00008)
    wire: float = 0.015
    """Time to prefill's queue, and from its step to decode."""
    answering: float = 0.0
    """Time from prefill's check of a finished transfer to the end of the client's answer."""
    front: float = 0.005
    """Time between client and decode, each way."""
    noise: float = 0.15
    """Spread of the logarithm of each time."""
    spikes: float = 0.0
    """Share of all times that take five times as long, because of other load on the machine."""


#: Yields seconds to wait, or None to wait for a wake-up.
Process = Iterator[float | None]


@dataclass(eq=False)
class Turn:
    """A request. ``talk`` is negative for cold prompts; ``is_later``: not the first of its talk."""

    talk: int
    is_later: bool
    tokens: int
    answer: int
    sent: float
    admitted: float = 0.0
    decision: Decision = REMOTE
    #: Tokens that decode has to compute, and answer tokens that it has.
    left: int = 0
    got: int = 0
    #: True if prefill's half of the request has ended.
    has_prefill: bool = False
    ttft: float | None = None
    is_over: bool = False
    #: The request's steps if prefill computes it.
    remote: Process = iter(())


def taken(turns: list[Turn]) -> list[Turn]:
    """Remove and return all turns."""
    found = turns.copy()
    turns.clear()
    return found


class Talks:
    """One run. ``where``: ``remote``, ``always`` (local) or ``chosen``."""

    def __init__(
        self, world: World, where: str, seed: int, measured: Measured | None = None
    ) -> None:
        self.world, self.where, self._seed = world, where, seed
        self._random, self._now = random.Random(seed), 0.0
        self._events: list[tuple[float, int, Process]] = []
        self._numbers = itertools.count()
        self._limits = Limits(256, 512, always=where == "always")
        self.measured = measured or Measured()
        self._pace = Pace(self._limits)
        #: Tokens that were announced to prefill and whose KV has not arrived.
        self._remote_tokens = 0
        self._clients: dict[int, Process] = {}
        self._loops = {"decode": self._decode(), "prefill": self._prefill()}
        self._idle = set(self._loops)
        self._arrived: list[Turn] = []
        self._landed: list[Turn] = []
        self._local: list[Turn] = []
        self._running: list[Turn] = []
        self._waiting: list[Turn] = []
        self._unanswered: list[Turn] = []
        self._open = world.talks
        #: TTFT of later turns in seconds.
        self.ttft: list[float] = []
        self.seconds = 0.0

    @property
    def ttft_p50(self) -> float:
        return median(self.ttft)

    @property
    def per_second(self) -> float:
        """Turns of talks per second."""
        return self.world.talks * self.world.turns / self.seconds

    def play(self) -> Talks:
        """Run to the end of the last talk."""
        world = self.world
        begin = 1.0 if world.cold else 0.0
        for talk in range(-world.cold, world.talks):
            self._clients[talk] = self._client(talk)
            at = begin + self._random.uniform(0, world.think) if talk >= 0 else 0.0
            self._after(at, self._clients[talk])
        while self._open:
            self._now, _, process = heapq.heappop(self._events)
            delay = next(process, None)
            if delay is not None:
                self._after(delay, process)
        self.seconds = self._now - begin
        return self

    def _after(self, delay: float, process: Process) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._numbers), process))

    def _wake(self, loop: str) -> None:
        if loop in self._idle:
            self._idle.remove(loop)
            self._after(0.0, self._loops[loop])

    def _about(self, constant: float, slope: float = 0.0, count: int = 0) -> float:
        seconds = constant + slope * count
        if self._random.random() < self.world.spikes:
            seconds *= 5
        return seconds * self._random.lognormvariate(0, self.world.noise)

    # ---- the clients ----

    def _client(self, talk: int) -> Process:
        world = self.world
        is_cold, numbers = talk < 0, itertools.count() if talk < 0 else range(world.turns)
        pauses = random.Random(f"{self._seed} {talk}")  # the same for local and remote turns
        for number in numbers:
            if number:
                has_pause = world.think and not is_cold
                yield pauses.expovariate(1 / world.think) if has_pause else 0.004
            tokens = world.new + 1 if number else world.first
            turn = Turn(talk, number > 0, tokens, world.answer, self._now)
            if is_cold:
                turn = Turn(talk, False, world.cold_tokens, 8, self._now)
            yield self._about(world.front)
            self._arrived.append(turn)
            self._wake("decode")
            yield None  # until the answer has arrived
            if turn.is_later:
                assert turn.ttft is not None
                self.ttft.append(turn.ttft)
        self._open -= 1

    def _see(self, turn: Turn) -> None:
        """Show the router the turn's progress."""
        if not turn.got or not turn.has_prefill:
            return
        back = self._about(self.world.front)
        if turn.ttft is None:
            turn.ttft = self._now + back - turn.sent
        if turn.got == turn.answer and not turn.is_over:
            turn.is_over = True
            self._after(back, self._clients[turn.talk])

    # ---- decode ----

    def _decode(self) -> Process:
        """Run decode's loop."""
        while True:
            for turn in taken(self._arrived):
                self._admit(turn)
            if self._local and self._pace.may_run(len(self._running)):
                yield from self._chunk()
                continue
            for turn in taken(self._landed):
                self._remote_tokens -= turn.tokens
                self._token([turn])
            if not self._running:
                self._idle.add("decode")
                yield None
                continue
            self._pace.step()
            turns = [*self._running]
            seconds = self._about(*self.world.step, len(turns))
            yield seconds
            self.measured.add_step(seconds)
            self._token(turns)

    def _admit(self, turn: Turn) -> None:
        turn.admitted = self._now
        if self.where != "remote":
            self._pace.costs = agreed_costs(self.measured.votes())
            queued = sum(each.left for each in self._local)
            load = Load(queued, self._remote_tokens, len(self._running))
            turn.decision = choose(turn.tokens, load, self._limits)
        if turn.decision.local:
            turn.left, turn.has_prefill = turn.tokens, True
            self._local.append(turn)
        else:
            self._remote_tokens += turn.tokens
            turn.remote = self._remote(turn)
            self._after(0.0, turn.remote)

    def _chunk(self) -> Process:
        """Compute the next chunk."""
        room, ready = self._limits.chunk, list[Turn]()
        for turn in self._local:
            took = min(turn.left, room)
            turn.left, room = turn.left - took, room - took
            if not turn.left:
                ready.append(turn)
        tokens = self._limits.chunk - room
        self._local = [turn for turn in self._local if turn.left]
        self._pace.chunk(tokens, len(self._running))
        seconds = self._about(*self.world.chunk, tokens)
        yield seconds
        self.measured.chunk.add(tokens, seconds)
        self._token(ready)

    def _token(self, turns: Iterable[Turn]) -> None:
        """Add one token to each turn; a turn with its first token runs from now on."""
        for turn in turns:
            if not turn.got:
                self._running.append(turn)
            turn.got += 1
            if turn.got == turn.answer:
                self._running.remove(turn)
            self._see(turn)

    # ---- prefill ----

    def _prefill(self) -> Process:
        """Run prefill's loop: the whole queue is one step."""
        while True:
            for turn in taken(self._unanswered):
                self._after(self._about(self.world.answering), turn.remote)
            turns, tokens = list[Turn](), 0
            while self._waiting and (not turns or tokens < MOST_IN_A_STEP):
                turns.append(self._waiting.pop(0))
                # Prefill never had the KV of the last answer.
                tokens += turns[-1].tokens + (self.world.answer if turns[-1].is_later else 0)
            if not turns:
                self._idle.add("prefill")
                yield None
                continue
            yield self._about(*self.world.prefill, tokens)
            for turn in turns:
                self._after(self._about(self.world.wire), turn.remote)

    def _remote(self, turn: Turn) -> Process:
        """Run a turn on prefill, from its announcement to the client's answer."""
        yield self._about(self.world.wire)
        self._waiting.append(turn)
        self._wake("prefill")
        yield None  # until it is computed
        self._unanswered.append(turn)
        self._landed.append(turn)
        self._wake("prefill")
        self._wake("decode")
        yield None  # until prefill checks its transfers
        turn.has_prefill = True
        self._see(turn)


# ---- the choice against either side ----

SEEDS = 8
A_TENTH = 1.1

QUIET = World(think=0.3)
#: Talks at other rates, and beside clients whose prompts keep prefill busy.
RATES = {
    "one talk": World(talks=1),
    "two talks": World(talks=2),
    "a pause of 0.1 s": World(think=0.1),
    "a pause of 0.3 s": QUIET,
    "a pause of 1 s": World(think=1.0),
    "24 talks": World(talks=24, think=1.0),
    "others use the machine": replace(QUIET, spikes=0.05),
    "one cold client": World(cold=1),
    "two cold clients": World(cold=2),
    "four cold clients": World(cold=4),
    "two cold clients, and a pause": replace(QUIET, cold=2),
}
#: One side computes a token several times as fast as the other, and both queues are short.
UNEQUAL = {
    "a slow decode server": replace(QUIET, chunk=(0.03, 0.0003)),
    "a fast prefill server": World(prefill=(0.004, 0.00002), wire=0.004),
}
IN_EACH_RUN = "a pause of 0.3 s", "others use the machine", "two cold clients"


def arm(world: World, where: str) -> tuple[float, float]:
    """Return the TTFT of later turns (p50) and turns per second, medians over the seeds. The
    servers have answered one talk before, as in the benchmark."""
    runs = []
    for seed in range(SEEDS):
        first = replace(world, talks=1, turns=4, cold=0)
        measured: Measured = Talks(first, where, 1000 + seed).play().measured
        runs.append(Talks(world, where, seed, measured).play())
    return median(r.ttft_p50 for r in runs), median(r.per_second for r in runs)


def names(rates: dict[str, World]) -> list[Any]:
    """Return the names; most of them are for the nightly run."""
    nightly = pytest.mark.nightly
    return [n if n in IN_EACH_RUN else pytest.param(n, marks=nightly) for n in rates]


@pytest.mark.parametrize("name", names(RATES))
def test_the_choice_has_the_shorter_ttft(name: str) -> None:
    """Guards against a choice that is worse than none: its TTFT is within a tenth of the better
    side's, and it answers no fewer turns a second than a server that computes all of them."""
    remote, always, chosen = (arm(RATES[name], w) for w in ("remote", "always", "chosen"))
    assert chosen[0] <= A_TENTH * min(remote[0], always[0]), (remote, always, chosen)
    assert A_TENTH * chosen[1] >= always[1], (remote, always, chosen)


@pytest.mark.parametrize("name", UNEQUAL)
def test_servers_of_unequal_speed(name: str) -> None:
    """Guards against a choice that is worse than a server that computes all turns. The lengths of
    two short queues do not tell the faster side, so prefill alone would have the shorter TTFT."""
    always, chosen = (arm(UNEQUAL[name], where) for where in ("always", "chosen"))
    assert chosen[0] <= always[0] and A_TENTH * chosen[1] >= always[1], (always, chosen)


@pytest.mark.parametrize(
    "world", [World(), World(spikes=0.05), World(answering=0.04)], ids=["", "spikes", "answering"]
)
def test_where_decode_is_the_bottleneck(world: World) -> None:
    """Guards against the worse of both. Six talks without a pause keep decode busy all the time:
    one side has the shorter TTFT, the other more turns per second; the choice has the first."""
    remote, always, chosen = (arm(world, where) for where in ("remote", "always", "chosen"))
    assert always[0] < remote[0] and always[1] < remote[1]
    assert chosen[0] <= A_TENTH * always[0] and A_TENTH * chosen[1] >= always[1]

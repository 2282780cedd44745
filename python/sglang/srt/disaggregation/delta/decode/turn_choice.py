"""Who computes a turn's new tokens: this decode server, or its prefill server. Pure.

Each side's time is measured online and forgotten again (``Line``). The ranks agree on the numbers
(``Costs``, one integer each) in the vector that they reduce anyway, and every rank decides from the
agreed ones by the same arithmetic, so that no rank takes a turn that another one announces.
All times in seconds, all lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.disaggregation.delta.decode.itl import TokenGaps

#: What a sample still weighs when the next one comes.
DECAY = 0.9
#: Samples of a side before it is judged by them.
ENOUGH = 3
#: A chunk that takes longer than so many times what was expected counts as that; after one that
#: takes less than this part of it, the ones before it weigh only ``SURPRISED``.
MOST_OF_EXPECTED, SURPRISED = 2.0, 0.3
#: Of the time that turns are expected to take, the part that may be lost to turns that try the side
#: which looks slower; and how many turns lie between two of them at least.
EXPLORING, BETWEEN_EXPLORING = 0.05, 8
#: What a second for which running requests stand still counts beside one for which the turn waits.
OTHERS = 0.2
#: Decode steps after which a local chunk runs, whatever the share says; and after which one runs
#: that does not fit into the bound on inter-token latency, so that 99 gaps in 100 keep it.
MOST_STEPS_BETWEEN, STEPS_BEFORE_BREACH = 64, 100
#: With that bound: tokens of the smallest chunk that is worth its constant, but for a turn's last;
#: chunks are as small while their time is unknown. They are a page at least.
LEAST_CHUNK = 64
#: In a vector of integers of which the smallest counts: a number that was not measured yet, and the
#: word that a turn must not be computed locally, as far as this rank knows.
UNKNOWN, NEVER = -1, -2
_MICRO, _NANO = 1_000_000, 1_000_000_000


class Line:
    """Seconds as a constant and a slope over tokens, fitted to samples that decay.

    ``constant``: which part of an average sample is taken to be constant while samples of one size
    do not tell. ``dropped``: first samples that do not count (kernels are compiled, caches filled).
    ``enough``: samples before anything counts as known. ``most``: a sample counts as at most so
    many times what the ones before it say, and they are soon forgotten where they said so many
    times too much (None: all samples count as they are). A machine that stood still for a moment
    says little of the next time, and a side that looks slow is hardly measured again.
    """

    def __init__(
        self, constant: float, dropped: int = 0, enough: int = 1, most: float | None = None
    ) -> None:
        self._constant, self._dropped, self._lacking = constant, dropped, enough
        self._most = most
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough was measured."""
        return self._lacking <= 0

    def add(self, tokens: int, seconds: float) -> None:
        """One more sample."""
        if self._dropped:
            self._dropped -= 1
            return
        decay = DECAY
        if self._most is not None and self._weight:
            expected = self.at(tokens)
            decay = SURPRISED if seconds * self._most < expected else DECAY
            seconds = min(seconds, self._most * expected)
        self._lacking -= 1
        for name, value in (
            ("_weight", 1.0),
            ("_x", tokens),
            ("_y", seconds),
            ("_xx", tokens * tokens),
            ("_xy", tokens * seconds),
        ):
            setattr(self, name, decay * getattr(self, name) + value)

    @property
    def coefficients(self) -> tuple[float, float]:
        """The constant in seconds and the slope in seconds a token; neither is negative."""
        if not self._weight:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        # One more sample of a tenth's weight, at no tokens, keeps the fit defined.
        weight, y = self._weight + 0.1, self._y + 0.1 * self._constant * mean_y
        variance = self._xx - self._x * self._x / weight
        if variance <= 0:
            return mean_y, 0.0
        slope = (self._xy - self._x * y / weight) / variance
        if slope <= 0:
            return mean_y, 0.0
        constant = (y - slope * self._x) / weight
        return (constant, slope) if constant >= 0 else (0.0, mean_y / mean_x)

    def at(self, tokens: int) -> float:
        """Seconds for ``tokens``."""
        constant, slope = self.coefficients
        return constant + slope * tokens


class Mean:
    """An average of samples that decay."""

    def __init__(self) -> None:
        self._weight = self._sum = 0.0

    def add(self, value: float) -> None:
        """One more sample."""
        self._weight = DECAY * self._weight + 1.0
        self._sum = DECAY * self._sum + value

    @property
    def value(self) -> float | None:
        """The average, or None where nothing was measured."""
        return self._sum / self._weight if self._weight else None


class Costs(NamedTuple):
    """What the ranks agreed on: a chunk's constant and slope, a decode step, and how long a chunk
    may take beside requests that run; None: unknown, or not bounded."""

    constant: float | None = None
    slope: float | None = None
    step: float | None = None
    slack: float | None = None

    def chunks(self, count: int, tokens: int) -> float | None:
        """Seconds of ``count`` chunks with ``tokens`` tokens in all."""
        if self.constant is None or self.slope is None:
            return None
        return count * self.constant + tokens * self.slope

    def largest_chunk(self, limits: Limits) -> int:
        """Tokens of the largest chunk that may run beside requests that run; 0 if none may."""
        if self.slack is None or limits.max_itl is None:
            return max(limits.chunk, limits.page)
        left = self.slack - (self.constant or 0.0)
        if left < 0:
            return 0
        if not self.slope or self.slack > limits.max_itl:
            return limits.least  # nobody knows what a larger one takes
        return int(min(left / self.slope, max(limits.chunk, limits.page)))


#: Numbers in ``Measured.votes``.
VOTES = len(Costs._fields)


class Measured:
    """What one rank has measured: its own chunks and steps, and its prefill servers.

    ``max_itl``: the bound on inter-token latency, seconds."""

    def __init__(self, max_itl: float | None = None) -> None:
        self.chunk = Line(constant=0.25, dropped=1, enough=ENOUGH, most=MOST_OF_EXPECTED)
        self.step = Mean()
        self.gaps = TokenGaps(max_itl)
        self._there: dict[str, Line] = {}

    def shown(self, address: str, tokens: int, seconds: float) -> None:
        """What prefill ``address`` computed of a turn with ``tokens`` was shown to the client so
        long after it was announced: the same moment as that to which a turn is timed here.

        While only long prompts were measured, all of their time is taken to be for their tokens:
        short turns then look soon done, and the first of them that is sent tells. Of a side that
        looks slow little is heard again.
        """
        self._there.setdefault(address, Line(constant=0.0)).add(tokens, seconds)

    def there(self, address: str, tokens: int) -> float | None:
        """When a turn with ``tokens`` from prefill ``address`` is expected to be shown."""
        line = self._there.get(address)
        return None if line is None else line.at(tokens)

    def forget(self, address: str) -> None:
        """A prefill server went away: another one there may be faster or slower."""
        self._there.pop(address, None)

    def votes(self) -> list[int]:
        """This rank's costs, for the ranks to agree on."""
        constant, slope = self.chunk.coefficients if self.chunk.is_known else (None, None)
        times = (self.step.value, self.gaps.slack)
        return [_vote(constant, _MICRO), _vote(slope, _NANO), *(_vote(s, _MICRO) for s in times)]

    def vote_there(self, address: str, tokens: int) -> int:
        """``there`` as a number for the ranks to agree on."""
        return _vote(self.there(address, tokens), _MICRO)


def _vote(value: float | None, unit: int) -> int:
    return UNKNOWN if value is None else int(value * unit)


def _word(vote: int, unit: int) -> float | None:
    return None if vote == UNKNOWN else vote / unit


def read(votes: Sequence[int]) -> Costs:
    """The costs that the ranks agreed on."""
    constant, slope, step, slack = votes
    return Costs(
        _word(constant, _MICRO), _word(slope, _NANO), _word(step, _MICRO), _word(slack, _MICRO)
    )


def read_there(vote: int) -> float | None:
    """When prefill is expected to be done, as the ranks agreed on it; not for ``NEVER``."""
    return _word(vote, _MICRO)


class Load(NamedTuple):
    """What a turn meets on this server; equal on all ranks. ``queued``: tokens of local turns ahead
    of it; ``running``: requests whose decode steps alternate with chunks; ``debt``: see ``Pace``;
    ``is_full``: the running batch has no place for the turn; ``chunk``: tokens of the largest chunk
    that fits into the bound on inter-token latency, None where that binds nothing."""

    queued: int = 0
    running: int = 0
    debt: float = 0.0
    is_full: bool = False
    chunk: int | None = None


@dataclass(frozen=True)
class Limits:
    """The settings. ``tokens``: of the largest turn; ``share``: of time, while requests run;
    ``max_itl``: the bound on inter-token latency, seconds; ``page``: tokens of a page."""

    tokens: int
    chunk: int = 512
    share: float = 0.5
    #: Every turn within ``tokens`` is computed locally, whatever it costs.
    always: bool = False
    #: The largest turn that is computed locally where its prefill server is lost.
    when_lost: int = 0
    max_itl: float | None = None
    page: int = 1

    @property
    def least(self) -> int:
        """Tokens of the smallest chunk but the last of a turn."""
        return max(min(LEAST_CHUNK, self.chunk), self.page)

    def chunks(self, tokens: int, load: Load) -> int:
        """How many chunks ``tokens`` take."""
        size = self.chunk if load.chunk is None else max(load.chunk, self.least)
        return -(-tokens // size)


class Decision(NamedTuple):
    """Where a turn is computed and why; when it is expected to be done on either side."""

    local: bool
    reason: str
    here: float | None = None
    there: float | None = None

    @property
    def where(self) -> str:
        """The side in a word."""
        return "local" if self.local else "remote"

    @property
    def expected(self) -> float | None:
        """Seconds until its first token, on the side that was chosen."""
        return self.here if self.local else self.there


class Announced(NamedTuple):
    """A turn that prefill computes, on the record of its request. ``at``: this rank's clock,
    ``tokens``: those announced."""

    decision: Decision
    address: str
    tokens: int
    at: float


def expected_here(tokens: int, load: Load, costs: Costs, limits: Limits) -> float | None:
    """Seconds until a turn of ``tokens`` new tokens is computed locally; None where unknown.

    The step under way ends first; then come the chunks of those ahead and its own, and between two
    of them decode steps as ``Pace`` has them.
    """
    total = load.queued + tokens
    count = limits.chunks(total, load)
    work = costs.chunks(count, total)
    if work is None:
        return None
    if not load.running:
        return work
    step = costs.step or 0.0
    pause = max(step, work / count * (1 - limits.share) / limits.share)
    return step + load.debt * (1 - limits.share) / limits.share + work + (count - 1) * pause


class Choice:
    """Decides for one server; what it keeps is equal on all ranks, as what it reads is."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: Seconds that may be lost by trying the side that looks slower; turns since one tried it.
        self._to_lose, self._since = 0.0, 0

    def decide(self, tokens: int, load: Load, costs: Costs, there: float | None) -> Decision:
        """Where a turn of ``tokens`` new tokens, which could be computed locally, is computed."""
        if tokens > self.limits.tokens:
            return Decision(False, "long", None, there)
        here = expected_here(tokens, load, costs, self.limits)
        if self.limits.always:
            return Decision(True, "always", here, there)
        if load.is_full:
            # It would wait for a place and then leave it empty while it is computed.
            return Decision(False, "no_place", here, there)
        if load.chunk is not None and load.chunk < min(load.queued + tokens, self.limits.least):
            return Decision(False, "itl", here, there)
        if here is None:
            # One at a time: until it is measured nobody knows what a queue of them costs.
            return Decision(load.queued == 0, "unmeasured", here, there)
        if there is None:
            return Decision(False, "unmeasured", here, there)
        chunk = costs.chunks(self.limits.chunks(tokens, load), tokens) or 0.0
        lost = here + OTHERS * chunk * load.running - there
        cheaper = lost < 0
        if self._since >= BETWEEN_EXPLORING and self._to_lose >= abs(lost):
            return Decision(not cheaper, "explore", here, there)
        return Decision(cheaper, "cheaper", here, there)

    def without_prefill(self, tokens: int, load: Load, costs: Costs, reason: str) -> Decision:
        """Whether a turn is computed locally that no prefill server computes; ``reason``: why
        none."""
        here = expected_here(tokens, load, costs, self.limits)
        return Decision(tokens <= self.limits.when_lost, reason, here)

    def made(self, decision: Decision) -> None:
        """The turn of ``decision`` was taken or announced."""
        if decision.reason == "explore":
            self._to_lose, self._since = 0.0, 0
        elif decision.reason == "cheaper":
            self._to_lose += EXPLORING * (decision.expected or 0.0)
            self._since += 1


class Pace:
    """When the next chunk may run: never two without a decode step between while requests run, and
    over a while at most ``share`` of the time.

    Time is what the agreed costs say, so that all ranks run the same batch.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.costs = Costs()
        #: Seconds of chunks that decode steps have not made up for.
        self.debt = 0.0
        self._steps = MOST_STEPS_BETWEEN

    def may_run(self, running: int, fits: bool = True) -> bool:
        """Whether a chunk may run now, beside ``running`` requests; ``fits``: into the bound on
        inter-token latency."""
        if not running:
            return True
        if not fits:
            return self._steps >= STEPS_BEFORE_BREACH
        if not self._steps:
            return False
        return self.debt <= 0 or self._steps >= MOST_STEPS_BETWEEN

    def chunk(self, tokens: int, running: int) -> None:
        """A chunk of ``tokens`` was launched; nobody stood still for it if nothing was running."""
        if running:
            self.debt += self.costs.chunks(1, tokens) or 0.0
        self._steps = 0

    def step(self) -> None:
        """A decode step was launched."""
        self._steps += 1
        made_up = (self.costs.step or 0.0) * self._share
        left = self.debt * (1 - self._share) - made_up
        self.debt = left / (1 - self._share) if left > 0 else 0.0


class StepTimes:
    """How long steps take, seen from the hooks around SGLang's loop.

    ``blocking``: the launch itself computes (CPU), and it ends at the next hook of whatever kind.
    Otherwise a step ends when its result is there, and began when it was launched or the one before
    ended, whichever was later.
    """

    def __init__(self, measured: Measured, blocking: bool) -> None:
        self._measured, self._blocking = measured, blocking
        self._launched: list[tuple[int, float]] = []
        self._ended_at = float("-inf")

    def launched(self, tokens: int, at: float) -> None:
        """A step was handed to the loop: a chunk of ``tokens``, or with 0 a decode step."""
        self._launched.append((tokens, at))

    def hook(self, at: float) -> None:
        """The loop called something else."""
        if self._blocking and self._launched:
            self._end(at)

    def result(self, at: float) -> None:
        """The oldest step's result is there."""
        if not self._blocking and self._launched:
            self._end(at)

    def interrupted(self) -> None:
        """The engine was paused: the steps under way and the next gap are not measured."""
        self._launched = [(-1, since) for _, since in self._launched]
        self._measured.gaps.forget()

    def _end(self, at: float) -> None:
        tokens, since = self._launched.pop(0)
        seconds = at - max(since, self._ended_at)
        self._ended_at = at
        if tokens > 0:
            chunk = self._measured.chunk
            self._measured.gaps.chunks.append(chunk.at(tokens) if chunk.is_known else None)
            chunk.add(tokens, seconds)
        elif tokens == 0:
            self._measured.step.add(seconds)

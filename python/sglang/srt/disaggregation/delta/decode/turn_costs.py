"""What turns take, as one rank measures it and the ranks agree on it. Pure.

Each side's time is tracked as an average that decays (``Line``). The ranks agree on the numbers
(``Costs``, one integer each) in the vector that they reduce anyway, and every rank decides from the
agreed ones by the same arithmetic. All times in seconds, all lengths in tokens.

A chunk of a local turn runs between two decode steps, so the tokens of the second step come later
by its time. With a bound on inter-token latency, a chunk may take what the bound leaves beside the
rest of such a gap: the decode step, the loop around it, and what chunks take above the expected
time. The rest is tracked at its 99th percentile (``TokenGaps``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: What a sample still weighs when the next one comes.
DECAY = 0.9
#: Samples of a side before it is judged by them.
ENOUGH = 3
#: A chunk that takes longer than so many times what was expected counts as that; after one that
#: takes less than this part of it, the ones before it weigh only ``SURPRISED``.
MOST_OF_EXPECTED, SURPRISED = 2.0, 0.3
#: The same bound for turns of prefill servers. Larger, because their time includes a queue.
MAX_OF_EXPECTED_THERE = 3.0
#: With a bound on inter-token latency: tokens of the smallest chunk that is worth its constant, but
#: for a turn's last; chunks are as small while their time is unknown. They are a page at least.
LEAST_CHUNK = 64
#: The part of the gaps with a chunk that may pass the bound; of all gaps, where no chunk fits.
TOLERATED = 0.01
#: The part of the bound by which the slack shrinks for one gap whose rest was longer. It grows by
#: ``TOLERATED`` of that for each other gap, so the rest comes to stand at the percentile.
GAIN = 0.1


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
        self, constant: float = 0.0, dropped: int = 0, enough: int = 1, most: float | None = None
    ) -> None:
        self._constant, self._dropped, self._lacking = constant, dropped, enough
        self._most = most
        #: Decaying sums over the samples: of 1, tokens, seconds, tokens^2, tokens x seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

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
        if self._most is not None and self._sums[0]:
            expected = self.at(tokens)
            decay = SURPRISED if seconds * self._most < expected else DECAY
            seconds = min(seconds, self._most * expected)
        self._lacking -= 1
        sample = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(decay * s + new for s, new in zip(self._sums, sample, strict=True))

    @property
    def coefficients(self) -> tuple[float, float]:
        """The constant in seconds and the slope in seconds a token; neither is negative."""
        count, x, y, xx, xy = self._sums
        if not count:
            return 0.0, 0.0
        mean_x, mean_y = x / count, y / count
        # One more sample of a tenth's weight, at no tokens, keeps the fit defined.
        weight, y = count + 0.1, y + 0.1 * self._constant * mean_y
        variance = xx - x * x / weight
        slope = (xy - x * y / weight) / variance if variance > 0 else 0.0
        if slope <= 0:
            return mean_y, 0.0
        constant = (y - slope * x) / weight
        return (constant, slope) if constant >= 0 else (0.0, mean_y / mean_x)

    def at(self, tokens: int) -> float:
        """Seconds for ``tokens``."""
        constant, slope = self.coefficients
        return constant + slope * tokens


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
        most = max(limits.chunk, limits.page)
        if self.slack is None or limits.max_itl is None:
            return most
        left = self.slack - (self.constant or 0.0)
        if left < 0:
            return 0
        if not self.slope or self.slack > limits.max_itl:
            return limits.least  # nobody knows what a larger one takes
        return int(min(left / self.slope, most))


# ---- votes: what a rank measured, as integers of which the smallest over the ranks counts ----

#: A number that was not measured yet, and the vote that a turn must not be computed locally, as far
#: as this rank knows.
UNKNOWN, NEVER = -1, -2
#: Numbers in ``Measured.votes``.
VOTES = len(Costs._fields)
_MICRO, _NANO = 1_000_000, 1_000_000_000


def _vote(value: float | None, unit: int) -> int:
    return UNKNOWN if value is None else int(value * unit)


def read(votes: Sequence[int]) -> Costs:
    """The costs that the ranks agreed on."""
    units = (_MICRO, _NANO, _MICRO, _MICRO)
    pairs = zip(votes, units, strict=True)
    return Costs(*(None if vote == UNKNOWN else vote / unit for vote, unit in pairs))


def read_there(vote: int) -> float | None:
    """When prefill is expected to be done, as the ranks agreed on it; not for ``NEVER``."""
    return None if vote == UNKNOWN else vote / _MICRO


class TokenGaps:
    """The gaps between the decode steps of one rank.

    ``bound``: of a gap; None: the gaps are measured, and chunks are not bounded.
    """

    def __init__(self, bound: float | None = None) -> None:
        self._bound = bound or 0.0
        #: The longest expected time of a chunk beside requests that run: the bound less the rest.
        #: None without a bound.
        self.slack = None if bound is None else bound / 2
        #: The expected times of the chunks that ended since the last decode step; None: unknown.
        self.chunks: deque[float | None] = deque(maxlen=64)  # some turns end without a step
        self._at, self._rids = 0.0, frozenset[str]()

    def step(self, at: float, rids: frozenset[str], fits: bool) -> tuple[float, bool] | None:
        """A decode step ended ``at``, with tokens for ``rids``. The gap before it, and whether a
        chunk ran in that; None if none of them had a token of the step before.

        ``fits``: whether a chunk would fit now. If not, gaps without one let the slack grow, so
        that one chunk in a hundred gaps measures it again.
        """
        seconds, chunks, waited = at - self._at, [*self.chunks], not rids.isdisjoint(self._rids)
        self._at, self._rids = at, rids
        self.chunks.clear()
        if not waited:
            return None
        if self.slack is not None and (None not in chunks if chunks else not fits):
            rest = seconds - sum(chunk or 0.0 for chunk in chunks)
            is_late = bool(chunks) and rest > self._bound - self.slack
            slack = self.slack + GAIN * self._bound * (TOLERATED - is_late)
            # Where none fits, up to what a chunk seems to take: one is tried again then.
            self.slack = min(max(slack, 0.0), 2 * self._bound if chunks else math.inf)
        return seconds, bool(chunks)

    def forget(self) -> None:
        """The time before the next step is no gap."""
        self._rids = frozenset()


class Measured:
    """What one rank has measured: its own chunks and steps, and its prefill servers.

    ``max_itl``: the bound on inter-token latency, seconds."""

    def __init__(self, max_itl: float | None = None) -> None:
        self.chunk = Line(constant=0.25, dropped=1, enough=ENOUGH, most=MOST_OF_EXPECTED)
        #: Of no tokens: the average of the samples.
        self.step = Line()
        self.gaps = TokenGaps(max_itl)
        self._there: dict[str, Line] = {}

    def shown(self, address: str, tokens: int, seconds: float) -> None:
        """What prefill ``address`` computed of a turn with ``tokens`` was shown to the client so
        long after it was announced: the same moment as that to which a turn is timed here.

        While only long prompts were measured, all of their time is taken to be for their tokens:
        short turns then look soon done, and the first of them that is sent tells. Of a side that
        looks slow little is heard again.
        """
        self._there.setdefault(address, Line(most=MAX_OF_EXPECTED_THERE)).add(tokens, seconds)

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
        times = self.step.at(0) if self.step.is_known else None, self.gaps.slack
        return [_vote(constant, _MICRO), _vote(slope, _NANO), *(_vote(s, _MICRO) for s in times)]

    def vote_there(self, address: str, tokens: int) -> int:
        """``there`` as a number for the ranks to agree on."""
        return _vote(self.there(address, tokens), _MICRO)


#: In place of a step's number of tokens: the step is not measured, or another data parallel rank
#: computes a chunk in it.
NOT_MEASURED, OTHERS_CHUNK = -1, -2


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
        """Note that a step was launched: a chunk of ``tokens``, with 0 a decode step, else
        ``NOT_MEASURED`` or ``OTHERS_CHUNK``."""
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
        self._launched = [(NOT_MEASURED, since) for _, since in self._launched]
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
            self._measured.step.add(0, seconds)
        elif tokens == OTHERS_CHUNK:
            self._measured.gaps.chunks.append(None)

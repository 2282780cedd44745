"""Times of chunks, decode steps and gaps, as one rank measures them and as the ranks agree on them.
Pure.

The ranks agree on four integers (``Measured.votes``) in the vector that they reduce anyway, and
compute with these alone. All times are in seconds, all lengths in tokens.

A chunk of a local turn runs between two decode steps, and delays the tokens of the second one. With
a bound on inter-token latency, a chunk may take the bound less the *rest* of such a gap: the decode
step, the loop around it, and the time of the chunk above its expected time. The rest is tracked at
its 99th percentile (``TokenGaps``).

Contract: scheduler thread. Each rank measures for itself; nothing is decided by its own numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from sglang.srt.disaggregation.policy.pace import Costs

#: Weight of a sample when the next one arrives.
DECAY = 0.9
#: First chunks that are not measured, because kernels are compiled and caches are cold.
UNMEASURED_CHUNKS = 1
#: Measured chunks before their time counts as known.
ENOUGH = 3
#: Assumed constant part of a chunk's time while all chunks had the same size.
CONSTANT_SHARE = 0.25
#: A chunk counts as at most this multiple of its expected time: the machine may have stalled.
MAX_OF_EXPECTED = 2.0
#: Weight of earlier samples after one that took less than 1 / ``MAX_OF_EXPECTED`` of the expected
#: time: they were taken in a stall.
DECAY_AFTER_STALL = 0.3
#: Part of the gaps with a chunk that may exceed the bound; of all gaps, if no chunk fits.
TOLERATED = 0.01
#: The slack falls by this part of the bound for each gap with a longer rest, and rises by
#: ``TOLERATED`` of it for each other gap. So the rest converges to the 99th percentile.
GAIN = 0.1


class ChunkLine:
    """Time of a chunk as a constant and a slope over tokens, fitted to samples that decay."""

    def __init__(self) -> None:
        self._unmeasured, self._lacking = UNMEASURED_CHUNKS, ENOUGH
        #: Decaying sums over the samples: of 1, tokens, seconds, tokens^2, tokens x seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

    @property
    def is_known(self) -> bool:
        """True if enough chunks were measured."""
        return self._lacking <= 0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a sample."""
        if self._unmeasured:
            self._unmeasured -= 1
            return
        decay = DECAY
        if self._sums[0]:
            expected = self.at(tokens)
            decay = DECAY_AFTER_STALL if seconds * MAX_OF_EXPECTED < expected else DECAY
            seconds = min(seconds, MAX_OF_EXPECTED * expected)
        self._lacking -= 1
        sample = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(decay * s + new for s, new in zip(self._sums, sample, strict=True))

    @property
    def coefficients(self) -> tuple[float, float]:
        """Constant in seconds and slope in seconds a token; neither is negative."""
        count, x, y, xx, xy = self._sums
        if not count:
            return 0.0, 0.0
        mean_x, mean_y = x / count, y / count
        # One more sample of a tenth's weight, at no tokens, keeps the fit defined.
        weight, y = count + 0.1, y + 0.1 * CONSTANT_SHARE * mean_y
        variance = xx - x * x / weight
        slope = (xy - x * y / weight) / variance if variance > 0 else 0.0
        if slope <= 0:
            return mean_y, 0.0
        constant = (y - slope * x) / weight
        return (constant, slope) if constant >= 0 else (0.0, mean_y / mean_x)

    def at(self, tokens: int) -> float:
        """Return the expected time of a chunk of ``tokens``."""
        constant, slope = self.coefficients
        return constant + slope * tokens


class TokenGaps:
    """Gaps between the decode steps of one rank.

    ``bound``: longest gap; None: gaps are measured, and chunks are not bounded.
    """

    def __init__(self, bound: float | None = None) -> None:
        self._bound = bound or 0.0
        #: Longest expected time of a chunk beside running requests: the bound less the rest. None
        #: without a bound.
        self.slack = None if bound is None else bound / 2
        #: Expected times of the chunks that ended since the last decode step; None: unknown.
        self.chunks: deque[float | None] = deque(maxlen=64)  # some turns end without a step
        self._at, self._rids = 0.0, frozenset[str]()

    def step(self, at: float, rids: frozenset[str], fits: bool) -> tuple[float, bool] | None:
        """Note a decode step that ended ``at`` with tokens for ``rids``. Return the gap before it
        and True if a chunk ran in it, or None if no request had a token in the step before.

        ``fits``: a chunk would fit now. If not, gaps without a chunk let the slack grow, so that
        one chunk in a hundred gaps measures it again.
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
            # If no chunk fits, the slack grows up to the time of one, which is attempted then.
            self.slack = min(max(slack, 0.0), 2 * self._bound if chunks else math.inf)
        return seconds, bool(chunks)

    def forget(self) -> None:
        """Do not count the time before the next step as a gap."""
        self._rids = frozenset()


class Measured:
    """Times that one rank has measured. ``max_itl``: bound on inter-token latency, seconds."""

    def __init__(self, max_itl: float | None = None) -> None:
        self.chunk = ChunkLine()
        #: Decaying sums over decode steps: of 1, and of seconds.
        self._steps = self._step_seconds = 0.0
        self.gaps = TokenGaps(max_itl)

    def add_step(self, seconds: float) -> None:
        """Add the time of a decode step."""
        self._steps = DECAY * self._steps + 1
        self._step_seconds = DECAY * self._step_seconds + seconds

    @property
    def step(self) -> float | None:
        """Decaying average of a decode step; None until one was measured."""
        return self._step_seconds / self._steps if self._steps else None

    def votes(self) -> list[int]:
        """Return this rank's numbers for the ranks to agree on."""
        constant, slope = self.chunk.coefficients if self.chunk.is_known else (None, None)
        numbers = Costs(constant, slope, self.step, self.gaps.slack)
        return [
            UNKNOWN if number is None else int(number * unit)
            for number, unit in zip(numbers, _UNITS, strict=True)
        ]


# ---- votes: integers, reduced to the smallest over the ranks ----

#: Vote for a time that this rank has not measured.
UNKNOWN = -1
#: Units of the votes: microseconds, the slope in nanoseconds a token.
_UNITS = (1_000_000, 1_000_000_000, 1_000_000, 1_000_000)
#: Number of votes of ``Measured``.
VOTES = len(_UNITS)


def agreed_costs(votes: Sequence[int]) -> Costs:
    """Return the times that the ranks agreed on."""
    pairs = zip(votes, _UNITS, strict=True)
    return Costs(*(None if vote == UNKNOWN else vote / unit for vote, unit in pairs))


#: In place of a step's tokens: the step is not measured.
NOT_MEASURED = -1
#: In place of a step's tokens: another data-parallel rank computes a chunk in it.
OTHERS_CHUNK = -2


class StepTimes:
    """Measures steps from the hooks around SGLang's loop.

    ``blocking``: the launch itself computes (CPU), and ends at the next hook of any kind. Otherwise
    a step ends when its result arrives, and began at its launch or at the end of the step before,
    whichever was later.
    """

    def __init__(self, measured: Measured, blocking: bool) -> None:
        self._measured, self._blocking = measured, blocking
        self._launched: list[tuple[int, float]] = []
        self._ended_at = -math.inf

    def launched(self, tokens: int, at: float) -> None:
        """Note the launch of a step: a chunk of ``tokens``, 0 for a decode step, else
        ``NOT_MEASURED`` or ``OTHERS_CHUNK``."""
        self._launched.append((tokens, at))

    def hook(self, at: float) -> None:
        """Note that the loop called another hook."""
        if self._blocking and self._launched:
            self._end(at)

    def result(self, at: float) -> None:
        """Note that the oldest step's result arrived."""
        if not self._blocking and self._launched:
            self._end(at)

    def interrupted(self) -> None:
        """Do not measure the launched steps and the next gap: the engine was paused."""
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
            self._measured.add_step(seconds)
        elif tokens == OTHERS_CHUNK:
            self._measured.gaps.chunks.append(None)

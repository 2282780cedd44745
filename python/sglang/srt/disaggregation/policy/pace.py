"""Time and size of the next chunk of local prefill. Pure.

Times are the ones that the ranks agreed on (``Costs``), so all ranks run the same batch. All times
are in seconds, all lengths in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Smallest chunk that is worth its constant time, except for the last one of a turn. With a bound
#: on inter-token latency, chunks have this size while their time is unknown.
MIN_CHUNK = 64
#: A chunk runs after this number of decode steps, whatever the share says.
MAX_STEPS_BETWEEN = 64
#: A chunk that does not fit into the bound on inter-token latency runs after this number of decode
#: steps, so that 99 gaps in 100 keep the bound.
STEPS_BEFORE_BREACH = 100


@dataclass(frozen=True)
class Limits:
    """Settings of local prefill."""

    #: New tokens of the largest turn that decode computes.
    tokens: int
    #: Tokens of the largest chunk.
    chunk: int = 512
    #: Share of the time that chunks may take while requests run.
    share: float = 0.5
    #: New tokens of the largest turn that decode computes if its prefill server is lost.
    when_lost: int = 0
    #: Bound on inter-token latency in seconds; None: no bound.
    max_itl: float | None = None
    #: Tokens of a page.
    page: int = 1

    @property
    def least(self) -> int:
        """Tokens of the smallest chunk, except for the last one of a turn; at least a page."""
        return max(min(MIN_CHUNK, self.chunk), self.page)


class Costs(NamedTuple):
    """Times that the ranks agreed on: a chunk's constant and slope, a decode step, and the longest
    time of a chunk beside running requests. None: unknown, or not bounded."""

    constant: float | None = None
    slope: float | None = None
    step: float | None = None
    slack: float | None = None

    def chunk(self, tokens: int) -> float | None:
        """Return the time of a chunk of ``tokens``, or None if it is unknown."""
        if self.constant is None or self.slope is None:
            return None
        return self.constant + tokens * self.slope

    def largest_chunk(self, limits: Limits) -> int:
        """Return the size of the largest chunk that may run beside running requests, or 0."""
        max_tokens = max(limits.chunk, limits.page)
        if self.slack is None or limits.max_itl is None:
            return max_tokens
        left = self.slack - (self.constant or 0.0)
        if left < 0:
            return 0
        if not self.slope or self.slack > limits.max_itl:
            return limits.least  # because the time of a larger one is unknown
        return int(min(left / self.slope, max_tokens))


class Pace:
    """Time and size of the next chunk: never two without a decode step between while requests run,
    over time at most the share of the time, and within the bound on inter-token latency.

    Contract: scheduler thread; all ranks call the same methods in the same steps, and differ only
    by ``others_chunk``.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._share = limits, limits.share
        self.costs = Costs()
        #: Seconds of chunks that decode steps have not made up for.
        self.debt = 0.0
        self._steps = MAX_STEPS_BETWEEN
        self._follows_chunk = False

    def largest_chunk(self, delays: bool) -> int:
        """Return the size of the largest chunk within the bound; ``delays``: it delays a token."""
        return (self.costs if delays else Costs()).largest_chunk(self._limits)

    def fits(self, left: int, delays: bool) -> bool:
        """Return True if the next chunk keeps the bound; ``left``: tokens of the first turn."""
        return self.largest_chunk(delays) >= min(self._limits.least, left)

    def next_chunk(self, left: int, running: int, delays: bool) -> int:
        """Return the size of the chunk that may run now beside ``running`` requests, or 0."""
        fits = self.fits(left, delays)
        if not self.may_run(running, fits):
            return 0
        tokens = self.largest_chunk(delays) if fits else self._limits.least
        return max(tokens, self._limits.page)

    def may_run(self, running: int, fits: bool = True) -> bool:
        """Return True if a chunk may run now beside ``running`` requests; ``fits``: it is within
        the bound on inter-token latency."""
        if not running:
            return True
        if self._follows_chunk:
            return False
        if fits and self.debt <= 0:
            return True
        return self._steps >= (MAX_STEPS_BETWEEN if fits else STEPS_BEFORE_BREACH)

    def chunk(self, tokens: int, running: int) -> None:
        """Note the launch of a chunk. Without running requests the chunk is no debt."""
        if running:
            self.debt += self.costs.chunk(tokens) or 0.0
        self._steps = 0
        self._follows_chunk = True

    def others_chunk(self) -> None:
        """Note that another data-parallel rank launched a chunk: none follows here in the next
        step. The other chunk does not count as this rank's, because chunks of several ranks could
        then starve the turn of this one."""
        self._follows_chunk = True

    def step(self) -> None:
        """Note the launch of a decode step."""
        self._steps += 1
        self._follows_chunk = False
        made_up = (self.costs.step or 0.0) * self._share
        left = self.debt * (1 - self._share) - made_up
        self.debt = left / (1 - self._share) if left > 0 else 0.0

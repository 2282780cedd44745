"""What running requests may still need, as a sum that each step brings up to date: pure arithmetic.

All requests of a decode batch grow by one token a step, so a step needs no look at any of them: of
those that have filled their last page, each opens a new one, and how many these are was counted
when they came.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from sglang.srt.disaggregation.delta.pages import page_ceil


class Track(NamedTuple):
    """A value that grows by one a step: ``start`` + steps, up to ``limit``."""

    start: int
    limit: int


class CeilSum:
    """The sum of values in whole pages, each of which grows as its ``Track`` says."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._steps = 0
        #: Tokens of whole pages.
        self.total = 0
        #: Of the values that still grow, how many have a start with this remainder.
        self._growing = [0] * page
        #: Those that will have reached their limit after so many steps, likewise.
        self._ending: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def add(self, track: Track) -> None:
        """Count a value from now on."""
        self._count(track, 1)

    def remove(self, track: Track) -> None:
        """Count it no longer."""
        self._count(track, -1)

    def _count(self, track: Track, by: int) -> None:
        start, limit = track
        self.total += by * page_ceil(min(start + self._steps, limit), self._page)
        if start + self._steps < limit:
            self._growing[start % self._page] += by
            self._ending[limit - start][start % self._page] += by

    def step(self) -> None:
        """Every value grows."""
        self.total += self._page * self._growing[-self._steps % self._page]
        self._steps += 1
        for remainder, count in self._ending.pop(self._steps, Counter()).items():
            self._growing[remainder] -= count


class GrowthSum:
    """The sum of ``admission.growth`` over running requests, for one ``cap`` and ``page``."""

    def __init__(self, cap: int, page: int) -> None:
        self._cap = cap
        self.steps = 0
        self._now, self._then = CeilSum(page), CeilSum(page)

    @property
    def total(self) -> int:
        """New pages, in tokens, that all of them can need within their next ``cap`` tokens."""
        return self._then.total - self._now.total

    def add(self, allocated: int, final: int) -> Track:
        """Count a request that has ``allocated`` tokens now and ends with ``final``."""
        track = Track(allocated - self.steps, max(final, allocated))
        self._now.add(track)
        self._then.add(self._ahead(track))
        return track

    def remove(self, track: Track) -> None:
        """The request with this track ended."""
        self._now.remove(track)
        self._then.remove(self._ahead(track))

    def step(self) -> None:
        """Every request has one token more."""
        self.steps += 1
        self._now.step()
        self._then.step()

    def _ahead(self, track: Track) -> Track:
        return Track(track.start + self._cap, track.limit)

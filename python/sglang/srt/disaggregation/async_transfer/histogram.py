"""Durations and sizes of an interval, in buckets: one addition a value, percentiles when asked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: Upper bounds in seconds, 10 microseconds to 50 seconds.
SECONDS = tuple(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5))
#: Upper bounds in bytes, 4 KiB to 4 GiB.
BYTES = tuple(2.0**power for power in range(12, 33, 2))
#: Upper bounds in descriptors.
DESCRIPTORS = tuple(4.0**power for power in range(10))


class Histogram:
    """Values since the last ``clear``."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper ends of the buckets, rising; larger values have one of their own."""
        self._bounds = bounds
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self._counts = [0] * (len(self._bounds) + 1)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """One more value, of zero or more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)

    def percentile(self, fraction: float) -> float:
        """An upper bound of the value that ``fraction`` of all are not above; 0 without values."""
        wanted, seen = fraction * self.count, 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            seen += count
            if seen >= wanted and seen:
                return min(bound, self.largest)
        return self.largest

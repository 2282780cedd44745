"""What came of one arm: each request in a few numbers, and the times of all of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.harness.client import Result
from benchmark.harness.report import percentile

#: Where a request found the largest part of what it did not compute.
DEVICE, HOST, STORE, MISS = CLASSES = ("device", "host", "store", "miss")
_SOURCES = {"device": DEVICE, "host": HOST, "storage": STORE}


@dataclass(frozen=True)
class Outcome:
    """One request. Times in seconds; ``itl_s`` is its mean gap between two tokens."""

    ttft_s: float
    latency_s: float
    itl_s: float | None
    found: str
    """One of ``CLASSES``."""
    answer: str
    """A digest of its tokens; empty where it failed."""

    @classmethod
    def of(cls, result: Result) -> Outcome:
        """Of what a client saw."""
        answer = "" if result.error else hashlib.sha256(repr(result.answer).encode()).hexdigest()
        return cls(result.ttft_s, result.latency_s, result.itl_s, found_in(result), answer[:12])


def found_in(result: Result) -> str:
    """Where most of a request's cached tokens came from; a tie counts for the slower place.

    A request that has anything from the store waited for the store, so that it counts there.
    """
    tokens = result.cached_by_source
    by = {place: tokens[source] for source, place in _SOURCES.items() if tokens.get(source)}
    if STORE in by:
        return STORE
    return max(by, key=lambda place: (by[place], place == HOST)) if by else MISS


@dataclass(frozen=True)
class Times:
    """Of a quantity, in its unit; NaN of nothing."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Times:
        """Of those that there are."""
        given = [value for value in values if value is not None]
        mean = sum(given) / len(given) if given else math.nan
        return cls(len(given), mean, *(percentile(given, p) for p in (50, 90, 99)))


@dataclass(frozen=True)
class ArmTimes:
    """All requests of all rounds of one arm that were answered."""

    ttft_s: Times
    latency_s: Times
    itl_s: Times
    ttft_by_class: dict[str, Times]
    latency_by_class: dict[str, Times]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> ArmTimes:
        """Over ``outcomes``, failed ones left out."""
        good = [each for each in outcomes if each.answer]
        classes = {name: [each for each in good if each.found == name] for name in CLASSES}
        return cls(
            Times.of(each.ttft_s for each in good),
            Times.of(each.latency_s for each in good),
            Times.of(each.itl_s for each in good),
            {name: Times.of(one.ttft_s for one in some) for name, some in classes.items()},
            {name: Times.of(one.latency_s for one in some) for name, some in classes.items()},
        )

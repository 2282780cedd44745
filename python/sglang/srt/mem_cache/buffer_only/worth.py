"""Load or recompute: does a request get on sooner with a hit of the store, or without it.
Arithmetic alone.

The speeds of the store and of the model are measured while the server runs; its ranks decide from
the slowest rank's. A hit is fetched while its request waits in line, so that only what the fetch
takes longer than that counts against it.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.mem_cache.buffer_only.settings import Settings, pages_of


class Choice(enum.Enum):
    """What to do with a hit, and why; the values are for metrics."""

    #: It is there sooner than it could be computed.
    FASTER = "faster"
    #: It is fetched, because the store or the model was not measured yet, or because
    #: ``SGLANG_HICACHE_BUFFER_ALWAYS_FETCH`` is set.
    UNMEASURED = "unmeasured"
    #: It would be slower, and is fetched to see whether the store is still so slow.
    TRIAL = "trial"
    #: It would be slower: the request computes.
    SLOWER = "slower"
    #: All that is missing would be slower, if it were a hit: the store is not asked.
    UNASKED = "unasked"


#: One in so many hits that would be slower is a trial.
TRIAL_EVERY = 16
#: Threads that fetch. With the other threads they stay below the most calls of the store that may
#: be under way (``SGLANG_HICACHE_STORE_MAX_CALLS``).
SIDE_BY_SIDE = 4


@dataclass(frozen=True)
class Speeds:
    """What is known of the store and of the model; 0: not measured."""

    #: Mean time of a call that fetches, and its mean size.
    call_us: int = 0
    call_bytes: int = 0
    #: Mean time of a query.
    query_us: int = 0
    #: Of prefill.
    tokens_per_s: int = 0


@dataclass(frozen=True)
class Hit:
    """A hit, and what comes before it.

    Attributes:
        tokens: that need not be computed.
        calls: of the store, for all of it.
        call_bytes: of one of them.
        calls_ahead: that the store is busy with.
        tokens_ahead: that those in line before it will compute.
        queries: one behind the other until it is known, where it is not yet.
    """

    tokens: int
    calls: int
    call_bytes: int
    calls_ahead: int = 0
    tokens_ahead: int = 0
    queries: int = 0


def fetch_seconds(speeds: Speeds, hit: Hit, side_by_side: int) -> float:
    """Until the hit is in the staging buffer, with so many calls side by side.

    A call that is smaller than the mean is not taken for faster: it may be latency that counts.
    Where no call was measured, only the queries count.
    """
    asked = hit.queries * speeds.query_us / 1e6
    if not speeds.call_bytes:
        return asked
    rounds = math.ceil((hit.calls + hit.calls_ahead) / side_by_side)
    return asked + rounds * speeds.call_us / 1e6 * max(1.0, hit.call_bytes / speeds.call_bytes)


def full_rounds(calls: int, calls_ahead: int, side_by_side: int) -> set[int]:
    """Of at most ``calls`` calls: so many that they end with the first round, and with the last
    whole one. Fewer take as long and bring less; of the rounds between, what each adds is the same,
    so that either the first or the last of them is the best."""
    first = side_by_side - calls_ahead % side_by_side
    whole = max(0, calls - first) // side_by_side
    return {min(calls, first), min(calls, first + whole * side_by_side)}


def choose(speeds: Speeds, hit: Hit, side_by_side: int, slower_in_a_row: int) -> Choice:
    """Whether to fetch ``hit``; ``slower_in_a_row``: hits that were not, since the last trial."""
    if not speeds.tokens_per_s:
        return Choice.UNMEASURED
    waits = hit.tokens_ahead / speeds.tokens_per_s
    late = max(0.0, fetch_seconds(speeds, hit, side_by_side) - waits)
    if late <= hit.tokens / speeds.tokens_per_s:
        return Choice.FASTER if speeds.call_bytes else Choice.UNMEASURED
    return Choice.TRIAL if slower_in_a_row + 1 >= TRIAL_EVERY else Choice.SLOWER


@dataclass
class Mean:
    """A mean in which what is old fades: each entry counts for ``1 - keep``."""

    keep: float = 0.9
    weight: float = 0.0
    #: 0 before the first.
    value: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """One more, that counts ``weight`` times."""
        self.weight = self.weight * self.keep**weight + weight
        self.value += (value - self.value) * weight / self.weight


class Chooser:
    """Decides whether the hits of one rank are fetched, and counts.

    Args:
        page_bytes: of a page in the staging buffer.
        piece_pages: most pages of a call.
        choices: where they are counted.
    """

    def __init__(
        self, settings: Settings, page_bytes: int, piece_pages: int, choices: Counter[Choice]
    ) -> None:
        self._settings, self._page_bytes = settings, page_bytes
        self._piece_pages, self._choices = piece_pages, choices
        #: Agreed by the ranks.
        self.speeds = Speeds()
        #: Hits since the last trial that would have been slower.
        self.slower_in_a_row = 0

    def rule(
        self, calls_ahead: int, tokens_ahead: int, queries: int = 0
    ) -> Callable[[int], Choice]:
        """Whether a hit of so many pages is there before it could be computed, by what is known
        now; can be asked on any thread. Arguments: see ``Hit``."""
        speeds, slower_in_a_row = self.speeds, self.slower_in_a_row

        def rule(pages: int) -> Choice:
            if self._settings.always_fetch:
                return Choice.UNMEASURED
            hit = Hit(
                tokens=pages * self._settings.page_size,
                calls=pages_of(pages, self._piece_pages),
                call_bytes=min(pages, self._piece_pages) * self._page_bytes,
                calls_ahead=calls_ahead,
                tokens_ahead=tokens_ahead,
                queries=queries,
            )
            return choose(speeds, hit, SIDE_BY_SIDE, slower_in_a_row)

        return rule

    def best_parts(self, calls_ahead: int, pages: int) -> set[int]:
        """If none of these hits is there before it could be computed, none of at most ``pages``
        pages is."""
        calls = full_rounds(pages_of(pages, self._piece_pages), calls_ahead, SIDE_BY_SIDE)
        return {pages} | {min(pages, count * self._piece_pages) for count in calls}

    def chosen(self, choice: Choice) -> Choice:
        """``choice`` was made for a hit."""
        slower = choice in (Choice.SLOWER, Choice.UNASKED)
        self.slower_in_a_row = self.slower_in_a_row + 1 if slower else 0
        self._choices[choice] += 1
        return choice

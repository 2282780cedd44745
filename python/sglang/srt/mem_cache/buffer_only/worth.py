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
from dataclasses import dataclass

from sglang.srt.patchset.stage_size import pages_of


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
#: be under way (``StoreClientSettings.max_calls``).
SIDE_BY_SIDE = 4


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
    #: Mean time of a scheduler step while requests could be admitted.
    step_us: int = 0


@dataclass(eq=False)
class Chooser:
    """Decides whether the hits of one rank are fetched, and counts."""

    page_size: int
    #: Of a page in the staging buffer.
    page_bytes: int
    #: Most pages of a call.
    piece_pages: int
    #: Fetch every hit, however slow the store is.
    always: bool
    #: Where the choices are counted.
    choices: Counter[Choice]
    #: Agreed by the ranks.
    speeds: Speeds = Speeds()
    #: Hits since the last trial that would have been slower.
    slower_in_a_row: int = 0

    def fetch_seconds(self, pages: int, calls_ahead: int, queries: int = 0) -> float:
        """Until ``pages`` pages are in the staging buffer, behind so many calls that the store is
        busy with, and behind so many queries, one after the other, where it is not known yet
        whether the store has the pages.

        A call that is smaller than the mean is not taken for faster: it may be latency that counts.
        Where no call was measured, only the queries count. The scheduler notices each answer in a
        step, so that queries and calls take up to one more step each.
        """
        speeds = self.speeds
        asked = (
            queries * speeds.query_us + (bool(queries) + bool(speeds.call_bytes)) * speeds.step_us
        ) / 1e6
        if not speeds.call_bytes:
            return asked
        rounds = math.ceil((pages_of(pages, self.piece_pages) + calls_ahead) / SIDE_BY_SIDE)
        size = min(pages, self.piece_pages) * self.page_bytes / speeds.call_bytes
        return asked + rounds * speeds.call_us / 1e6 * max(1.0, size)

    def is_faster(self, pages: int, calls_ahead: int, tokens_ahead: int, queries: int = 0) -> bool:
        """Whether a hit is there before it could be computed; ``tokens_ahead``: that those in line
        before its request will compute meanwhile."""
        tokens_per_s = self.speeds.tokens_per_s
        if self.always or not tokens_per_s:
            return True
        in_time = pages * self.page_size + tokens_ahead
        return self.fetch_seconds(pages, calls_ahead, queries) <= in_time / tokens_per_s

    def asks(self, pages: int, calls_ahead: int, tokens_ahead: int, queries: int) -> bool:
        """Whether the store is asked for ``pages`` pages: it may have any number of them. A round
        that is not full takes as long as a full one, and brings less. Each full round adds the
        same, so that the first or the last of them is the best, or all pages are."""
        whole = SIDE_BY_SIDE * self.piece_pages
        rounds = range(whole - calls_ahead % SIDE_BY_SIDE * self.piece_pages, pages, whole)
        return any(
            self.is_faster(part, calls_ahead, tokens_ahead, queries)
            for part in (pages, *rounds[:1], *rounds[-1:])
        )

    @property
    def trial_is_due(self) -> bool:
        """Whether the next hit that would be slower is fetched all the same."""
        return self.slower_in_a_row + 1 >= TRIAL_EVERY

    def choose(self, pages: int, calls_ahead: int, tokens_ahead: int, trial: bool) -> Choice:
        """What to do with a hit; ``trial``: the store was asked to see how fast it is by now."""
        if self.is_faster(pages, calls_ahead, tokens_ahead):
            known = self.speeds.call_bytes and self.speeds.tokens_per_s and not self.always
            return self.chosen(Choice.FASTER if known else Choice.UNMEASURED)
        return self.chosen(Choice.TRIAL if trial or self.trial_is_due else Choice.SLOWER)

    def chosen(self, choice: Choice) -> Choice:
        """``choice`` was made for a hit."""
        slower = choice in (Choice.SLOWER, Choice.UNASKED)
        self.slower_in_a_row = self.slower_in_a_row + 1 if slower else 0
        self.choices[choice] += 1
        return choice

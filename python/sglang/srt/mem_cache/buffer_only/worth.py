"""Load or recompute: decides whether fetching a hit of the store is faster than computing it.
Arithmetic only.

Contract: scheduler thread. The speeds are measured while the server runs and reduced to the slowest
rank's (``TransferVote``), so that all ranks decide the same. A hit is fetched while its request
waits in the queue, so that only the excess of the fetch time over that wait counts against it.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass

from sglang.srt.patchset.staging_size import pages_of


class FetchChoice(enum.Enum):
    """Decision for a hit; the values are metric labels."""

    #: Fetched: faster than computing it.
    FASTER = "faster"
    #: Fetched: the store or the model is not measured yet, or
    #: ``SGLANG_HICACHE_BUFFER_ALWAYS_FETCH`` is set.
    UNMEASURED = "unmeasured"
    #: Fetched although slower, to measure the store again.
    TRIAL = "trial"
    #: Computed: a fetch would be slower.
    SLOWER = "slower"
    #: Computed without a query: a fetch would be slower even if the store had all missing pages.
    UNASKED = "unasked"


#: Every sixteenth hit that would be slower is a trial.
TRIAL_EVERY = 16
#: Threads that fetch. All store threads together stay below ``StoreClientSettings.max_calls``.
FETCH_THREADS = 4


@dataclass
class Mean:
    """Exponentially weighted mean: a new entry of weight 1 counts for ``1 - keep``."""

    keep: float = 0.9
    weight: float = 0.0
    #: 0 before the first entry.
    value: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add an entry that counts ``weight`` times."""
        self.weight = self.weight * self.keep**weight + weight
        self.value += (value - self.value) * weight / self.weight


@dataclass(frozen=True)
class Speeds:
    """Measured speeds of the store and of the model; 0: not measured."""

    #: Mean time of a fetch call, and its mean size.
    call_us: int = 0
    call_bytes: int = 0
    #: Mean time of a query.
    query_us: int = 0
    #: Prefill speed.
    tokens_per_s: int = 0
    #: Mean time of a scheduler step while requests could be admitted.
    step_us: int = 0


@dataclass(eq=False)
class Chooser:
    """Decides for each hit of one rank whether it is fetched, and counts the decisions."""

    page_size: int
    #: Bytes of a page in the staging buffer.
    page_bytes: int
    #: Maximum pages of a call.
    piece_pages: int
    #: True if every hit is fetched, however slow the store is.
    always: bool
    #: Number of hits by choice; incremented here.
    choices: Counter[FetchChoice]
    #: Agreed by the ranks.
    speeds: Speeds = Speeds()
    #: Consecutive hits that would have been slower, since the last trial.
    slower_in_a_row: int = 0

    def fetch_seconds(self, pages: int, calls_ahead: int, queries: int = 0) -> float:
        """Return the estimated seconds until ``pages`` pages are staged, after ``calls_ahead``
        calls in flight and, if the store was not queried yet, after ``queries`` serial queries.

        A call below the mean size counts as a mean call, because latency may dominate. Until a call
        was measured, only queries count. The scheduler sees an answer in its next step, so that
        queries and calls each take up to one step more.
        """
        speeds = self.speeds
        query_seconds = (
            queries * speeds.query_us + (bool(queries) + bool(speeds.call_bytes)) * speeds.step_us
        ) / 1e6
        if not speeds.call_bytes:
            return query_seconds
        rounds = math.ceil((pages_of(pages, self.piece_pages) + calls_ahead) / FETCH_THREADS)
        size = min(pages, self.piece_pages) * self.page_bytes / speeds.call_bytes
        return query_seconds + rounds * speeds.call_us / 1e6 * max(1.0, size)

    def is_faster(self, pages: int, calls_ahead: int, tokens_ahead: int, queries: int = 0) -> bool:
        """Return True if a hit is fetched before it would be computed, after the ``tokens_ahead``
        tokens of earlier requests."""
        tokens_per_s = self.speeds.tokens_per_s
        if self.always or not tokens_per_s:
            return True
        computed_tokens = pages * self.page_size + tokens_ahead
        return self.fetch_seconds(pages, calls_ahead, queries) <= computed_tokens / tokens_per_s

    def asks(self, pages: int, calls_ahead: int, tokens_ahead: int, queries: int) -> bool:
        """Return True if a hit of some number of ``pages`` would be faster, so that the store is
        queried. A partial round of calls takes as long as a full one, and each full round adds the
        same time and pages. So it is enough to check the first round, the last and all pages."""
        round_pages = FETCH_THREADS * self.piece_pages
        rounds = range(
            round_pages - calls_ahead % FETCH_THREADS * self.piece_pages, pages, round_pages
        )
        return any(
            self.is_faster(hit_pages, calls_ahead, tokens_ahead, queries)
            for hit_pages in (pages, *rounds[:1], *rounds[-1:])
        )

    @property
    def trial_is_due(self) -> bool:
        """True if the next slower hit is fetched to measure the store."""
        return self.slower_in_a_row + 1 >= TRIAL_EVERY

    def choose(self, pages: int, calls_ahead: int, tokens_ahead: int, trial: bool) -> FetchChoice:
        """Decide for a hit and count the decision; ``trial``: its query was a trial."""
        if self.is_faster(pages, calls_ahead, tokens_ahead):
            is_measured = self.speeds.call_bytes and self.speeds.tokens_per_s and not self.always
            return self.chosen(FetchChoice.FASTER if is_measured else FetchChoice.UNMEASURED)
        return self.chosen(FetchChoice.TRIAL if trial or self.trial_is_due else FetchChoice.SLOWER)

    def chosen(self, choice: FetchChoice) -> FetchChoice:
        """Count ``choice`` and return it."""
        is_slower = choice in (FetchChoice.SLOWER, FetchChoice.UNASKED)
        self.slower_in_a_row = self.slower_in_a_row + 1 if is_slower else 0
        self.choices[choice] += 1
        return choice

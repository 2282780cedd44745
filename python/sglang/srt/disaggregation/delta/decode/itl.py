"""How long running requests wait for their next token, and how much of that a chunk may take. Pure.

A chunk of a local turn runs between two decode steps, so the tokens of the second step come later
by its time. With a bound on inter-token latency, a chunk may take what the bound leaves beside the
rest of such a gap: the decode step, the loop around it, and what chunks take above the expected
time. The rest is tracked at its 99th percentile. All times in seconds.
"""

from __future__ import annotations

import math
from collections import deque

#: The part of the gaps with a chunk that may pass the bound; of all gaps, where no chunk fits.
TOLERATED = 0.01
#: The part of the bound by which the slack shrinks for one gap whose rest was longer. It grows by
#: ``TOLERATED`` of that for each other gap, so the rest comes to stand at the percentile.
GAIN = 0.1


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

"""How long a step of the scheduler gives the store to answer for requests that have just arrived.

A request is not admitted before the store has said what it has of its prompt. An answer takes a
millisecond or so, but the scheduler looks for it once in a step, and a step takes as long as its
batch: so long even a miss would wait. A server of one rank looks twice in a step, the second time
when the answers are there, or after a small part of a batch's time. A store that has not answered
by then is given no time in the next step that asks it, then in the next two, four and so on, so
that a slow one costs next to nothing.
"""

from __future__ import annotations

from sglang.srt.mem_cache.buffer_only.worth import Mean

#: Of a batch's mean time.
PART = 0.1
#: Seconds, whatever a batch takes.
MOST_S = 0.01
#: Most steps in a row without a second look.
LONGEST_PAUSE = 64


class Patience:
    """Of one server."""

    def __init__(self) -> None:
        #: Most seconds in a step.
        self.most_s = MOST_S
        self._batch_seconds = Mean()
        self._pause = self._left = 0

    def batch(self, seconds: float) -> None:
        """A batch took so long."""
        self._batch_seconds.add(seconds)

    def seconds(self) -> float:
        """For the answers to what was asked in this step; 0: none, as before the first batch."""
        if self._left:
            self._left -= 1
            return 0.0
        return min(self.most_s, PART * self._batch_seconds.value)

    def ended(self, answered: bool) -> None:
        """All answers came in that time, or not."""
        self._pause = 0 if answered else min(LONGEST_PAUSE, 2 * self._pause or 1)
        self._left = self._pause

"""Where the time of a request with a prefetch went: for histograms, and for the event log."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.event_log import Prefetched, now
from sglang.srt.disaggregation.delta.observability import log_prefetched
from sglang.srt.mem_cache.buffer_only.prefetch import State

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch

#: Histogram of a state, beside WAITING, which counts as part of the query.
STATES = {
    State.QUERYING: "prefetch_query_seconds",
    State.FOUND: "prefetch_wait_seconds",
    State.FETCHING: "prefetch_fetch_seconds",
    State.STAGED: "prefetch_staged_seconds",
}
LOAD = "load_back_seconds"
#: Durations that are kept until the metrics take them; where there are none, the oldest go.
MOST_KEPT = 4096


class Times:
    """Durations of one rank, in the order in which they ended; seconds."""

    def __init__(self) -> None:
        self._kept: deque[tuple[str, float]] = deque(maxlen=MOST_KEPT)

    def take(self) -> list[tuple[str, float]]:
        """Name of the histogram and seconds of all that ended since the last call."""
        found = list(self._kept)
        self._kept.clear()
        return found

    def loaded(self, milliseconds: int) -> None:
        """A copy to the device has ended."""
        self._kept.append((LOAD, milliseconds / 1000))

    def ended(self, prefetch: Prefetch) -> None:
        """A request runs, or is gone. A state that it was never in does not count."""
        spent = dict(prefetch.spent_ms)
        spent[State.QUERYING] = spent.get(State.QUERYING, 0) + spent.pop(State.WAITING, 0)
        for state, name in STATES.items():
            if state in spent:
                self._kept.append((name, spent[state] / 1000))
        log_prefetched(
            lambda: Prefetched(
                at=now(),
                rid=prefetch.rid,
                prompt_tokens=len(prefetch.key),
                hit_pages=len(prefetch.keys),
                loaded_tokens=prefetch.loaded,
                choice=None if prefetch.choice is None else prefetch.choice.value,
                query_ms=spent[State.QUERYING],
                wait_ms=spent.get(State.FOUND, 0),
                fetch_ms=spent.get(State.FETCHING, 0),
                staged_ms=spent.get(State.STAGED, 0),
            )
        )

"""The prefetches of the requests that wait, in the order of the queue, and what is due when.

A step with nothing new costs nothing here, however many wait: the order is looked at when the
scheduler's queue is another one, and a prefetch when something is due for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch


class WaitingLine:
    """Iterates over a snapshot, first in line first."""

    def __init__(self) -> None:
        #: First in line first.
        self._by_rid: dict[str, Prefetch] = {}
        #: The scheduler's queue when the order was last looked at; None after an arrival.
        self._queue: list[str] | None = None
        self._last_place = 0
        #: When, a serial number, and for whom; also for those that have left.
        self._due: list[tuple[int, int, Prefetch]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Prefetch]:
        return iter(list(self._by_rid.values()))

    def get(self, rid: str) -> Prefetch | None:
        """The prefetch of a request, if it has one."""
        return self._by_rid.get(rid)

    def add(self, prefetch: Prefetch) -> None:
        """At the end of the line; nobody else in it has its request id."""
        self._by_rid[prefetch.rid] = prefetch
        self._queue = None
        self._place(prefetch)

    def remove(self, prefetch: Prefetch) -> None:
        """It is in line no more."""
        del self._by_rid[prefetch.rid]

    def arrange(self, queue: list[str]) -> tuple[list[Prefetch], bool]:
        """``queue`` has the request ids that wait, first in line first.

        Returns:
            Whose request is not among them, to be removed; and whether the others have changed
            places.
        """
        if queue == self._queue:
            return [], False
        self._queue = queue
        here = {rid: self._by_rid[rid] for rid in queue if rid in self._by_rid}
        gone = [one for rid, one in self._by_rid.items() if rid not in here]
        before = [rid for rid in self._by_rid if rid in here] if gone else list(self._by_rid)
        moved = before != list(here)
        if moved:
            self._by_rid = here | {one.rid: one for one in gone}
            for prefetch in self._by_rid.values():
                self._place(prefetch)
        return gone, moved

    def wake(self, prefetch: Prefetch, at_ms: int) -> None:
        """Have it among those that are due at ``at_ms``."""
        self._serial += 1
        heapq.heappush(self._due, (at_ms, self._serial, prefetch))

    def due(self, now_ms: int) -> list[Prefetch]:
        """Those in line for which something is due by ``now_ms``, once for each time."""
        found = []
        while self._due and self._due[0][0] <= now_ms:
            prefetch = heapq.heappop(self._due)[2]
            if self._by_rid.get(prefetch.rid) is prefetch:
                found.append(prefetch)
        return found

    def _place(self, prefetch: Prefetch) -> None:
        self._last_place += 1
        prefetch.place = self._last_place


class TokensAhead:
    """Tokens that those in line before a request will compute; asked first in line first."""

    def __init__(self, line: Iterable[Prefetch], page_size: int) -> None:
        self._line, self._page_size = iter(line), page_size
        self._reached: Prefetch | None = None
        self._tokens = 0

    def of(self, prefetch: Prefetch) -> int:
        """Before ``prefetch``, which is in the line, and behind the one that was asked last."""
        while (one := self._reached) is not prefetch:
            if one is not None:
                self._tokens += len(one.key) - one.end * self._page_size
            self._reached = next(self._line, prefetch)
        return self._tokens

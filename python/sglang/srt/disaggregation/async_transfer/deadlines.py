"""What is due when: add, discard and ask for what has passed, each in logarithmic time."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Discarded entries that are let lie before the heap is built anew.
_SLACK = 64


class Deadlines(Generic[Item]):
    """Items (hashable by identity) with a time each. Holds no item that was discarded or passed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._items: dict[int, Item] = {}
        self._tickets: dict[Item, int] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, at: float, item: Item) -> None:
        """``item`` is due at ``at``; an item is added once."""
        ticket = next(self._count)
        self._items[ticket] = item
        self._tickets[item] = ticket
        heapq.heappush(self._heap, (at, ticket))

    def discard(self, item: Item) -> None:
        """``item`` is not waited for any more; harmless when it is not in here."""
        ticket = self._tickets.pop(item, None)
        if ticket is None:
            return
        del self._items[ticket]
        if len(self._heap) > 2 * len(self._items) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[Item]:
        """Take out everything that was due at ``now`` or before, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            item = self._items.pop(heapq.heappop(self._heap)[1], None)
            if item is not None:
                del self._tickets[item]
                due.append(item)
        return due

    def next_at(self) -> float | None:
        """When the next item is due; None where there is none."""
        while self._heap and self._heap[0][1] not in self._items:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

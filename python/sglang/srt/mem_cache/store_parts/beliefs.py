"""Page keys that are known to be stored, so that they need not be written again.

A belief may be wrong: stores evict on their own. A wrong belief costs a rewrite that does not
happen, until a hit query returns less than was believed. To be equal on all ranks, every method
that changes anything is called at the same point of a step on every rank, with what the ranks have
agreed on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class StoredPages:
    """The ``capacity`` page keys that were last seen stored. One thread."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: keys, at least one; the ones not seen for longest are forgotten."""
        if capacity < 1:
            raise ValueError(f"room for {capacity} keys")
        self._capacity = capacity
        self._keys: OrderedDict[str, None] = OrderedDict()
        #: Keys that a hit query showed to be gone, since the start.
        self.healed = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        """Whether the key is believed to be stored. Changes nothing, so that it may be asked at
        any point and on any rank."""
        return key in self._keys

    def believed(self, keys: Iterable[str]) -> int:
        """How many leading ``keys`` are believed to be stored. Changes nothing."""
        count = 0
        for key in keys:
            if key not in self._keys:
                break
            count += 1
        return count

    def stored(self, keys: Sequence[str]) -> None:
        """All ranks have these durably: their write was acknowledged, or a query found them."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def queried(self, keys: Sequence[str], found: int | None) -> None:
        """A query, or a read, for a chain of pages showed that the first ``found`` are there.

        ``None``: it failed or was cut by its deadline on some rank, which is evidence of nothing.
        Behind the first page that is missing nothing is known; those pages are forgotten too,
        because nobody can reach them until it is written again, and then a write of a page that is
        still there costs only a look.
        """
        if found is None:
            return
        self.stored(keys[:found])
        for key in keys[found:]:
            if key in self._keys:
                del self._keys[key]
                self.healed += 1

    def clear(self) -> None:
        """Nothing is known any more: the store was cleared, or exchanged for another."""
        self._keys.clear()

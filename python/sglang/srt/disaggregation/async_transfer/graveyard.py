"""Parcels that did not settle by their deadline: still waited for, apart, and only so many."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from sglang.srt.disaggregation.async_transfer.parcels import Parcel

logger = logging.getLogger(__name__)

#: Handles that are given up. A transfer that is under way can neither be taken back nor released,
#: and some bindings release in the destructor: these live as long as the process.
KEPT: list[Any] = []


def keep(parcel: Parcel) -> None:
    """Give the handles of a parcel up: never looked at, never released."""
    KEPT.extend(parcel.handles)


class Graveyard:
    """Of one worker; at most ``limit`` parcels."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parcels: OrderedDict[Parcel, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, parcel: Parcel) -> Parcel | None:
        """Take one in. If that is one too many: the oldest, which is not waited for any more."""
        self._parcels[parcel] = None
        logger.error(
            "room %d: a transfer to %s did not settle by its deadline; it is still waited for "
            "(%d such transfers), and decode's pages stay held until then, or for its "
            "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
            parcel.room.number,
            parcel.peer,
            len(self._parcels),
        )
        if len(self._parcels) <= self._limit:
            return None
        oldest, _ = self._parcels.popitem(last=False)
        logger.critical(
            "room %d: a transfer to %s is given up: it never settled, and %d later ones did not "
            "either. Its handle is never released, and nobody is told that it is quiet",
            oldest.room.number,
            oldest.peer,
            self._limit,
        )
        return oldest

    def discard(self, parcel: Parcel) -> None:
        """It has settled after all; harmless for a parcel that is not in here."""
        self._parcels.pop(parcel, None)

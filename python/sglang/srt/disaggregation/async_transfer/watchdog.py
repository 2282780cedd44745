"""Workers that do not go on: noticed, logged once, and their rooms failed instead of waiting."""

from __future__ import annotations

import logging

from sglang.srt.disaggregation.async_transfer.pool import TransferPool
from sglang.srt.disaggregation.async_transfer.tickets import Tickets
from sglang.srt.disaggregation.delta.failures import Reason
from sglang.srt.disaggregation.delta.stats import STATS

logger = logging.getLogger(__name__)


class Watchdog:
    """Of one transfer pool, asked every second or so by a thread that is none of its workers."""

    def __init__(self, pool: TransferPool, tickets: Tickets) -> None:
        self._pool = pool
        self._tickets = tickets
        #: Workers in trouble, by index.
        self._known: dict[int, str] = {}
        #: Those that seemed to be at the last look.
        self._suspected: set[int] = set()

    def tick(self) -> None:
        """Fail the rooms of workers in trouble, those that came since the last time included.

        A worker that wakes up finds its rooms stopped at the gate: it posts nothing more for them,
        and their peers are never told that they are complete. So the scheduler need not wait for
        what it may have under way.

        Once is no proof: where the process did not run, or this thread was kept waiting together
        with the workers, they are late by the clock and go on at once.
        """
        found = self._pool.troubles()
        troubles = {index: text for index, text in found.items() if index in self._suspected}
        self._suspected = set(found)
        for index, text in troubles.items():
            if index not in self._known:
                STATS.add("kv_transfer_stuck_workers", 1)
                logger.critical(
                    "KV transfer worker %s; its rooms fail until it goes on. If it does not, "
                    "restart this prefill server (py-spy dump shows where it is)",
                    text,
                )
        for index in self._known.keys() - troubles.keys():
            logger.error("KV transfer worker %d goes on", index)
        self._known = troubles
        if not troubles:
            return
        for room in self._tickets.rooms():
            why = troubles.get(self._pool.worker_of(room))
            if why is not None:
                text = f"room {room}: transfer worker {why}"
                self._tickets.abandon(room, Reason.INTERNAL, text)

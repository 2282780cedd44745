"""Freeing what a request owns whose transfer ended early, once prefill can write to it no more.

When a request in transfer is aborted or fails, prefill may still be writing to its pages. A remote
write cannot be taken back by its target: given to another request, or kept in the tree, the pages
would be overwritten, and everybody who shares them would read that. So pages, row, metadata slot
and lock stay with the request until its room is *drained*: each prefill rank that writes for it has
delivered everything, said that it stopped, or is gone. After a bound
(``SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT``) they are freed all the same, and the log says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol  # Any: SGLang's ``DecodeRequest``, or None

from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """What the prefill ranks that write for one room have said so far; kept by the backend."""

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""

    def is_drained(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""


class DeferredFree:
    """One room that decode gave up, and from ``keep`` on what its request owns.

    Without ``progress`` this rank's room is drained from the start; another rank's may not be, and
    all ranks free together. Several threads read ``progress`` and ``address``, under the lock of
    ``PrefillServers``; the rest belongs to the scheduler's.
    """

    def __init__(
        self,
        room: int = -1,
        address: str = "",
        progress: Progress | None = None,
        writers: int = 0,
        collect: Callable[[int], None] = lambda room: None,
        forget: Callable[[DeferredFree], None] = lambda deferred: None,
    ) -> None:
        """``collect`` reads what has arrived, for a room; ``forget``: it is followed no longer."""
        self._collect = collect
        self._forget = forget
        self.room = room
        #: The prefill server, host:port of its bootstrap server.
        self.address = address
        #: What arrived for the room, for the backend to keep up to date.
        self.progress = progress
        #: Prefill ranks that write for the room.
        self.writers = writers
        #: The prefill processes that could write are certain not to exist any more.
        self.writers_are_gone = False
        #: The queue entry whose pages, row, lock and metadata slot are kept.
        self.entry: Any = None
        self._since = 0.0

    def keep(self, entry: DecodeRequest) -> None:
        """``entry``, whose client has been answered, keeps what it owns from now on."""
        self.entry, self._since = entry, time.monotonic()

    def is_drained(self) -> bool:
        """Whether prefill can write to the pages no more; also reads what has arrived."""
        if self.progress is None:
            return True
        self._collect(self.room)
        return self.writers_are_gone or self.progress.is_drained(self.writers)

    def poll(self) -> int:
        """This rank's vote, polled beside the transfers: ``KVPoll.Success`` once the pages may be
        freed, because the room is drained or was waited for too long."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        may_free = self.is_drained() or self._is_overdue()
        return int(KVPoll.Success if may_free else KVPoll.Transferring)

    def free(self, free_entry: Callable[[DecodeRequest], None]) -> None:
        """Give what is kept to ``free_entry``, once, and follow the room no longer."""
        self._forget(self)
        entry, self.entry = self.entry, None
        if entry is not None:
            free_entry(entry)

    def _is_overdue(self) -> bool:
        waited = time.monotonic() - self._since
        if waited < environment.QUARANTINE_TIMEOUT.read():
            return False
        req = self.entry.req
        logger.error(
            "request %s (bootstrap_room=%s) ended early, and prefill %s:%s has not confirmed "
            "within %.0f s that it stopped writing. Its deferred release ends: %d tokens of KV "
            "are freed now, and a late write would corrupt other requests. Check whether that "
            "prefill server hangs or is unreachable, and restart it",
            req.rid,
            req.bootstrap_room,
            req.bootstrap_host,
            req.bootstrap_port,
            waited,
            req.kv_allocated_len - req.cache_protected_len,
        )
        return True

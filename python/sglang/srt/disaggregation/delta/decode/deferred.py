"""Rooms that decode gave up: their memory is kept while prefill may still write to it.

Contract: ``DeferredFree`` belongs to the scheduler's thread; ``transfer`` polls it on all ranks
together. The reader, handshake and heartbeat threads also set fields of ``Progress``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any  # Any: SGLang's queue entries

from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Progress of the prefill ranks (writers) of a room on a decode rank, from the handshake until
    prefill can no longer write to the room's pages."""

    #: Writers that delivered everything: KV, metadata, and state if the model has any.
    done_writers: set[int] = field(default_factory=set)
    #: Writers that stopped writing, complete or not.
    stopped_writers: set[int] = field(default_factory=set)
    #: Slot for metadata that arrive in a message; None if no such slot was announced.
    metadata_slot: int | None = None
    #: Address of the prefill server (host:port of its bootstrap server).
    address: str = ""
    #: True once the prefill processes are certain not to exist any more.
    writers_are_gone: bool = False
    #: True once the room was given up; its client was answered, or the request starts over without
    #: prefill. A new request with its number is refused.
    is_deferred: bool = False

    def is_drained(self, writers: int) -> bool:
        """Return True if each of ``writers`` ranks has delivered everything, stopped or is gone."""
        return self.writers_are_gone or len(self.done_writers | self.stopped_writers) >= writers


@dataclass(eq=False)
class DeferredFree:
    """A room that decode gave up, and the pages, row, lock and metadata slot of its request.

    They are freed when prefill can no longer write to them on any rank, or after a timeout.
    """

    #: None if this rank's room is drained already; another rank's may not be.
    progress: Progress | None = None
    #: Number of prefill ranks that write for the room.
    writers: int = 0
    #: Processes the messages of its writers that have arrived.
    collect: Callable[[], object] = lambda: None
    #: Removes the room's entry from the table of progress.
    forget: Callable[[], object] = lambda: None
    #: Queue entry of the request, and when its release was deferred (monotonic seconds).
    entry: Any = None
    since: float = 0.0
    #: Label ``outcome`` of ``decode_deferred_kv_release``, as of the last ``poll``.
    outcome: str = "drained"

    def keep(self, entry: DecodeRequest) -> None:
        """Keep everything that ``entry`` owns. Its client has been answered."""
        self.entry, self.since = entry, time.monotonic()

    def is_drained(self) -> bool:
        """Collect messages; return True if prefill can no longer write to the pages."""
        if self.progress is None:
            return True
        self.collect()
        return self.progress.is_drained(self.writers)

    def poll(self) -> int:
        """Return this rank's vote, polled with the transfers: ``KVPoll.Success`` once the room is
        drained or the timeout has passed."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        is_drained = self.is_drained()
        self.outcome = "drained" if is_drained else "timeout"
        if is_drained:
            return int(KVPoll.Success)
        waited = time.monotonic() - self.since
        if waited < environment.QUARANTINE_TIMEOUT.read():
            return int(KVPoll.Transferring)
        req = self.entry.req
        logger.error(
            "request %s (bootstrap_room=%s) ended early, and prefill %s:%s has not confirmed "
            "within %.0f s that it stopped writing. The deferred release ends: %d tokens of KV "
            "are freed now, and a late write would corrupt other requests. Check whether that "
            "prefill server hangs or is unreachable, and restart it",
            req.rid,
            req.bootstrap_room,
            req.bootstrap_host,
            req.bootstrap_port,
            waited,
            req.kv_allocated_len - req.cache_protected_len,
        )
        return int(KVPoll.Success)

    def free(self, free_entry: Callable[[DecodeRequest], None]) -> None:
        """Pass the entry to ``free_entry``, once, and stop following the room."""
        if self.progress is not None:
            self.progress = None
            self.forget()
        entry, self.entry = self.entry, None
        if entry is not None:
            free_entry(entry)

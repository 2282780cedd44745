"""The vote of a step on a server with buffer-only HiCache: which transfers have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.srt.disaggregation.delta.rank_agreement import Vote

#: A store job that has not ended on some rank. Less than any number of pages, so that MIN keeps it.
PENDING = -1
#: Backups in one vote. The length of the vector is the same whatever the queues hold.
BACKUP_SLOTS = 16
#: Queries in one vote.
QUERY_SLOTS = 48
#: Fetches in one vote; more than can run, because pages of an ended one may still be used by an
#: overdue call of the store.
FETCH_SLOTS = 32


@dataclass(frozen=True)
class TransferVote(Vote):
    """One rank's transfers, or the agreed ones. Reduced in every step, so that no rank waits for a
    collective that another one left out."""

    #: Milliseconds since the cache was built; the slowest rank's clock counts for all.
    clock_ms: int
    #: Leading device-to-stage and stage-to-device copies that have ended.
    backup_copies: int
    load_back_copies: int
    #: Durable pages of each backup in order, or ``PENDING``; then the pages found by each query and
    #: brought by each fetch.
    backups: Sequence[int] = field(default=(), metadata={"slots": BACKUP_SLOTS})
    queries: Sequence[int] = field(default=(), metadata={"slots": QUERY_SLOTS})
    fetches: Sequence[int] = field(default=(), metadata={"slots": FETCH_SLOTS})
    #: 1 if the store is queried, 0 while it does not answer.
    store_up: int = 1
    #: Leading tokens of the looked-up path that the store has, or ``PENDING``.
    touched: int = 0
    #: The slowest rank's ``worth.Speeds``: times of a call and of a query are negated.
    minus_call_us: int = 0
    minus_query_us: int = 0
    call_bytes: int = 0
    tokens_per_s: int = 0

    diverged = (
        "--hicache-host-memory-mode buffer_only: the ranks of this server have started different "
        "transfers between device and store, and their caches differ now. Restart it, and please "
        "report this with the logs of all ranks."
    )

"""How many queues and threads a transfer pool has, and how much each may have under way."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang.srt.patchset import environment


def check() -> None:
    """Read what both backends and both sides wait by, where a server starts.

    Raises:
        ValueError: one is set to something that is no duration; the message names it.
    """
    for variable in (
        environment.QUARANTINE_TIMEOUT,
        environment.TRANSFER_TIMEOUT,
        environment.CLAIM_TIMEOUT,
        environment.PEER_TIMEOUT,
        environment.HANDSHAKE_TIMEOUT,
    ):
        variable.read()


def default_threads(cpus: int) -> int:
    """SGLang's number of transfer threads on a machine of ``cpus`` logical CPUs."""
    return min(max(4, int(0.5 * cpus) // 8), 12)


@dataclass(frozen=True)
class Settings:
    """Of one transfer pool."""

    #: FIFO queues.
    queues: int = 4
    #: Threads over all queues; each queue has ``threads // queues`` of them.
    threads: int = 4
    #: Transfers (one chunk to one peer) that a worker may have under way, over all its peers. A
    #: peer that has none may always have one, so that stopped peers cannot take all places.
    window: int = 32
    #: Transfers to one peer that a worker may have under way.
    quota: int = 8
    #: Transfers of a worker that did not settle by their deadline and are still polled.
    overdue: int = 1024
    #: Seconds for which a transfer that the transport broke off counts as under way.
    doubt_s: float = 60.0
    #: Seconds without a finished step after which a worker with something to do is stuck.
    stuck_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("queues", "threads", "window", "quota", "overdue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.threads < self.queues:
            raise ValueError(
                f"{environment.THREADS.name} ({self.threads}) must be at least "
                f"{environment.QUEUES.name} ({self.queues}): every queue needs a thread"
            )

    @property
    def threads_per_queue(self) -> int:
        """Threads that serve one queue."""
        return self.threads // self.queues

    @property
    def workers(self) -> int:
        """Threads that are really started: each queue has the same number."""
        return self.queues * self.threads_per_queue


def from_environment(cpus: int | None = None) -> Settings:
    """The settings of this process. ``cpus``: logical CPUs; None asks the system.

    Raises:
        ValueError: a variable is set to something that cannot be; the message names it.
    """
    count = cpus if cpus is not None else os.cpu_count() or 1
    return Settings(
        queues=environment.QUEUES.read(),
        threads=environment.THREADS.read(default_threads(count)),
        doubt_s=environment.QUARANTINE_TIMEOUT.read(),
        stuck_s=environment.WORKER_TIMEOUT.read(),
    )

"""How many queues and threads, and how much each may have under way; wrong values are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang.srt.disaggregation.delta import deadlines
from sglang.srt.disaggregation.delta.env import env_int, env_seconds

QUEUES = "SGLANG_DISAGGREGATION_QUEUE_SIZE"
THREADS = "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE"
STUCK = "SGLANG_DISAGGREGATION_WORKER_TIMEOUT"
#: More threads than this in a scheduler process are a typing error.
_MOST_THREADS = 256


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
    #: Transfers of a worker that did not settle by their deadline and are still looked at.
    graveyard: int = 1024
    #: Seconds for which a transfer that the transport broke off counts as under way.
    doubt_s: float = 60.0
    #: Seconds without a finished step after which a worker with something to do is stuck.
    stuck_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("queues", "threads", "window", "quota", "graveyard"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.threads < self.queues:
            raise ValueError(
                f"{THREADS} ({self.threads}) must be at least {QUEUES} ({self.queues}): every "
                f"queue needs a thread"
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
    queues = env_int(QUEUES, 4, minimum=1)
    threads = env_int(THREADS, default_threads(count), minimum=1)
    for name, value in ((QUEUES, queues), (THREADS, threads)):
        if value > _MOST_THREADS:
            raise ValueError(f"{name} must be at most {_MOST_THREADS}, not {value}")
    return Settings(
        queues=queues,
        threads=threads,
        doubt_s=deadlines.quarantine_seconds(),
        stuck_s=env_seconds(STUCK, 30.0),
    )


def worker_of(room: int, settings: Settings) -> int:
    """The worker of ``room``: the same for all its chunks, which is what keeps them in order.

    Room numbers are scattered first. Data parallel attention gives a scheduler only rooms with one
    remainder, and ``room % queues`` would put all of them into one queue.
    """
    # Times the 64-bit golden ratio (Knuth, "The Art of Computer Programming", volume 3, 6.4); the
    # upper bits of the product depend on every bit of the room.
    scattered = room * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return scattered * settings.workers >> 64


def log_seconds() -> float:
    """Seconds between the log lines about transfers; 0 for none.

    Raises:
        ValueError: the variable is set to something that is no duration; the message names it.
    """
    seconds: float = env_seconds("SGLANG_DISAGGREGATION_TRANSFER_LOG_INTERVAL", 60.0)
    return seconds

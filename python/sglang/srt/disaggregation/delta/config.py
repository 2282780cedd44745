"""Environment variables of the delta layer: read where they are used, refused when wrong.

How long each side waits for the other. Read where a server starts, refused there when wrong.

How many queues and threads, and how much each may have under way; wrong values are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)


def _read(name: str, kind: str, parse: Callable[[str], Number]) -> Number | None:
    """The variable parsed, or None where it is not set; ``kind`` says what it must be."""
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{name} must be {kind}, not {text!r}") from None


def env_int(name: str, default: int, *, minimum: int = 0) -> int:
    """``name`` as an integer of at least ``minimum``.

    Raises:
        ValueError: the variable is set to something else; the message names it.
    """
    value = _read(name, "an integer", int)
    if value is None:
        return default
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    return value


def env_seconds(name: str, default: float) -> float:
    """``name`` as a duration in seconds, zero or more.

    Raises:
        ValueError: the variable is set to something else; the message names it.
    """
    value = _read(name, "a number of seconds", float)
    if value is None:
        return default
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be zero or more seconds, not {value}")
    return value


def quarantine_seconds() -> float:
    """How long decode holds the pages of a room that ended early without a sign from prefill.

    Prefill reads the same variable: a rank that was suspended for half of it posts nothing more
    for the rooms that it knew before, because decode may have given their pages to others.
    """
    return env_seconds("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", 60.0)


def transfer_seconds() -> float:
    """How long a chunk may take on prefill, from its queue to its end."""
    return env_seconds("SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT", 120.0)


def claim_seconds() -> float:
    """How long an announcement waits on prefill for its request, which a router sends at the same
    time. If it never came there, decode would hold the pages for its whole transfer deadline."""
    return env_seconds("SGLANG_DISAGGREGATION_CLAIM_TIMEOUT", 30.0)


def peer_seconds() -> float:
    """After how long without a sign prefill forgets a decode rank that used to give some."""
    return env_seconds("SGLANG_DISAGGREGATION_PEER_TIMEOUT", 120.0)


def handshake_seconds() -> float:
    """How long one HTTP request of decode to a prefill's bootstrap server may take."""
    return env_seconds("SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT", 5.0)


def check() -> None:
    """Read them all.

    Raises:
        ValueError: one is set to something that is no duration; the message names it.
    """
    quarantine_seconds()
    transfer_seconds()
    claim_seconds()
    peer_seconds()
    handshake_seconds()


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
        doubt_s=quarantine_seconds(),
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

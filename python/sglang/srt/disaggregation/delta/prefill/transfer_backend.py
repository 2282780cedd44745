"""What transfer workers are given and attached to: settings, chunks, how their bytes move, and how
their threads are scheduled.

A third backend implements ``Backend`` and puts its own data into ``Chunk.payload``. Payload and
handles are ``Any``: they are the backend's own.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol  # Any: payload and handles are the backend's own

import msgspec

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.patchset import environment

#: Most transfer threads of a prefill rank, because SGLang allows any number.
_MAX_QUEUES = 256


@dataclass(frozen=True)
class Settings:
    """Settings of one transfer pool."""

    #: Transfer threads, each with a FIFO queue of its own.
    queues: int = 4
    #: Transfers (one chunk to one peer) that a worker may have under way, over all its peers. A
    #: peer that has none may always have one, so that stopped peers cannot take all places.
    window: int = 32
    #: Transfers to one peer that a worker may have under way.
    quota: int = 8
    #: Seconds for which a transfer that the transport broke off counts as under way.
    doubt_s: float = 60.0
    #: Seconds without a finished step after which a worker with something to do is stuck. A change
    #: of NIXL's peers may take 5 s.
    stuck_s: float = 30.0

    @classmethod
    def read(cls) -> Settings:
        """Return the settings that the environment sets.

        Raises:
            ValueError: a variable is set to something that cannot be; the message names it.
        """
        return cls(
            queues=min(environment.QUEUES.read(), _MAX_QUEUES),
            doubt_s=environment.QUARANTINE_TIMEOUT.read(),
        )


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """Never changed once it was submitted: the scheduler's thread and a worker's both hold it."""

    room: int
    #: Names of the peers that it goes to. None of them is normal (a rank that sends nothing), and
    #: so is a peer to which no KV goes (a full prefix hit).
    peers: tuple[str, ...]
    #: The backend's own: page indices, destinations, metadata slot. Must not change either.
    payload: Any
    #: No other chunk of the room follows.
    is_last: bool
    #: When it must be settled, in the clock of ``enqueued_at``; the time in the queue counts.
    deadline: float
    #: ``time.monotonic()`` when it was submitted, in seconds.
    enqueued_at: float


class State(enum.Enum):
    """What the transport says of a handle."""

    IN_PROGRESS = "in progress"
    DONE = "done"
    #: Not begun, or not to its end, and nothing of it is under way.
    DROPPED = "dropped"
    #: Not delivered. What was sent of it may still land: it counts as under way for a while.
    ERROR = "error"


class TransferError(Exception):
    """A backend's refusal with a reason of its own; any other exception means ``TRANSPORT``."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Backend(Protocol):
    """How bytes move. Called on worker threads only, and for one room only ever on one thread."""

    def post(self, chunk: Chunk, peer: str) -> Iterable[Any]:
        """Start moving what ``peer`` gets of ``chunk``, and give the handles to wait for.

        A backend that posts several transfers should be a generator which yields every handle as
        soon as it exists: what was yielded is waited for and released even if a later post raises.
        A list does for one that posts all or nothing. No handles is normal. Any exception fails
        the room: a ``TransferError`` with its reason, others with ``TRANSPORT``.
        """

    def state(self, handle: Any) -> State:
        """How far it is; ``DONE`` only where every byte is in the peer's memory. An exception
        counts as ``State.ERROR``, but a ``TransferError`` with another reason than ``TRANSPORT`` as
        ``State.DROPPED``."""

    def release(self, handle: Any) -> None:
        """Called exactly once for each handle, when all handles of its post are over."""

    def complete(self, chunk: Chunk) -> None:
        """Notify all peers of a room's last chunk that everything of the room is with them. Called
        once for a room, when all its handles are ``DONE`` and its room said yes; returns without
        waiting for anybody. An exception fails the room, as one of ``post`` does."""


# ---- threads that take no core from a running one when they wake up: Linux' SCHED_BATCH ----


def use_batch_scheduling(thread: int = 0) -> None:
    """From now on this thread (or ``thread``, by Linux' number), and those that it starts, take no
    core from a running thread when they wake up; they wait for a free one, or for their turn.

    Without that, waking a worker may cost the scheduler its core in the middle of ``send``.
    (Linux' SCHED_BATCH; elsewhere, or where it is forbidden, nothing happens.)
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Give SCHED_BATCH to native threads that a library starts meanwhile.

    Threads of Python's are left alone: they take the interpreter's lock, and its holder must not
    wait for a core.
    """
    before = _threads()
    yield
    for thread in _threads() - before - {each.native_id for each in threading.enumerate()}:
        use_batch_scheduling(thread)


def _threads() -> set[int]:
    """The threads of this process, as Linux numbers them; none elsewhere."""
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()

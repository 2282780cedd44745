"""The port between transfer workers and a backend: settings, chunks, ``Backend``; and how transfer
threads are scheduled.

A third backend implements ``Backend`` and puts its own data into ``Chunk.payload``.

Contract: for one room all calls of a ``Backend`` come from one worker thread; other rooms are on
other threads at the same time. No lock of ours is held during a call.
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
class TransferSettings:
    """Settings of one transfer pool."""

    #: Number of transfer threads, each with a FIFO queue of its own.
    queues: int = 4
    #: Most transfers (one chunk to one peer) of a worker under way. A peer that has none may
    #: always have one, because stopped peers could otherwise take all places.
    window: int = 32
    #: Most transfers of a worker under way to one peer.
    quota: int = 8
    #: Seconds for which a broken transfer counts as under way.
    doubt_s: float = 60.0
    #: Seconds without a finished step after which a worker with something to do is stuck. A change
    #: of NIXL's peers may take 5 s.
    stuck_s: float = 30.0

    @classmethod
    def read(cls) -> TransferSettings:
        """Return the settings that the environment sets.

        Raises:
            ValueError: a variable has an impossible value; the message names it.
        """
        return cls(
            queues=min(environment.QUEUES.read(), _MAX_QUEUES),
            doubt_s=environment.QUARANTINE_TIMEOUT.read(),
        )


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """A part of a room's pages. Immutable, because two threads hold it."""

    room: int
    #: Names of the destination peers. May be empty (a rank that sends nothing), and a peer may get
    #: no KV (a full prefix hit).
    peers: tuple[str, ...]
    #: The backend's own data: page indices, destinations, metadata slot. Immutable too.
    payload: Any
    #: True for the last chunk of the room.
    is_last: bool
    #: When it must have settled, in the clock of ``enqueued_at``; the time in the queue counts.
    deadline: float
    #: ``time.monotonic()`` at submission, in seconds.
    enqueued_at: float


class TransferState(enum.Enum):
    """The state of a handle, as the transport reports it."""

    IN_PROGRESS = "in progress"
    DONE = "done"
    #: Not delivered, and no byte of it is under way.
    DROPPED = "dropped"
    #: Not delivered, but bytes may still land, so it counts as under way for ``doubt_s``.
    ERROR = "error"


class TransferError(Exception):
    """A refusal by a backend, with its reason; any other exception counts as ``TRANSPORT``."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Backend(Protocol):
    """How bytes move."""

    def post(self, chunk: Chunk, peer: str) -> Iterable[Any]:
        """Start moving the part of ``chunk`` for ``peer``. Return the handles to wait for.

        Called by ``Worker._post`` on a worker thread, once for each chunk and peer. A backend that
        posts several transfers should yield each handle as soon as it exists: those yielded are
        waited for and released even if a later post raises. There may be no handles. Any exception
        fails the room: a ``TransferError`` with its reason, others with ``TRANSPORT``.
        """

    def state(self, handle: Any) -> TransferState:
        """Return the state; ``DONE`` only if every byte is in the peer's memory.

        Called by ``Worker._poll`` on a worker thread, at the intervals of ``next_poll``. An
        exception counts as ``ERROR``, but a ``TransferError`` with another reason than
        ``TRANSPORT`` as ``DROPPED``.
        """

    def release(self, handle: Any) -> None:
        """Free a handle. Called by ``Worker._settled`` on a worker thread, once for each handle,
        when all handles of its post are over; never for a transfer that an unexpected error
        abandoned."""

    def complete(self, chunk: Chunk) -> None:
        """Notify all peers of the last chunk that the room is complete, without waiting for them.

        Called by ``Worker._complete`` on a worker thread, once for a room, when all its handles are
        ``DONE`` and the room table agreed. An exception fails the room, as one of ``post`` does.
        """


# ---- Linux' SCHED_BATCH: threads that preempt no running one when they wake up ----


def use_batch_scheduling(thread: int = 0) -> None:
    """Give SCHED_BATCH to this thread (or to ``thread``, a Linux thread id) and those it starts, so
    that they wait for a free core or their turn when they wake up.

    Otherwise, waking a worker may cost the scheduler its core in the middle of ``send``. Does
    nothing on other systems, or if it is forbidden.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Give SCHED_BATCH to native threads that a library starts in the ``with`` block.

    Python threads are left alone, because they take the interpreter's lock, and its holder must
    not wait for a core.
    """
    before = _threads()
    yield
    for thread in _threads() - before - {each.native_id for each in threading.enumerate()}:
        use_batch_scheduling(thread)


def _threads() -> set[int]:
    """Return the Linux ids of this process's threads; empty on other systems."""
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()

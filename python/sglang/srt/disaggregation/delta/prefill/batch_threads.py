"""Threads that take no core from a running one when they wake up: Linux' SCHED_BATCH."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


def use_batch_scheduling() -> None:
    """From now on this thread, and those that it starts, take no core from a running thread when
    they wake up; they wait for a free one, or for their turn.

    Without that, waking a worker may cost the scheduler its core for milliseconds, in the middle of
    ``send``. (Linux' SCHED_BATCH; elsewhere, or where it is forbidden, nothing happens.)
    """
    _set_batch(0)


@contextlib.contextmanager
def batch_scheduling(nice: int = 0) -> Iterator[None]:
    """For native threads that a library starts meanwhile: they get SCHED_BATCH, and are so much
    nicer than this one. Threads of Python's are left alone, whoever starts them: they take the
    interpreter's lock, and whoever holds it must not wait for a core.
    """
    before = _threads()
    yield
    for thread in _threads() - before - {each.native_id for each in threading.enumerate()}:
        _set_batch(thread)
        with contextlib.suppress(AttributeError, OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


def _set_batch(thread: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    """The threads of this process, as Linux numbers them; none elsewhere."""
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()

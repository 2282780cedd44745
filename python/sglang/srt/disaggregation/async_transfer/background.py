"""Threads that leave the processor to whoever is at work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def stand_back() -> None:
    """From now on this thread, and those that it starts, take no core from a running thread when
    they wake up; they wait for a free one, or for their turn.

    Without that, waking a worker may cost the scheduler its core for milliseconds, in the middle of
    ``send``. (Linux' SCHED_BATCH; elsewhere, or where it is forbidden, nothing happens.)
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def standing_back() -> Iterator[None]:
    """``stand_back`` for a while: for threads that a library starts meanwhile."""
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    except (AttributeError, OSError):
        yield
        return
    stand_back()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, param)

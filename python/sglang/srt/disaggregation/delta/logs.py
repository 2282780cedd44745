"""Log lines about peers, at most one every few seconds for each.

Counting and logging must not fail what is counted.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

#: A peer is complained about once in so many seconds.
INTERVAL_S = 5.0
#: Peers told apart at a time. A peer says itself who it is, and a stranger may say so many things.
_REMEMBERED_PEERS = 128
_MAX_CHARACTERS = 400


class Complaints:
    """One peer's noise neither fills the disk nor hides another one's trouble."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._last: dict[str, float] = {}

    def about(self, peer: str, problem: object) -> None:
        """A message of ``peer`` was dropped, and why."""
        self.say(peer, f"dropped a message from {peer}", problem)

    def say(self, peer: str, what: str, problem: object) -> None:
        """Log ``what`` went wrong, and why, unless something was just logged about ``peer``."""
        now = self._clock()
        if peer not in self._last and len(self._last) >= _REMEMBERED_PEERS:
            self._last = {it: at for it, at in self._last.items() if now - at < INTERVAL_S}
            if len(self._last) >= _REMEMBERED_PEERS:
                peer = "one of many peers"
        last = self._last.get(peer)
        if last is not None and now - last < INTERVAL_S:
            return
        self._last[peer] = now
        self._logger.error("%s: %s", what, str(problem)[:_MAX_CHARACTERS])


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@functools.cache
def _complain_once(what: str) -> None:
    logger.exception("%s failed; later such errors are not logged", what)


def harmless(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result | None]:
    """The function, returning None where it would raise."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            _complain_once(function.__qualname__)
            return None

    return guarded

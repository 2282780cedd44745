"""Log lines that a fault could repeat without end, and work that must not fail what it watches.

``RateLimitedLog`` writes a line at most once in a while for each peer (or other key).
``best_effort`` is for counting and logging: the error is logged once, and the caller goes on.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

#: Seconds between two lines with one key.
INTERVAL_S = 5.0
#: Keys told apart at a time. A peer says itself who it is, and a stranger may say so many things.
_REMEMBERED_KEYS = 128
#: Errors quote what a peer sent: a line is cut after so many characters.
_MAX_CHARACTERS = 500


class RateLimitedLog:
    """At most one line per key and interval, so that one peer's noise neither fills the disk nor
    hides another one's trouble. Used by one thread."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval_s``: seconds between two lines with one key; ``math.inf``: one line ever."""
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}

    def error(self, key: str, message: str, *args: object) -> None:
        """Log ``message % args`` unless a line with ``key`` was just logged."""
        self._log(logging.ERROR, key, message, args)

    def warning(self, key: str, message: str, *args: object) -> None:
        """As ``error``, at the level WARNING."""
        self._log(logging.WARNING, key, message, args)

    def _log(self, level: int, key: str, message: str, args: tuple[object, ...]) -> None:
        now = self._clock()
        if key not in self._last and len(self._last) >= _REMEMBERED_KEYS:
            self._last = {it: at for it, at in self._last.items() if now - at < self._interval_s}
            if len(self._last) >= _REMEMBERED_KEYS:
                key = "one of many"
        last = self._last.get(key)
        if last is not None and now - last < self._interval_s:
            return
        self._last[key] = now
        self._logger.log(level, "%s", (message % args)[:_MAX_CHARACTERS])


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@functools.cache
def _log_once(what: str) -> None:
    logger.exception("%s failed; the transfer goes on, and later such errors are not logged", what)


def best_effort(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result | None]:
    """The function, returning None where it would raise; its first error is logged."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            _log_once(function.__qualname__)
            return None

    return guarded

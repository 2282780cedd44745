"""Decode ranks that never ping: stock ones, and those of servers without the radix cache.

They say nothing when they end, and a restarted one registers under a new name. What a prefill rank
keeps of a decode rank (its pools' addresses, NIXL's connection, prepared lists) would stay for
ever. Whether it still exists shows at the port to which prefill's words would go.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any

logger = logging.getLogger(__name__)

#: Looks in a row without an answer, over which the whole patience is spread. Counted, not timed: a
#: prefill process that did not run for a while has not looked.
_LOOKS = 4
_CONNECT_S = 1.0


class Listeners:
    """One for each prefill rank; ``gone`` is called by the reader thread."""

    def __init__(
        self,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        answers: Callable[[str, int], bool] | None = None,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """``answers``: whether anybody listens at an address; ``start``: runs a look."""
        self._interval_s = patience_s / _LOOKS
        self._clock = clock
        self._answers = answers or _answers
        self._start = start or _in_background
        self._look_at = clock() + self._interval_s
        #: By name, of ranks that have answered: what they registered, and the looks in a row since
        #: then. (NIXL needs no way to that port, so that a rank behind a firewall never answers.)
        self._unanswered: dict[str, tuple[Any, int]] = {}
        self._results: dict[str, tuple[Any, bool]] | None = None
        self._is_looking = False

    def gone(self, registered: Mapping[str, Any], pinging: Container[str]) -> list[str]:
        """Ranks of ``registered`` (by name) at whose port somebody has answered, and nobody for the
        whole patience; those that ping are not looked at. Never waits."""
        results, self._results = self._results, None
        lost = []
        for name, (info, answered) in (results or {}).items():
            known, count = self._unanswered.get(name, (None, 0))
            if registered.get(name) is not info or name in pinging:
                self._unanswered.pop(name, None)
            elif answered:
                self._unanswered[name] = info, 0
            elif known is info:
                self._unanswered[name] = info, count + 1
                if count + 1 >= _LOOKS:
                    del self._unanswered[name]
                    lost.append(name)
        for name in self._unanswered.keys() - registered.keys():
            del self._unanswered[name]
        now = self._clock()
        if not self._is_looking and now >= self._look_at:
            self._look_at = now + self._interval_s
            wanted = {name: info for name, info in list(registered.items()) if name not in pinging}
            if wanted:
                self._is_looking = True
                self._start(lambda: self._look(wanted))
        return lost

    def _look(self, wanted: dict[str, Any]) -> None:
        results = {}
        try:
            for name, info in wanted.items():
                results[name] = info, self._answers(info.endpoint, int(info.dst_port))
        except Exception:
            logger.exception("looking for decode ranks that are gone")
        self._results, self._is_looking = results, False


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _in_background(look: Callable[[], None]) -> None:
    threading.Thread(target=look, name="pd-listeners", daemon=True).start()

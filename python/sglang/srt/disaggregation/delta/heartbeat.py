"""Whether prefill servers are alive, as one decode rank sees them.

Stock asks only the bootstrap server of a prefill server. That one still answers when a scheduler
process hangs, and when the whole server was restarted between two questions, at the same address
but with other ranks. So here it is also asked who it is, and every connected rank is pinged.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

logger = logging.getLogger(__name__)


class Sign(enum.Enum):
    """What one look at a prefill server showed."""

    ALIVE = enum.auto()
    #: No answer in time, or not from all its ranks: it hangs, or the network does.
    SILENT = enum.auto()
    #: Its machine answers that nobody listens there: the process is gone, and writes no more.
    GONE = enum.auto()


@dataclass(frozen=True)
class Look:
    """One look. ``incarnation`` names the process that answered; None if it does not say."""

    sign: Sign
    incarnation: str | None = None


class Heartbeat:
    """Calls ``lost(address, is_gone, why)`` when a prefill server is given up.

    ``is_gone``: it is certain that the processes that were known at that address write no more.
    After that the address starts anew. One thread calls ``beat``, every interval.
    """

    def __init__(
        self,
        look: Callable[[str], Look],
        lost: Callable[[str, bool, str], None],
        *,
        max_failures: int,
    ) -> None:
        self._look = look
        self._lost = lost
        self._max_failures = max_failures
        #: Looks in a row without a sign of life.
        self._misses: dict[str, int] = {}

    def beat(self, known: Mapping[str, str | None]) -> None:
        """Look at each address once, at the same time: one that hangs must not delay the others.

        ``known``: addresses with the incarnation that this server was connected to, if it told one.
        """
        self._misses = {address: self._misses.get(address, 0) for address in known}
        if not known:
            return
        with ThreadPoolExecutor(min(len(known), 16)) as executor:
            looks = {executor.submit(self._look, address): address for address in known}
            for done in as_completed(looks):
                address = looks[done]
                try:
                    look = done.result()
                except Exception as error:  # one strange server must not hide the others
                    logger.warning("could not look at prefill server %s: %r", address, error)
                    look = Look(Sign.SILENT)
                self._judge(address, known[address], look)

    def _judge(self, address: str, incarnation: str | None, look: Look) -> None:
        if None not in (incarnation, look.incarnation) and look.incarnation != incarnation:
            self._misses[address] = 0
            self._lost(address, True, "it was restarted")
            return
        if look.sign is Sign.ALIVE:
            self._misses[address] = 0
            return
        self._misses[address] += 1
        logger.warning(
            "prefill server %s: no sign of life (%s), %d of %d",
            address,
            look.sign.name.lower(),
            self._misses[address],
            self._max_failures,
        )
        if self._misses[address] >= self._max_failures:
            self._misses[address] = 0
            self._lost(
                address,
                look.sign is Sign.GONE,
                "nobody listens there any more"
                if look.sign is Sign.GONE
                else f"no sign of life in {self._max_failures} heartbeats",
            )

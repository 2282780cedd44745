"""Whether prefill servers are alive, as one decode rank sees them.

Stock asks only the bootstrap server of a prefill server. That one still answers when a scheduler
process hangs, and when the whole server was restarted between two questions, at the same address
but with other ranks. So here it is also asked who it is, and every connected rank is pinged.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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


@dataclass
class _Peer:
    misses: int = 0
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
        self._peers: dict[str, _Peer] = {}

    def beat(self, addresses: Iterable[str]) -> None:
        """Look at each address once, at the same time: one that hangs must not delay the others."""
        wanted = list(addresses)
        self._peers = {address: self._peers.get(address, _Peer()) for address in wanted}
        if not wanted:
            return
        with ThreadPoolExecutor(min(len(wanted), 16)) as executor:
            for address, look in zip(wanted, executor.map(self._look, wanted), strict=True):
                self._judge(address, look)

    def _judge(self, address: str, look: Look) -> None:
        peer = self._peers[address]
        if look.sign is Sign.ALIVE:
            known, peer.incarnation = peer.incarnation, look.incarnation
            peer.misses = 0
            if known is not None and look.incarnation != known:
                self._lost(address, True, "it was restarted")
            return
        peer.misses += 1
        logger.warning(
            "prefill server %s: no sign of life (%s), %d of %d",
            address,
            look.sign.name.lower(),
            peer.misses,
            self._max_failures,
        )
        if peer.misses >= self._max_failures:
            peer.misses = 0
            self._lost(
                address,
                look.sign is Sign.GONE,
                "nobody listens there any more"
                if look.sign is Sign.GONE
                else f"no sign of life in {self._max_failures} heartbeats",
            )

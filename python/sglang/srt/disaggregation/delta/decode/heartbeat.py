"""When a prefill server counts as lost: probes in a row, each of all servers at the same time; and
when it is certain that its processes are gone."""

from __future__ import annotations

import enum
import logging
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

logger = logging.getLogger(__name__)


class Liveness(enum.Enum):
    """What one probe of a prefill server showed."""

    ALIVE = enum.auto()
    #: No answer in time, or not from all its ranks: it hangs, or the network does.
    SILENT = enum.auto()
    #: Nobody listens there, nor at its ranks' ports: the processes are gone, and write no more.
    GONE = enum.auto()


@dataclass(frozen=True)
class Probe:
    """One probe. ``incarnation`` names the process that answered; None if it does not say."""

    liveness: Liveness
    incarnation: str | None = None


class Heartbeat:
    """Counts missed probes; calls ``lost(address, is_gone, why)`` when a server is given up.

    ``is_gone``: it is certain that the processes that were known at that address write no more.
    After that the address starts anew. One thread calls ``beat``, every interval.
    """

    def __init__(
        self,
        probe: Callable[[str], Probe],
        lost: Callable[[str, bool, str], None],
        *,
        max_failures: int,
    ) -> None:
        self._probe = probe
        self._lost = lost
        self._max_failures = max_failures
        #: Probes in a row that showed no sign of life.
        self._misses: dict[str, int] = {}

    def beat(self, known: Mapping[str, str | None]) -> None:
        """Probe each address once, at the same time: one that hangs must not delay the others.

        ``known``: addresses with the incarnation that this server was connected to, if it told one.
        """
        self._misses = {address: self._misses.get(address, 0) for address in known}
        if not known:
            return
        with ThreadPoolExecutor(min(len(known), 16)) as executor:
            probes = {executor.submit(self._probe, address): address for address in known}
            for done in as_completed(probes):
                address = probes[done]
                try:
                    probe = done.result()
                except Exception as error:  # one strange server must not hide the others
                    logger.warning("could not probe prefill server %s: %r", address, error)
                    probe = Probe(Liveness.SILENT)
                self._judge(address, known[address], probe)

    def _judge(self, address: str, incarnation: str | None, probe: Probe) -> None:
        if None not in (incarnation, probe.incarnation) and probe.incarnation != incarnation:
            self._misses[address] = 0
            self._lost(address, True, "it was restarted")
            return
        if probe.liveness is Liveness.ALIVE:
            self._misses[address] = 0
            return
        self._misses[address] += 1
        is_gone = probe.liveness is Liveness.GONE
        logger.warning(
            "prefill server %s: %s, probe %d of %d; after the last its rooms fail",
            address,
            "its port refuses connections"
            if is_gone
            else "no answer, or not from all of its ranks",
            self._misses[address],
            self._max_failures,
        )
        if self._misses[address] >= self._max_failures:
            self._misses[address] = 0
            silent = f"no answer to {self._max_failures} probes"
            self._lost(address, is_gone, "its port refuses connections" if is_gone else silent)


def is_refused(error: BaseException) -> bool:
    """Whether a connection was refused, somewhere down the chain of causes."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, ConnectionRefusedError):
            return True
        inner = getattr(seen, "reason", None)
        if not isinstance(inner, BaseException) and seen.args:
            inner = seen.args[0]
        seen = inner if isinstance(inner, BaseException) else (seen.__cause__ or seen.__context__)
    return False


def refuses(host: str, port: int, timeout_s: float) -> bool:
    """Whether the machine of ``host`` answers that no process listens at ``port``."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False

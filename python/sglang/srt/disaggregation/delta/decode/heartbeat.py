"""When a prefill server counts as lost: probes in a row, each of all servers at the same time; and
when it is certain that its processes are gone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import requests

logger = logging.getLogger(__name__)


class Probe(NamedTuple):
    """What one probe of a prefill server showed."""

    #: It answered in time, and so did all its ranks.
    is_alive: bool = False
    #: Nobody listens there, nor at its ranks' ports: the processes are gone, and write no more.
    is_gone: bool = False
    #: The process that answered; None if it does not say.
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
        self._probe, self._lost, self._max_failures = probe, lost, max_failures
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
                    probe = Probe()
                names = {known[address], probe.incarnation} - {None}
                misses = 0 if probe.is_alive or len(names) == 2 else self._misses[address] + 1
                self._misses[address] = misses % self._max_failures
                if len(names) == 2:
                    self._lost(address, True, "it was restarted")
                if not misses:
                    continue
                refuses = "its port refuses connections"
                logger.warning(
                    "prefill server %s: %s, probe %d of %d; after the last its rooms fail",
                    address,
                    refuses if probe.is_gone else "no answer, or not from all of its ranks",
                    misses,
                    self._max_failures,
                )
                if misses == self._max_failures:
                    why = refuses if probe.is_gone else f"no answer to {misses} probes"
                    self._lost(address, probe.is_gone, why)


def look(url: str, ranks: Iterable[tuple[str, int]], timeout_s: float) -> Probe | bytes:
    """What the bootstrap server of a prefill server with ``ranks`` answers at ``url``; a probe
    where it does not."""
    try:
        response = requests.get(url, timeout=timeout_s)
    except requests.ConnectionError as error:
        # No process listens at the connected ranks' ports either: a bootstrap server that is gone
        # may be another node's, and what refuses a service in front of one that is not.
        is_gone = is_refused(error) and all(refuses(*rank, timeout_s) for rank in ranks)
        return Probe(is_gone=is_gone)
    except requests.RequestException:
        return Probe()
    return bytes(response.content) if response.ok else Probe()


def is_refused(error: BaseException) -> bool:
    """Whether a connection was refused, somewhere down the chain of causes."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None or isinstance(seen, ConnectionRefusedError):
            break
        inner = getattr(seen, "reason", None)
        if not isinstance(inner, BaseException) and seen.args:
            inner = seen.args[0]
        seen = inner if isinstance(inner, BaseException) else (seen.__cause__ or seen.__context__)
    return isinstance(seen, ConnectionRefusedError)


def refuses(host: str, port: int, timeout_s: float) -> bool:
    """Whether the machine of ``host`` answers that no process listens at ``port``."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False

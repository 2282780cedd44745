"""When a prefill server counts as lost: probes in a row, each of all servers at the same time; and
when it is certain that its processes are gone."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import NamedTuple

import requests

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode.prefill_servers import PrefillServers
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.patchset import environment

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
    while seen is not None and not isinstance(seen, ConnectionRefusedError):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def refuses(host: str, port: int, timeout_s: float) -> bool:
    """Whether the machine of ``host`` answers that no process listens at ``port``."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class WatchedServers(PrefillServers):
    """The prefill servers of a decode rank, and whether they live.

    Stock probes only the bootstrap server of a prefill server. That one still answers when a
    scheduler process hangs, and when the whole server was restarted between two probes, at the same
    address but with other ranks. So here it is also asked who it is, and every connected rank is
    pinged.
    """

    def start_heartbeat(self, interval_s: float, max_failures: int) -> None:
        """Probe all prefill servers every ``interval_s``
        (``SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL``)."""
        timeout_s = min(environment.HANDSHAKE_TIMEOUT.read(), interval_s)
        probe = partial(self._probe, timeout_s=timeout_s)
        heartbeat = Heartbeat(probe, self._given_up, max_failures=max_failures)

        def beat() -> None:
            while True:
                time.sleep(interval_s)
                try:
                    heartbeat.beat(self._known())
                except Exception:  # the thread must outlive what it meets
                    logger.exception("a heartbeat failed; the next one runs as scheduled")

        threading.Thread(target=beat, name="pd-heartbeat", daemon=True).start()

    def _known(self) -> dict[str, str | None]:
        with self._lock:
            addresses = {*self._tables.topology}
            addresses |= {deferred.address for deferred in self._deferred.values()}
            for address in addresses:
                self._servers[address].probed_at = self._servers[address].epoch
            return {address: self.capabilities(address).incarnation for address in addresses}

    def _probe(self, address: str, timeout_s: float) -> Probe:
        """Query the identity of the bootstrap server, and ping the connected ranks."""
        takes_control = self.capabilities(address).takes_control
        with self._lock:
            listening = list(self._servers[address].ranks)
        route = wire.ROUTE if takes_control else "/health"
        answer = look(f"http://{address}{route}", listening, timeout_s)
        if isinstance(answer, Probe) or not takes_control:
            return answer if isinstance(answer, Probe) else Probe(is_alive=True)
        ours = self._transport.peer_name, self._rank.host, self._rank.port
        with self._lock:
            ranks = self._servers[address].ranks
            unanswered = max(ranks.values(), default=0)
            for rank in ranks:
                ranks[rank] += 1
                ping = wire.Ping(f"{rank[0]}:{rank[1]}", *ours)
                self._send(rank, ping, "that counts as no answer")
        return Probe(not unanswered, incarnation=wire.incarnation_in(answer))

    def _given_up(self, address: str, is_gone: bool, why: str) -> None:
        """What the last probes showed; they say nothing of a server connected to since then."""
        with self._lock:
            if self._servers[address].epoch == self._servers[address].probed_at:
                self.lost(address, is_gone, why)

    def lost(self, address: str, is_gone: bool, why: str) -> None:
        """A prefill server is given up: fail its rooms, and connect again when it is next needed.

        ``is_gone``: its processes do not exist any more, so that nothing more can be written.
        """
        self.disconnect(address)
        rooms = list(self._tables.rooms.get(address, ()))
        for room in rooms:
            self.fail(room, Reason.PEER_LOST, f"lost prefill server {address}: {why}")
        logger.error(
            "lost prefill server %s: %s. Its %d rooms fail, and the next request connects again; "
            "%s",
            address,
            why,
            len(rooms),
            "its processes are gone: pages in deferred release are freed"
            if is_gone
            else "pages stay in deferred release until it answers or is gone, or for "
            "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
        )
        with self._lock:
            server = self._servers[address]
            server.ranks = dict.fromkeys(server.ranks, 0)
            if is_gone:
                self._forget_writers(address)

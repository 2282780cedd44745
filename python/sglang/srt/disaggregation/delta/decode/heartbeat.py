"""When a prefill server counts as lost, and when it is certain that its processes are gone."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
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
        self._interval_s = interval_s

        def run() -> None:
            misses: dict[str, int] = {}
            while True:
                time.sleep(interval_s)
                try:
                    misses = self._beat(misses, timeout_s, max_failures)
                except Exception:  # the thread must outlive what it meets
                    logger.exception("a heartbeat failed; the next one runs as scheduled")

        threading.Thread(target=run, name="pd-heartbeat", daemon=True).start()

    def _beat(
        self, misses: Mapping[str, int], timeout_s: float, max_failures: int
    ) -> dict[str, int]:
        """Probe each server once, at the same time: one that hangs must not delay the others.

        ``misses``: probes in a row that showed no sign of life, by server; returns them as they are
        after this one. After ``max_failures`` the server is lost, and its count starts anew.
        """
        with self._lock:
            rooms = list(self._tables.progress().values())
            known = {
                address: (self.capabilities(address).incarnation, self._servers[address].epoch)
                for address in {
                    *self._tables.topology,
                    *(r.address for r in rooms if r.is_deferred),
                }
            }
        counts = dict.fromkeys(known, 0)
        with ThreadPoolExecutor(16) as executor:
            probes = {executor.submit(self._probe, each, timeout_s): each for each in known}
            for done in as_completed(probes):
                address = probes[done]
                incarnation, epoch = known[address]
                try:
                    probe = done.result()
                except Exception as error:  # one strange server must not hide the others
                    logger.warning("could not probe prefill server %s: %r", address, error)
                    probe = Probe()
                is_gone, why = len({incarnation, probe.incarnation} - {None}) == 2, ""
                if is_gone:
                    why = "it was restarted"
                elif not probe.is_alive:
                    is_gone, missed = probe.is_gone, misses.get(address, 0) + 1
                    counts[address] = missed % max_failures
                    refuses = "its port refuses connections"
                    logger.warning(
                        "prefill server %s: %s, probe %d of %d; after the last its rooms fail",
                        address,
                        refuses if is_gone else "no answer, or not from all of its ranks",
                        missed,
                        max_failures,
                    )
                    if missed == max_failures:
                        why = refuses if is_gone else f"no answer to {missed} probes"
                with self._lock:  # a probe says nothing of a server connected to since then
                    if why and self._servers[address].epoch == epoch:
                        self.lost(address, is_gone, why)
        return counts

    def _probe(self, address: str, timeout_s: float) -> Probe:
        """Query the identity of the bootstrap server, and ping the connected ranks."""
        takes_control = self.capabilities(address).takes_control
        url = f"http://{address}{wire.ROUTE if takes_control else '/health'}"
        with self._lock:
            listening = list(self._servers[address].ranks)
        try:
            response = requests.get(url, timeout=timeout_s)
        except requests.ConnectionError as error:
            # No process listens at the connected ranks' ports either: a bootstrap server that is
            # gone may be another node's, and what refuses a service in front of one that is not.
            is_gone = is_refused(error) and all(refuses(*rank, timeout_s) for rank in listening)
            return Probe(is_gone=is_gone)
        except requests.RequestException:
            return Probe()
        if not response.ok or not takes_control:
            return Probe(is_alive=bool(response.ok))
        ours = self._peer_name(), self._rank.host, self._rank.port
        with self._lock:
            ranks = self._servers[address].ranks
            unanswered = max(ranks.values(), default=0)
            for rank in ranks:
                ranks[rank] += 1
                ping = wire.Ping(f"{rank[0]}:{rank[1]}", *ours, self._interval_s)
                self._send(rank, ping, "that counts as no answer")
        return Probe(not unanswered, incarnation=wire.incarnation_in(response.content))

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

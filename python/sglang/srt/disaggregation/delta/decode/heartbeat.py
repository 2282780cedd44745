"""The heartbeat of a decode rank: finds prefill servers that are lost or certainly have ended.

Contract: a thread of its own, without agreement between ranks. It shares the servers with the other
threads of ``prefill_servers`` under ``_lock``, which it does not hold while it waits for an answer.
"""

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
    """The result of one probe of a prefill server."""

    #: True if the server and all its ranks answered in time.
    is_alive: bool = False
    #: True if no process listens at its port or its ranks' ports: they are gone and write no more.
    is_gone: bool = False
    #: Identity of the process that answered; None if the answer has none.
    incarnation: str | None = None


def is_refused(error: BaseException) -> bool:
    """Return True if the chain of causes has a refused connection."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def refuses(host: str, port: int, timeout_s: float) -> bool:
    """Return True if the machine of ``host`` answers that no process listens at ``port``."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class WatchedServers(PrefillServers):
    """The prefill servers of a decode rank, with a heartbeat.

    SGLang probes only the bootstrap server of a prefill server. This process still answers if a
    scheduler process hangs, or if the whole server was restarted between two probes with the same
    address and other ranks. Here a probe also queries its identity and pings every connected rank.
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
                except Exception:  # the thread must survive any error
                    logger.exception(
                        "heartbeat of prefill servers failed; the next one runs as scheduled"
                    )

        threading.Thread(target=run, name="pd-heartbeat", daemon=True).start()

    def _beat(
        self, misses: Mapping[str, int], timeout_s: float, max_failures: int
    ) -> dict[str, int]:
        """Probe each server once, in parallel, because one that hangs must not delay the others.

        ``misses``: server -> failed probes in a row. Return the counts after this probe. After
        ``max_failures`` the server is lost, and its count restarts at 0.
        """
        with self._lock:
            rooms = list(self._tables.progress().values())
            # Address -> identity and number of handshakes at the start of the probe.
            known = {
                address: (self.capabilities(address).incarnation, self._servers[address].epoch)
                for address in {
                    *self._tables.topology,
                    *(room.address for room in rooms if room.is_deferred),
                }
            }
        counts = dict.fromkeys(known, 0)
        with ThreadPoolExecutor(16) as executor:
            probes = {
                executor.submit(self._probe, address, timeout_s): address for address in known
            }
            for done in as_completed(probes):
                address = probes[done]
                incarnation, epoch = known[address]
                try:
                    probe = done.result()
                except Exception as error:  # an unexpected answer must not end the other probes
                    logger.warning(
                        "prefill server %s: probe failed, which counts as no answer: %r",
                        address,
                        error,
                    )
                    probe = Probe()
                is_gone, why = len({incarnation, probe.incarnation} - {None}) == 2, ""
                if is_gone:
                    why = "it was restarted"
                elif not probe.is_alive:
                    is_gone, missed = probe.is_gone, misses.get(address, 0) + 1
                    counts[address] = missed % max_failures
                    refusal = "its port refuses connections"
                    logger.warning(
                        "prefill server %s: %s, probe %d of %d; after the last its rooms fail",
                        address,
                        refusal if is_gone else "no answer, or not from all of its ranks",
                        missed,
                        max_failures,
                    )
                    if missed == max_failures:
                        why = refusal if is_gone else f"no answer to {missed} probes"
                with self._lock:  # ignore the result if the server was connected to since then
                    if why and self._servers[address].epoch == epoch:
                        self.lost(address, is_gone, why)
        return counts

    def _probe(self, address: str, timeout_s: float) -> Probe:
        """Query the identity of the bootstrap server and ping the connected ranks."""
        takes_control = self.capabilities(address).takes_control
        url = f"http://{address}{wire.ROUTE if takes_control else '/health'}"
        with self._lock:
            listening = list(self._servers[address].ranks)
        try:
            response = requests.get(url, timeout=timeout_s)
        except requests.ConnectionError as error:
            # Require that the ranks' ports refuse too: the bootstrap server may be on another node
            # than the ranks, or the refusal may come from a proxy in front of a server that runs.
            is_gone = is_refused(error) and all(refuses(*rank, timeout_s) for rank in listening)
            return Probe(is_gone=is_gone)
        except requests.RequestException:
            return Probe()
        if not response.ok or not takes_control:
            return Probe(is_alive=bool(response.ok))
        sender = self._peer_name(), self._rank.host, self._rank.port
        with self._lock:
            ranks = self._servers[address].ranks
            unanswered = max(ranks.values(), default=0)
            for rank in ranks:
                ranks[rank] += 1
                ping = wire.Ping(f"{rank[0]}:{rank[1]}", *sender, self._interval_s)
                self._send(rank, ping, "this counts as no answer")
        return Probe(not unanswered, incarnation=wire.incarnation_in(response.content))

    def lost(self, address: str, is_gone: bool, why: str) -> None:
        """Fail the rooms of a prefill server and drop its connections; the next request for it
        connects again. ``is_gone``: its processes do not exist any more and cannot write."""
        self.disconnect(address)
        rooms = list(self._tables.rooms.get(address, ()))
        for room in rooms:
            self.fail(room, Reason.PEER_LOST, f"lost prefill server {address}: {why}")
        logger.error(
            "lost prefill server %s: %s. %d rooms fail, and the next request connects again; %s",
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

"""A decode rank's view of prefill servers: who they are, whether they live, what they stopped.

Stock probes only the bootstrap server of a prefill server. That one still answers when a scheduler
process hangs, and when the whole server was restarted between two probes, at the same address but
with other ranks. So here it is also asked who it is, and every connected rank is pinged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol  # Any: values in SGLang's JSON of a rank

import requests

from sglang.srt.disaggregation.delta import capability, wire
from sglang.srt.disaggregation.delta.address_pool import AddressPool
from sglang.srt.disaggregation.delta.decode.deferred_free import DeferredFree, Progress
from sglang.srt.disaggregation.delta.decode.handshakes import Connections, Tables
from sglang.srt.disaggregation.delta.decode.heartbeat import (
    Heartbeat,
    Liveness,
    Probe,
    is_refused,
    refuses,
)
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.rank import RankView, Statuses
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def _rank(info: dict[str, Any]) -> tuple[str, int]:
    """Where a rank listens, of SGLang's JSON of it."""
    return info["rank_ip"], int(info["rank_port"])


class Transport(Protocol):
    """What a decode rank's backend knows of its peers and their writes."""

    @property
    def peer_name(self) -> str:
        """The name under which this decode rank registers with prefill ranks."""

    def progress(self, room: int) -> Progress:
        """What prefill's ranks have said about a room of this decode rank so far."""

    def take_progress(self, room: int) -> Progress:
        """The same, and forget it there: a deferred free takes it over."""

    def collect_arrivals(self, asker: int) -> None:
        """Read what has arrived, for room ``asker``; nothing where it is said without asking."""

    def drop_socket(self, host: str, port: int) -> None:
        """Throw away what is queued for a prefill rank that is gone."""


class PrefillServers:
    """One for each decode rank with the radix cache on. Used by the scheduler thread, the reader
    thread and the heartbeat thread."""

    def __init__(
        self,
        rank: RankView,
        statuses: Statuses,
        tables: Tables,
        transport: Transport,
        ask: Callable[[str], bool],
        args: ServerArgs,
    ) -> None:
        """``ask``: SGLang's own blocking question for a server's topology."""
        self._rank = rank
        self._statuses = statuses
        self._tables = tables
        self._transport = transport
        self._ask = ask
        self._args = args
        self._sockets = wire.PeerSockets()
        self._lock = threading.RLock()
        self.connections = Connections(tables, self._handshake, AddressPool("pd-handshake"))
        self._capabilities: dict[str, capability.Capabilities] = {}
        #: Counts handshakes with an address, to tell the server there from the one before it.
        self._epochs: dict[str, int] = defaultdict(int)
        #: The counts when the heartbeat last began to probe.
        self._probed_at: dict[str, int] = {}
        #: Servers at an address up to this epoch are certain to write no more.
        self._gone_epochs: dict[str, int] = defaultdict(int)
        #: Addresses of the ranks that this rank is connected to, and their unanswered pings.
        self._ranks: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
        #: By room; changed and read under the lock: the reader and the heartbeat use it too.
        self._deferred: dict[int, DeferredFree] = {}

    # ---- handshake ----

    def _handshake(self, address: str) -> bool:
        # Asked whenever the topology is: a server that came back may be another version.
        capabilities = capability.fetch_capabilities(address)
        if capabilities is None or not self._ask(address):
            return False
        algorithm = self._args.speculative_algorithm
        with self._lock:
            before = self._capabilities.get(address)
            is_same = before is not None and before.incarnation == capabilities.incarnation
            if before is not None and not is_same:
                self._forget_writers(address)
            self._capabilities[address] = capabilities
            self._epochs[address] += 1
        if algorithm and not is_same and capabilities.speculative == capability.NO_DRAFTS:
            logger.warning(
                "prefill server %s runs without --speculative-algorithm, this decode server with "
                "%s: prompts arrive without draft KV, and fewer drafts are accepted. Start "
                "prefill with the same draft model",
                address,
                algorithm,
            )
        return True

    def capabilities(self, address: str) -> capability.Capabilities:
        """What the server at ``address`` understands; that of a stock one if it is unknown."""
        return self._capabilities.get(address, capability.STOCK)

    def epoch(self, address: str) -> int:
        """Which server at ``address`` a room of now belongs to."""
        return self._epochs[address]

    def connected(self, address: str, infos: list[dict[str, Any]]) -> None:
        """This rank registered with these ranks of the server."""
        with self._lock:
            ranks = self._ranks[address]
            for info in infos:
                ranks.setdefault(_rank(info), 0)

    # ---- rooms that end early ----

    def fail(self, room: int, kind: Reason, text: str) -> None:
        """Fail one room that has neither ended nor failed."""
        if self._statuses.fail_known(room, text):
            STATS.count("kv_transfer_failed", reason=kind.value)

    def withdraw(self, address: str, infos: list[dict[str, Any]], room: int, reason: str) -> None:
        """Notify the prefill ranks of ``room`` that it is not wanted any more. Best effort."""
        if not self.capabilities(address).takes_control:
            return
        for info in infos:
            message = wire.Withdraw(
                room,
                self._transport.peer_name,
                self._rank.host,
                self._rank.port,
                reason,
                wants_answer=not info.get("is_dummy", False),
            )
            self._send(_rank(info), message, "it ends the room by its own deadlines")

    def yield_room(self, address: str, infos: list[dict[str, Any]], room: int) -> None:
        """Notify the prefill ranks of ``room`` that decode computes it. Best effort."""
        for info in infos:
            self._send(_rank(info), wire.ComputedByDecode(room), "its request ends by its deadline")

    def _send(self, rank: tuple[str, int], message: wire.Message, without: str) -> None:
        """Best effort; ``without``: what follows where it cannot be sent."""
        try:
            self._sockets.send(*rank, message)
        except (OSError, ValueError) as error:
            logger.warning(
                "could not send %s to prefill rank %s:%s (%s): %s", message, *rank, error, without
            )

    def defer_free(self, room: int, address: str, epoch: int, writers: int) -> DeferredFree | None:
        """Follow a room that is given up; None if nobody can write to its pages any more."""
        with self._lock:
            progress = self._transport.take_progress(room)
            if epoch <= self._gone_epochs[address] or progress.is_drained(writers):
                return None
            deferred = DeferredFree(
                room,
                address,
                progress,
                writers,
                collect=self._transport.collect_arrivals,
                forget=self.forget_deferred,
            )
            self._deferred[room] = deferred
            return deferred

    def deferred(self, room: int | None) -> DeferredFree | None:
        """What is deferred until ``room`` is drained, if it was given up."""
        with self._lock:
            return None if room is None else self._deferred.get(room)

    def forget_deferred(self, deferred: DeferredFree) -> None:
        """Its room is not followed any more."""
        with self._lock:
            if self._deferred.get(deferred.room) is deferred:
                del self._deferred[deferred.room]

    def deferred_rooms(self) -> list[int]:
        """The rooms that are given up and not drained yet."""
        with self._lock:
            return sorted(self._deferred)

    def progress_of(self, room: int) -> Progress:
        """What is recorded of a room's writers, also of a room that is given up and followed."""
        with self._lock:
            deferred = self._deferred.get(room)
            if deferred is not None and deferred.progress is not None:
                return deferred.progress
            return self._transport.progress(room)

    # ---- messages from prefill ranks ----

    def take(self, message: wire.Message) -> None:
        """A control message arrived.

        Raises:
            ControlError: it is not one for a decode rank.
        """
        if isinstance(message, wire.Pong):
            self._take_pong(message)
        elif isinstance(message, wire.Stopped):
            self._take_stopped(message)
        else:
            raise wire.ControlError(f"a {type(message).__name__} is not for a decode rank")

    def _take_stopped(self, message: wire.Stopped) -> None:
        with self._lock:
            deferred = self._deferred.get(message.room)
            if deferred is not None and deferred.progress is not None:
                deferred.progress.stop(message.writer)
                return
            if message.room not in self._statuses:
                return
            self._transport.progress(message.room).stop(message.writer)
            tracked = list(self._tables.rooms.items())
            addresses = [address for address, rooms in tracked if message.room in rooms]
        self.fail(message.room, Reason.PEER_FAILED, f"prefill reported: {message.reason}")
        if message.unknown_peer:
            for address in addresses:
                self.disconnect(address)

    def _take_pong(self, message: wire.Pong) -> None:
        host, _, port = message.to.rpartition(":")
        rank = (host, int(port) if port.isdigit() else -1)
        with self._lock:
            for address, ranks in self._ranks.items():
                if rank in ranks:
                    ranks[rank] = 0
                    if not message.knows_peer:
                        self.disconnect(address)

    def disconnect(self, address: str) -> None:
        """Forget the connections to a server: the next request connects and registers again."""
        with self._tables.lock:
            for key in list(self._tables.connections):  # the scheduler adds without the lock
                if key.startswith(f"{address}_"):
                    del self._tables.connections[key]
            self._tables.topology.pop(address, None)
        self.connections.forget(address)

    # ---- heartbeat ----

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
            self._probed_at = {address: self._epochs[address] for address in addresses}
            return {address: self.capabilities(address).incarnation for address in addresses}

    def _probe(self, address: str, timeout_s: float) -> Probe:
        """Query the identity of the bootstrap server, and ping the connected ranks."""
        takes_control = self.capabilities(address).takes_control
        route = capability.ROUTE if takes_control else "/health"
        try:
            response = requests.get(f"http://{address}{route}", timeout=timeout_s)
        except requests.ConnectionError as error:
            # No process listens at the connected ranks' ports either: a bootstrap server that is
            # gone may be another node's, and what refuses a service in front of one that is not.
            with self._lock:
                ranks = list(self._ranks[address])
            is_gone = is_refused(error) and all(refuses(*rank, timeout_s) for rank in ranks)
            return Probe(Liveness.GONE if is_gone else Liveness.SILENT)
        except requests.RequestException:
            return Probe(Liveness.SILENT)
        if not response.ok:
            return Probe(Liveness.SILENT)
        if not takes_control:
            return Probe(Liveness.ALIVE)
        incarnation = capability.incarnation_in(response.content)
        ours = self._transport.peer_name, self._rank.host, self._rank.port
        with self._lock:
            unanswered = max(self._ranks[address].values(), default=0)
            for rank in self._ranks[address]:
                self._ranks[address][rank] += 1
                ping = wire.Ping(f"{rank[0]}:{rank[1]}", *ours)
                self._send(rank, ping, "that counts as no answer")
        return Probe(Liveness.SILENT if unanswered else Liveness.ALIVE, incarnation)

    def _given_up(self, address: str, is_gone: bool, why: str) -> None:
        """What the last probes showed; they say nothing of a server connected to since then."""
        with self._lock:
            if self._epochs[address] == self._probed_at.get(address):
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
            self._ranks[address] = dict.fromkeys(self._ranks[address], 0)
            if is_gone:
                self._forget_writers(address)

    def _forget_writers(self, address: str) -> None:
        """The processes of the server at ``address`` are gone: nobody writes for its rooms."""
        self._gone_epochs[address] = self._epochs[address]
        for deferred in self._deferred.values():
            if deferred.address == address:
                deferred.writers_are_gone = True
        for host, port in self._ranks.pop(address, {}):
            self._sockets.drop(host, port)
            self._transport.drop_socket(host, port)

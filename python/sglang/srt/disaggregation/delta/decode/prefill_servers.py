"""A decode rank's view of its prefill servers: identity, topology, connections, stopped rooms.

SGLang queries a prefill server on the scheduler's thread for its topology, for the data-parallel
rank that serves a room, and for the addresses of its ranks. A server that hangs would block every
request of the decode server for seconds. Here a pool of threads makes all three queries
(``Connections``). ``heartbeat`` finds lost servers.

Contract: one ``Connections`` and one ``PrefillServers`` a decode rank; nothing here is agreed on
between ranks. The scheduler's thread queries and never waits; the reader thread calls ``take``; the
heartbeat thread probes; handshakes run on the pool's threads. Each attribute names its lock. Locks
are taken in the order ``PrefillServers._lock``, ``Tables.lock``, ``Connections._lock``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: SGLang's rank info (JSON), its manager

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.address_pool import AddressPool
from sglang.srt.disaggregation.delta.decode.deferred import Progress
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.rank import RankView, Statuses
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: Data-parallel, context-parallel, tensor-parallel and pipeline-parallel rank in a prefill server.
Rank = tuple[int, int, int, int]
#: Rank -> SGLang's rank info (JSON), None if there was no answer.
RankInfos = dict[Rank, "dict[str, Any] | None"]
#: First pause between two queries for a room that a prefill server does not know yet. Short,
#: because a router sends both halves of a request at about the same time.
_MIN_ROOM_PAUSE_S = 0.02
#: Factor by which the pause grows with each query, because a room that is late may stay unknown.
_ROOM_PAUSE_GROWTH = 1.25
#: Longest pause. Bounds how late a known room is found.
_MAX_ROOM_PAUSE_S = 1.0


class Tables(NamedTuple):
    """SGLang's tables of a decode rank. Keys are addresses of prefill servers (host:port of the
    bootstrap server)."""

    #: ``prefill_info_table``: the topology.
    topology: dict[str, Any]
    #: ``connection_pool``, by server and ranks in it, and ``connection_lock``.
    connections: dict[str, Any]
    lock: threading.Lock
    #: ``addr_to_rooms_tracker``.
    rooms: dict[str, set[int]]
    #: ``transfer_statuses``, by room. A function, because a backend creates this table last.
    progress: Callable[[], dict[int, Progress]]

    @classmethod
    def of(cls, manager: Any) -> Tables:
        """Return the tables of SGLang's ``CommonKVManager``."""
        return cls(
            manager.prefill_info_table,
            manager.connection_pool,
            manager.connection_lock,
            manager.addr_to_rooms_tracker,
            lambda: manager.transfer_statuses,
        )


class Connections:
    """Queries and their answers. The scheduler's thread queries; any thread may ``forget``."""

    def __init__(
        self,
        tables: Tables,
        handshake: Callable[[str], bool],
        pool: AddressPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``handshake`` queries a server's identity and topology; True if both are known then."""
        self._tables, self._handshake = tables, handshake
        self._pool, self._clock = pool, clock
        #: Server -> its pending query for identity and topology. The scheduler's thread alone.
        self._topologies: dict[str, Future[bool]] = {}
        #: Server -> why that query failed last. The scheduler's thread alone.
        self.refusals: dict[str, str] = {}
        #: Guards ``_ranks``, ``_rooms`` and ``_retries``.
        self._lock = threading.Lock()
        #: Server and data-parallel rank -> query for the addresses of its ranks.
        self._ranks: dict[tuple[str, int], Future[RankInfos]] = {}
        #: Server -> query for the data-parallel ranks of rooms.
        self._rooms: dict[str, Future[dict[str, int]]] = {}
        #: Server -> room that it did not know -> time of the next query, and the pause after it.
        self._retries: dict[str, dict[int, tuple[float, float]]] = {}

    def ensure(self, address: str) -> bool:
        """Return True if identity and topology of the server at ``address`` are known; otherwise
        query it in the background. The caller repeats the call until it succeeds or gives up."""
        table, future = self._tables.topology, self._topologies.get(address)
        if future is None:
            if address in table:
                return True
            future = self._topologies[address] = self._pool.submit(
                address, self._handshake, address
            )
        if not future.done():
            # Not even with the server in the table, because its identity is stored later.
            return False
        del self._topologies[address]
        try:
            if future.result() and address in table:
                self.refusals.pop(address, None)
                return True
        except Exception as error:  # SGLang raises if page size or dtype differ
            self.refusals[address] = str(error)
            logger.error("prefill server %s cannot be used: %s", address, error)
        self.refusals.setdefault(
            address,
            f"prefill server {address} could not be reached, its ranks are not all up, or this "
            "server cannot read the answer of its version (see this server's log)",
        )
        return False

    def is_asking(self, address: str) -> bool:
        """Return True if a query of ``ensure`` is pending."""
        return address in self._topologies

    def is_connected(self, address: str, dp_rank: int) -> bool:
        """Return True if this decode rank has registered there already, so that a room needs no
        query."""
        info = self._tables.topology.get(address)
        return info is not None and all(
            f"{address}_{dp_rank}_{cp_rank}_{info.target_tp_rank}" in self._tables.connections
            for cp_rank in info.target_cp_ranks
        )

    def ranks(self, address: str, dp_rank: int, ask: Callable[..., Any]) -> RankInfos | None:
        """Return the rank infos that a receiver needs to connect now ({} if it is connected), or
        None until all are known. ``ask``: SGLang's query for one rank. Called after ``ensure``."""
        info = self._tables.topology.get(address)
        if info is None or self.is_connected(address, dp_rank):
            return {}  # a receiver of a server that was just lost reports it
        with self._lock:
            future = self._ranks.get((address, dp_rank))
            if future is None:
                targets = info.target_cp_ranks, info.target_tp_ranks, info.target_pp_ranks
                wanted = list(product([dp_rank], *targets))
                self._ranks[address, dp_rank] = self._pool.submit(address, _ask_all, ask, wanted)
            if future is None or not future.done():
                return None
            del self._ranks[address, dp_rank]
        return {} if future.exception() is not None else future.result()

    def dp_ranks(self, address: str, rooms: Sequence[int]) -> dict[int, int]:
        """Return the known data-parallel ranks of ``rooms``; query the rest in the background."""
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        known: dict[str, int] = {}
        with self._lock:
            future = self._rooms.get(address)
            if future is not None and not future.done():
                return {}
            if future is not None:
                del self._rooms[address]
                if future.exception() is None:
                    known = future.result()
                else:
                    logger.error(
                        "prefill server %s: the query for the data-parallel ranks of its rooms "
                        "failed and is repeated: %r",
                        address,
                        future.exception(),
                    )
            found = {room: int(known[str(room)]) for room in rooms if str(room) in known}
            before, now = self._retries.pop(address, {}), self._clock()
            first = 0.0, _MIN_ROOM_PAUSE_S
            retries = {room: before.get(room, first) for room in rooms if room not in found}
            due = [room for room, (at, _) in retries.items() if now >= at]
            if due:
                unknown = list(retries)  # batch all rooms into one query
                query = CommonKVReceiver.query_prefill_dp_ranks
                self._rooms[address] = self._pool.submit(address, query, address, unknown)
            for room in due:
                pause = retries[room][1]
                retries[room] = now + pause, min(_ROOM_PAUSE_GROWTH * pause, _MAX_ROOM_PAUSE_S)
            if retries:
                self._retries[address] = retries
        return found

    def forget_unwanted(self, addresses: Container[str]) -> None:
        """Drop the unread answers of servers that no request waits for (not in ``addresses``)."""
        self.refusals = {
            server: why for server, why in self.refusals.items() if server in addresses
        }
        self._topologies = {
            server: future
            for server, future in self._topologies.items()
            if server in addresses or not future.done()
        }
        with self._lock:
            for key, future in list(self._ranks.items()):
                if key[0] not in addresses and future.done():
                    del self._ranks[key]

    def forget(self, address: str) -> None:
        """Drop cached and pending answers of a server that was disconnected."""
        with self._lock:
            self._ranks = {key: future for key, future in self._ranks.items() if key[0] != address}
            self._rooms.pop(address, None)
            self._retries.pop(address, None)


def _ask_all(ask: Callable[..., Any], wanted: list[Rank]) -> RankInfos:
    answers: RankInfos = {}
    for rank in wanted:
        answers[rank] = ask(*rank)
        if answers[rank] is None:  # the room fails, so the remaining ranks do not matter
            break
    return answers


def _rank(info: dict[str, Any]) -> tuple[str, int]:
    """Return host and port of a rank, read from SGLang's rank info."""
    return info["rank_ip"], int(info["rank_port"])


def drop_socket(receivers: type[Any], host: str, port: int) -> None:
    """Drop the messages that SGLang's class ``receivers`` has queued for a prefill rank."""
    from sglang.srt.utils.network import NetworkAddress

    endpoint = NetworkAddress(host, port).to_tcp()
    with receivers._global_lock:
        socket = receivers._socket_cache.pop(endpoint, None)
        lock = receivers._socket_locks.pop(endpoint, None)
    if socket is not None:
        with lock:
            socket.close(linger=0)


@dataclass
class _Server:
    """The prefill server at one address; a restarted one keeps this object."""

    capabilities: wire.Capabilities | None = None
    #: Number of handshakes: tells this server from an earlier one at its address.
    epoch: int = 0
    #: Host and port of each rank that this rank is connected to -> its unanswered pings.
    ranks: dict[tuple[str, int], int] = field(default_factory=dict)


class PrefillServers:
    """The prefill servers of a decode rank with the radix cache, each a
    ``heartbeat.WatchedServers``."""

    def __init__(
        self,
        rank: RankView,
        statuses: Statuses,
        tables: Tables,
        args: ServerArgs,
        *,
        ask: Callable[[str], bool],
        peer_name: Callable[[], str],
        drop_socket: Callable[[str, int], None],
    ) -> None:
        """``ask``: SGLang's blocking query for a server's topology; ``peer_name`` returns the name
        of this rank on prefill; ``drop_socket`` drops the messages that SGLang's receivers have
        queued for a rank (host and port)."""
        self._rank, self._statuses, self._tables, self._args = rank, statuses, tables, args
        self._ask, self._peer_name, self._drop_socket = ask, peer_name, drop_socket
        self._sockets = wire.PeerSockets()
        #: Guards ``_servers``.
        self._lock = threading.RLock()
        self.connections = Connections(tables, self._handshake, AddressPool("pd-handshake"))
        self._servers: dict[str, _Server] = defaultdict(_Server)

    # ---- handshake ----

    def _handshake(self, address: str) -> bool:
        # Queried together with the topology, because a restarted server may be another version.
        capabilities = wire.fetch_capabilities(address)
        if capabilities is None or not self._ask(address):
            return False
        algorithm = self._args.speculative_algorithm
        with self._lock:
            server = self._servers[address]
            before, server.capabilities = server.capabilities, capabilities
            is_same = before is not None and before.incarnation == capabilities.incarnation
            if before is not None and not is_same:
                self._forget_writers(address)
            server.epoch += 1
        if algorithm and not is_same and capabilities.speculative == wire.NO_DRAFTS:
            logger.warning(
                "prefill server %s runs without --speculative-algorithm, this decode server with "
                "%s: prompts arrive without draft KV, and fewer drafts are accepted. Start "
                "prefill with the same draft model",
                address,
                algorithm,
            )
        return True

    def capabilities(self, address: str) -> wire.Capabilities:
        """Return the capabilities of the server at ``address``, a stock server's if unknown."""
        server = self._servers.get(address)
        return server and server.capabilities or wire.STOCK

    def connected(self, address: str, infos: list[dict[str, Any]]) -> None:
        """Note that this rank registered with these ranks of the server."""
        with self._lock:
            for info in infos:
                self._servers[address].ranks.setdefault(_rank(info), 0)

    # ---- rooms that end early ----

    def fail(self, room: int, kind: Reason, text: str) -> None:
        """Fail a room, unless it has ended or failed already."""
        if self._statuses.fail_known(room, text):
            STATS.count("kv_transfer_failed", reason=kind.value)

    def withdraw(self, address: str, infos: list[dict[str, Any]], room: int, reason: str) -> None:
        """Notify the prefill ranks of ``room`` that it is not needed any more. Best effort."""
        if not self.capabilities(address).takes_control:
            return
        for info in infos:
            sender = self._peer_name(), self._rank.host, self._rank.port
            wants_answer = not info.get("is_dummy", False)
            message = wire.Withdraw(room, *sender, reason, wants_answer=wants_answer)
            self._send(_rank(info), message, "it ends the room by its own deadlines")

    def yield_room(self, infos: list[dict[str, Any]], room: int) -> None:
        """Notify the prefill ranks of ``room`` that decode computes its request. Best effort."""
        for info in infos:
            self._send(_rank(info), wire.ComputedByDecode(room), "its request ends by its deadline")

    def _send(self, rank: tuple[str, int], message: wire.Message, otherwise: str) -> None:
        """Send a message, best effort. ``otherwise``: logged consequence of a failure to send."""
        try:
            self._sockets.send(*rank, message)
        except (OSError, ValueError) as error:
            logger.warning(
                "prefill rank %s:%s: could not send %s (%s): %s", *rank, message, error, otherwise
            )

    # ---- messages from prefill ranks ----

    def take(self, message: wire.Message) -> None:
        """Process a control message.

        Raises:
            ControlError: the message is not for a decode rank.
        """
        if isinstance(message, wire.Pong):
            host, _, port = message.to.rpartition(":")
            rank = (host, int(port) if port.isdigit() else -1)
            with self._lock:
                for address, server in list(self._servers.items()):
                    if rank in server.ranks:
                        server.ranks[rank] = 0
                        if not message.knows_peer:
                            self.disconnect(address)
            return
        if not isinstance(message, wire.Stopped):
            raise wire.ControlError(f"a {type(message).__name__} is not for a decode rank")
        progress = self._tables.progress().get(message.room)
        if progress is not None:
            progress.stopped_writers.add(message.writer)
            if progress.is_deferred:
                return
        tracked = list(self._tables.rooms.items())
        addresses = [address for address, rooms in tracked if message.room in rooms]
        prefill = " ".join(["prefill", *addresses])
        self.fail(message.room, Reason.PEER_FAILED, f"{prefill} reported: {message.reason}")
        if message.unknown_peer:
            for address in addresses:
                self.disconnect(address)

    def disconnect(self, address: str) -> None:
        """Drop the connections to a server. Its next request connects and registers again."""
        self._drop_connections(address)
        with self._tables.lock:
            self._tables.topology.pop(address, None)
        self.connections.forget(address)

    def _drop_connections(self, address: str) -> None:
        with self._tables.lock:
            for key in list(self._tables.connections):  # the scheduler adds without the lock
                if key.startswith(f"{address}_"):
                    del self._tables.connections[key]

    def _forget_writers(self, address: str) -> None:
        """Note that the processes of the server at ``address`` are gone and write no more."""
        for progress in list(self._tables.progress().values()):
            if progress.address == address:
                progress.writers_are_gone = True
        server = self._servers[address]
        gone, server.ranks = server.ranks, {}
        # Otherwise a connection made since ``disconnect`` would stay, to ranks that are not pinged.
        self._drop_connections(address)
        for rank in gone:
            self._sockets.drop(*rank)
            self._drop_socket(*rank)

"""A decode rank's view of prefill servers: who they are, and what they stopped.

SGLang queries a prefill server on the scheduler's thread: its topology, which data-parallel rank
serves a room, and where its ranks listen. A server that hangs would stop every request of the
decode server for seconds. Here all three are asked in the background (``Connections``). Whether
the servers live is ``heartbeat``'s.
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
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: SGLang's JSON of a rank; its manager

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.address_pool import AddressPool
from sglang.srt.disaggregation.delta.decode.transfer import Progress
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.rank import RankView, Statuses
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: Data-parallel, context-parallel, tensor-parallel and pipeline-parallel rank in a prefill server.
Rank = tuple[int, int, int, int]
#: SGLang's JSON of a rank, by rank; None: no answer.
RankInfos = dict[Rank, "dict[str, Any] | None"]
#: Seconds between the first two questions for a room that a prefill server does not know yet, by
#: which factor it is asked more rarely then, and the longest pause.
_ASK_AGAIN_S, _MORE_RARELY, _MOST_S = 0.02, 1.25, 1.0


class Tables(NamedTuple):
    """SGLang's tables of a decode rank, by prefill server (host:port of its bootstrap server)."""

    #: ``prefill_info_table``: the topology.
    topology: dict[str, Any]
    #: ``connection_pool``, by server and ranks in it, and ``connection_lock``.
    connections: dict[str, Any]
    lock: threading.Lock
    #: ``addr_to_rooms_tracker``.
    rooms: dict[str, set[int]]
    #: ``transfer_statuses``, by room; a backend makes it later than the others.
    progress: Callable[[], dict[int, Progress]]

    @classmethod
    def of(cls, manager: Any) -> Tables:
        """Those of SGLang's ``CommonKVManager``."""
        return cls(
            manager.prefill_info_table,
            manager.connection_pool,
            manager.connection_lock,
            manager.addr_to_rooms_tracker,
            lambda: manager.transfer_statuses,
        )


class Connections:
    """One for each decode rank. The scheduler's thread queries; any thread may ``forget``."""

    def __init__(
        self,
        tables: Tables,
        handshake: Callable[[str], bool],
        pool: AddressPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``handshake`` asks a server who it is, and for its topology; whether that is known."""
        self._tables, self._handshake = tables, handshake
        self._pool, self._clock = pool, clock
        #: Servers whose topology is asked for; and why that was impossible, the last time.
        self._asked: dict[str, Future[bool]] = {}
        self.refusals: dict[str, str] = {}
        #: Of what is below.
        self._lock = threading.Lock()
        #: By server and data-parallel rank: what each of its ranks that we need answered.
        self._ranks: dict[tuple[str, int], Future[RankInfos]] = {}
        self._rooms: dict[str, Future[dict[str, int]]] = {}
        #: By server, its rooms that were asked for and are not known: when each is asked for again,
        #: and how long after that once more.
        self._again: dict[str, dict[int, tuple[float, float]]] = {}

    def ensure(self, address: str) -> bool:
        """Whether the server at ``address`` (bootstrap host:port) is known. Never waits: a server
        that hangs must not stop the scheduler. Called again until it is, or is given up."""
        table, future = self._tables.topology, self._asked.get(address)
        if future is None:
            if address in table:
                return True
            future = self._asked[address] = self._pool.submit(address, self._handshake, address)
        if not future.done():
            # Not before it is over: the table has the server before we know which one it is.
            return False
        del self._asked[address]
        try:
            if future.result() and address in table:
                self.refusals.pop(address, None)
                return True
        except Exception as error:  # SGLang raises where page size or dtype differ
            self.refusals[address] = str(error)
            logger.error("prefill server %s cannot be used: %s", address, error)
        self.refusals.setdefault(
            address,
            f"prefill server {address} could not be reached, its ranks are not all up, or it runs "
            "a version whose answer this server cannot read (see this server's log)",
        )
        return False

    def is_asking(self, address: str) -> bool:
        """Whether ``ensure`` has queried the server and has no answer yet."""
        return address in self._asked

    def is_connected(self, address: str, dp_rank: int) -> bool:
        """Whether a room needs no query: this decode rank has registered there already."""
        info = self._tables.topology.get(address)
        return info is not None and all(
            f"{address}_{dp_rank}_{cp_rank}_{info.target_tp_rank}" in self._tables.connections
            for cp_rank in info.target_cp_ranks
        )

    def ranks(self, address: str, dp_rank: int, ask: Callable[..., Any]) -> RankInfos | None:
        """What the ranks of a server answered that this one has to be connected to, for the
        receiver that connects now; None: not all is known yet. Queries it with ``ask``, SGLang's
        question for where one rank listens. The server's topology is known."""
        info = self._tables.topology.get(address)
        if info is None or self.is_connected(address, dp_rank):
            return {}  # if it was lost meanwhile, the receiver says so
        with self._lock:
            future = self._ranks.get((address, dp_rank))
            if future is None:
                others = info.target_cp_ranks, info.target_tp_ranks, info.target_pp_ranks
                wanted = list(product([dp_rank], *others))
                self._ranks[address, dp_rank] = self._pool.submit(address, _ask_all, ask, wanted)
            if future is None or not future.done():
                return None
            del self._ranks[address, dp_rank]
        return {} if future.exception() is not None else future.result()

    def dp_ranks(self, address: str, rooms: Sequence[int]) -> dict[int, int]:
        """The data-parallel ranks of those of ``rooms`` that are known; queries the rest."""
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
                        "could not query prefill server %s for the data-parallel ranks of its "
                        "rooms; the query is repeated: %r",
                        address,
                        future.exception(),
                    )
            found = {room: int(known[str(room)]) for room in rooms if str(room) in known}
            before, now = self._again.pop(address, {}), self._clock()
            again = {
                room: before.get(room, (0.0, _ASK_AGAIN_S)) for room in rooms if room not in found
            }
            due = [room for room, (at, _) in again.items() if now >= at]
            if due:
                asked = list(again)  # one question, whoever it is for
                query = CommonKVReceiver.query_prefill_dp_ranks
                self._rooms[address] = self._pool.submit(address, query, address, asked)
            for room in due:
                pause = again[room][1]
                again[room] = now + pause, min(_MORE_RARELY * pause, _MOST_S)
            if again:
                self._again[address] = again
        return found

    def forget_unwanted(self, addresses: Container[str]) -> None:
        """Only requests for ``addresses`` wait: drop what was answered to others that went away."""
        self.refusals = {it: why for it, why in self.refusals.items() if it in addresses}
        self._asked = {
            it: each for it, each in self._asked.items() if it in addresses or not each.done()
        }
        with self._lock:
            for key, future in list(self._ranks.items()):
                if key[0] not in addresses and future.done():
                    del self._ranks[key]

    def forget(self, address: str) -> None:
        """The server is disconnected: what it answered is not used, nor what it still answers."""
        with self._lock:
            self._ranks = {key: each for key, each in self._ranks.items() if key[0] != address}
            self._rooms.pop(address, None)
            self._again.pop(address, None)


def _ask_all(ask: Callable[..., Any], wanted: list[Rank]) -> RankInfos:
    answers: RankInfos = {}
    for rank in wanted:
        answers[rank] = ask(*rank)
        if answers[rank] is None:  # the room fails, whatever the others would say
            break
    return answers


def _rank(info: dict[str, Any]) -> tuple[str, int]:
    """Where a rank listens, of SGLang's JSON of it."""
    return info["rank_ip"], int(info["rank_port"])


@dataclass
class _Server:
    """The prefill server at one address, and those before it."""

    capabilities: wire.Capabilities | None = None
    #: Counts handshakes, to tell the server there from the one before it.
    epoch: int = 0
    #: Addresses of the ranks that this rank is connected to, and their unanswered pings.
    ranks: dict[tuple[str, int], int] = field(default_factory=dict)


class PrefillServers:
    """One for each decode rank with the radix cache on, a ``heartbeat.WatchedServers``. Used by the
    scheduler thread, the reader thread and the heartbeat thread."""

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
        """``ask``: SGLang's own blocking question for a server's topology; ``peer_name``: by which
        prefill ranks know this one; ``drop_socket`` throws away what SGLang's receivers have queued
        for a rank (host and port)."""
        self._rank, self._statuses, self._tables, self._args = rank, statuses, tables, args
        self._ask, self._peer_name, self._drop_socket = ask, peer_name, drop_socket
        self._sockets = wire.PeerSockets()
        self._lock = threading.RLock()
        self.connections = Connections(tables, self._handshake, AddressPool("pd-handshake"))
        self._servers: dict[str, _Server] = defaultdict(_Server)

    # ---- handshake ----

    def _handshake(self, address: str) -> bool:
        # Asked whenever the topology is: a server that came back may be another version.
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
        """What the server at ``address`` understands; that of a stock one if it is unknown."""
        server = self._servers.get(address)
        return server and server.capabilities or wire.STOCK

    def connected(self, address: str, infos: list[dict[str, Any]]) -> None:
        """This rank registered with these ranks of the server."""
        with self._lock:
            for info in infos:
                self._servers[address].ranks.setdefault(_rank(info), 0)

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
            ours = self._peer_name(), self._rank.host, self._rank.port
            wants_answer = not info.get("is_dummy", False)
            message = wire.Withdraw(room, *ours, reason, wants_answer=wants_answer)
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

    # ---- messages from prefill ranks ----

    def take(self, message: wire.Message) -> None:
        """A control message arrived.

        Raises:
            ControlError: it is not one for a decode rank.
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
        """Forget the connections to a server: the next request connects and registers again."""
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
        """The processes of the server at ``address`` are gone: nobody writes for its rooms."""
        for progress in list(self._tables.progress().values()):
            if progress.address == address:
                progress.writers_are_gone = True
        server = self._servers[address]
        gone, server.ranks = server.ranks, {}
        # One that was made meanwhile would stay, and its ranks would not be pinged.
        self._drop_connections(address)
        for rank in gone:
            self._sockets.drop(*rank)
            self._drop_socket(*rank)

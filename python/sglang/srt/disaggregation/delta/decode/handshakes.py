"""What decode queries from a prefill server before a room can be announced; nobody waits for an
answer.

SGLang asks on the scheduler's thread: the topology of a prefill server, which data-parallel rank
serves a room, and where the ranks of the server listen. A server that hangs would stop every
request of the decode server for seconds. Here all three are asked in the background, and no request
waits for an answer for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: values in SGLang's JSON of a rank

from sglang.srt.disaggregation.delta.decode.record import record_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.delta.address_pool import AddressPool
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

#: Data-parallel, context-parallel, tensor-parallel and pipeline-parallel rank in a prefill server.
Rank = tuple[int, int, int, int]
#: SGLang's question for where one rank of a server listens; None: no answer.
AskRank = Callable[..., "dict[str, Any] | None"]

#: Seconds between the first two questions for a room that a prefill server does not know yet, by
#: which factor it is asked more rarely then, and the longest pause.
_ASK_AGAIN_S, _MORE_RARELY, _MOST_S = 0.02, 1.25, 1.0


class _Again(NamedTuple):
    """When a prefill server is asked for a room, and how long after that it is queried again."""

    at: float = 0.0
    pause: float = _ASK_AGAIN_S


class Tables(NamedTuple):
    """SGLang's tables of a decode rank, by prefill server (host:port of its bootstrap server)."""

    #: ``prefill_info_table``: the topology.
    topology: dict[str, Any]
    #: ``connection_pool``, by server and ranks in it, and ``connection_lock``.
    connections: dict[str, Any]
    lock: threading.Lock
    #: ``addr_to_rooms_tracker``.
    rooms: dict[str, set[int]]

    @classmethod
    def of(cls, manager: Any) -> Tables:
        """Those of SGLang's ``CommonKVManager``."""
        return cls(
            manager.prefill_info_table,
            manager.connection_pool,
            manager.connection_lock,
            manager.addr_to_rooms_tracker,
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
        self._tables = tables
        self._handshake = handshake
        self._pool = pool
        self._clock = clock
        #: Servers whose topology is asked for; and why that was impossible, the last time.
        self._asked: dict[str, Future[bool]] = {}
        self.refusals: dict[str, str] = {}
        #: Of what is below.
        self._lock = threading.Lock()
        #: By server and data-parallel rank: what each of its ranks that we need answered.
        self._ranks: dict[tuple[str, int], Future[dict[Rank, dict[str, Any] | None]]] = {}
        self._rooms: dict[str, Future[dict[str, int]]] = {}
        #: By server, its rooms that were asked for and are not known.
        self._again: dict[str, dict[int, _Again]] = {}

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
            known = future.result() and address in table
        except Exception as error:  # SGLang raises where page size or dtype differ
            self.refusals[address] = str(error)
            logger.error("prefill server %s cannot be used: %s", address, error)
            return False
        if known:
            self.refusals.pop(address, None)
        else:
            self.refusals.setdefault(
                address,
                f"prefill server {address} could not be reached, its ranks are not all up, or it "
                "runs a version whose answer this server cannot read (see this server's log)",
            )
        return known

    def is_asking(self, address: str) -> bool:
        """Whether ``ensure`` has queried the server and has no answer yet."""
        return address in self._asked

    def forget_answer(self, address: str) -> bool:
        """Nobody waits for the server any more: drop what ``ensure`` keeps of it, unless it is
        being asked. Returns whether that was done."""
        future = self._asked.get(address)
        if future is not None and not future.done():
            return False
        self._asked.pop(address, None)
        self.refusals.pop(address, None)
        return True

    def is_connected(self, address: str, dp_rank: int) -> bool:
        """Whether a room needs no query: this decode rank has registered there already."""
        info = self._tables.topology.get(address)
        return info is not None and all(
            f"{address}_{dp_rank}_{cp_rank}_{info.target_tp_rank}" in self._tables.connections
            for cp_rank in info.target_cp_ranks
        )

    def is_ready(self, address: str, dp_rank: int, ask: AskRank) -> bool:
        """Whether a receiver may be initialised now; queries what is missing, with ``ask``. The
        topology of the server at ``address`` is known."""
        if self.is_connected(address, dp_rank):
            return True
        info = self._tables.topology.get(address)
        if info is None:  # lost meanwhile, which the receiver says
            return True
        with self._lock:
            future = self._ranks.get((address, dp_rank))
            if future is None:
                wanted = [
                    (dp_rank, cp_rank, tp_rank, pp_rank)
                    for cp_rank in info.target_cp_ranks
                    for tp_rank in info.target_tp_ranks
                    for pp_rank in info.target_pp_ranks
                ]
                self._ranks[address, dp_rank] = self._pool.submit(address, _ask_all, ask, wanted)
                return False
        return future.done()

    def answer(self, address: str, rank: Rank) -> dict[str, Any] | None:
        """What ``is_ready`` has queried; None where the server did not answer. Never waits."""
        with self._lock:
            future = self._ranks.get((address, rank[0]))
        if future is None or not future.done() or future.exception() is not None:
            return None
        found = future.result().get(rank)
        return None if found is None else dict(found)

    def settled(self, address: str, dp_rank: int) -> None:
        """A receiver was initialised with the answers, or failed with them: the next one that is
        not connected asks anew."""
        with self._lock:
            self._ranks.pop((address, dp_rank), None)

    def dp_ranks(self, address: str, rooms: Sequence[int]) -> dict[int, int]:
        """The data-parallel ranks of those of ``rooms`` that are known; queries the rest."""
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        known: dict[str, int] = {}
        with self._lock:
            future = self._rooms.get(address)
            if future is not None:
                if not future.done():
                    return {}
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
            again = {room: before.get(room, _Again()) for room in rooms if room not in found}
            due = [room for room, when in again.items() if now >= when.at]
            if due:
                asked = list(again)  # one question, whoever it is for
                query = CommonKVReceiver.query_prefill_dp_ranks
                self._rooms[address] = self._pool.submit(address, query, address, asked)
            for room in due:
                pause = again[room].pause
                again[room] = _Again(now + pause, min(_MORE_RARELY * pause, _MOST_S))
            if again:
                self._again[address] = again
        return found

    def forget_unwanted(self, addresses: Container[str]) -> None:
        """Only requests for ``addresses`` wait: drop what was answered to others that went away."""
        with self._lock:
            for key, future in list(self._ranks.items()):
                if key[0] not in addresses and future.done():
                    del self._ranks[key]

    def forget(self, address: str) -> None:
        """The server is disconnected: what it answered is not used, nor what it still answers."""
        with self._lock:
            for key in [key for key in self._ranks if key[0] == address]:
                del self._ranks[key]
            self._rooms.pop(address, None)
            self._again.pop(address, None)


def _ask_all(ask: AskRank, wanted: list[Rank]) -> dict[Rank, dict[str, Any] | None]:
    answers: dict[Rank, dict[str, Any] | None] = {}
    for rank in wanted:
        answers[rank] = ask(*rank)
        if answers[rank] is None:  # the room fails, whatever the others would say
            break
    return answers


def bootstrap_addr(req: Req) -> str:
    """The prefill server of a request, as "host:port"."""
    return _address(req.bootstrap_host or "", req.bootstrap_port)


@lru_cache(maxsize=1024)  # parsing costs more than the rest of an admission step
def _address(host: str, port: int) -> str:
    from sglang.srt.utils.network import NetworkAddress

    return NetworkAddress(host, port).to_host_port_str()


_DEADLINE = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"


@dataclass
class _Attempts:
    """How often a server could not be queried for its topology, and when it is queried again."""

    failed: int = 0
    again_at: float = 0.0


class _Reached:
    """Polls a receiver, and in the lowest bit, whether its prefill server was reached so far or the
    request was attempted here already. Of several ranks' the smallest counts."""

    def __init__(self, entry: DecodeRequest) -> None:
        self._entry = entry

    def poll(self) -> int:
        record = record_of(self._entry.req)
        is_reached = record.tried_here or not record.unreachable
        return 2 * int(self._entry.kv_receiver.poll()) + is_reached


class Handshakes:
    """One for each prealloc queue. Called in every step by the scheduler's thread.

    A request passes the three questions of ``Connections``: the topology of its prefill server, the
    data-parallel rank that serves it, and where the ranks listen that write to this one.
    """

    def __init__(
        self,
        connections: Connections,
        dp_rank_of: Callable[[Req], int | None],
        clock: Callable[[], float],
        *,
        allowed_s: float,
        attempts: int,
        retry_s: float,
    ) -> None:
        """``dp_rank_of``: the data-parallel rank that serves a request, None where prefill has to
        be queried; ``allowed_s``: how long a handshake may take; ``attempts``: how often a server's
        topology is asked for before its requests fail, ``retry_s`` apart."""
        self._connections = connections
        self._dp_rank_of = dp_rank_of
        self._clock = clock
        self._allowed_s = allowed_s
        self._most_attempts = attempts
        self._retry_s = retry_s
        self._attempts: dict[str, _Attempts] = {}

    def advance(self, entries: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Initialise the receivers of ``entries`` that are ready, and fail those that waited for
        too long; the others wait on."""
        now, pending = self._clock(), defaultdict[str, list["DecodeRequest"]](list)
        for entry in entries:
            if entry.kv_receiver.conclude_state is not None:
                continue  # who polls it answers
            record, address = record_of(entry.req), bootstrap_addr(entry.req)
            if record.handshake_since is None:
                record.handshake_since = now
            in_time = pending[address]
            if now - record.handshake_since < self._allowed_s:
                in_time.append(entry)
                continue
            entry.kv_receiver.fail_handshake(
                f"prefill {address} did not report {record.handshake_lacks} "
                f"within {self._allowed_s} s ({_DEADLINE})"
            )
        waiting = []
        for address, in_time in pending.items():
            waiting += self._advance(address, in_time)
        for address in self._attempts.keys() - pending.keys():  # whoever asked went away
            if self._connections.forget_answer(address):
                del self._attempts[address]
            else:
                self._attempts[address] = _Attempts()
        self._connections.forget_unwanted(pending)
        return waiting

    def finish(
        self, entries: Sequence[DecodeRequest], group: ProcessGroup, *, tries_here: bool
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Poll the handshakes of ``entries``, on all ranks of ``group``: which of them failed, and
        of which no prefill server was reached. The latter are asked for only where it
        ``tries_here`` to compute such requests."""
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.utils import poll_and_all_reduce

        failed: list[DecodeRequest] = []
        unreached: list[DecodeRequest] = []
        if not entries:
            return failed, unreached
        pollers = [_Reached(entry) if tries_here else entry.kv_receiver for entry in entries]
        for entry, vote in zip(entries, poll_and_all_reduce(pollers, group), strict=True):
            poll, is_reached = divmod(vote, 2) if tries_here else (vote, True)
            if poll == KVPoll.Failed:
                failed.append(entry)
            elif poll == KVPoll.WaitingForInput:
                entry.waiting_for_input = True
                record_of(entry.req).wait.since = self._clock()
                entry.req.time_stats.set_bootstrap_done_time()
            elif not is_reached:
                unreached.append(entry)
        return failed, unreached

    def _advance(self, address: str, entries: list[DecodeRequest]) -> list[DecodeRequest]:
        """Those of ``entries`` that are still not ready."""
        known = self._is_known(address)
        if known is None:
            why = self._connections.refusals.pop(address)
            for entry in entries:
                entry.kv_receiver.fail_handshake(why)
            return []
        if not known:
            if self._attempts[address].failed:
                for entry in entries:
                    record_of(entry.req).unreachable = True
            return entries
        ranks = {id(entry): self._dp_rank_of(entry.req) for entry in entries}
        rooms = [entry.req.bootstrap_room for entry in entries if ranks[id(entry)] is None]
        found = self._connections.dp_ranks(address, rooms) if rooms else {}
        waiting = []
        for entry in entries:
            rank = ranks[id(entry)]
            if rank is None:
                rank = found.get(entry.req.bootstrap_room)
            record = record_of(entry.req)
            if rank is None:
                record.handshake_lacks = "which of its data-parallel ranks serves the request"
            elif not entry.kv_receiver.is_ready(rank):
                record.handshake_lacks = f"the addresses of its ranks (data-parallel rank {rank})"
            else:
                entry.kv_receiver.init(rank)
                continue
            waiting.append(entry)
        return waiting

    def _is_known(self, address: str) -> bool | None:
        """Whether the server's topology is known; None where it was asked for too often."""
        attempts = self._attempts.setdefault(address, _Attempts())
        if self._clock() < attempts.again_at:
            return False
        if self._connections.ensure(address):
            del self._attempts[address]
            return True
        if self._connections.is_asking(address):
            return False
        attempts.failed += 1
        attempts.again_at = self._clock() + self._retry_s
        if attempts.failed < self._most_attempts:
            return False
        logger.error(
            "prefill server %s did not report its server info in %d attempts: the requests that "
            "wait for it fail. Check that it runs and that this host can reach it",
            address,
            attempts.failed,
        )
        del self._attempts[address]
        return None

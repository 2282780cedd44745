"""Whether prefill servers are alive, as one decode rank sees them.

Stock asks only the bootstrap server of a prefill server. That one still answers when a scheduler
process hangs, and when the whole server was restarted between two questions, at the same address
but with other ranks. So here it is also asked who it is, and every connected rank is pinged.

What decode asks a prefill server before a room can be announced, asked in the background.

SGLang asks both questions on the scheduler's thread: where the ranks of a prefill server listen, at
the first request for them, and which data-parallel rank serves a room. A server that hangs would
stop every request of the decode server for seconds.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

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
        #: Looks in a row without a sign of life.
        self._misses: dict[str, int] = {}

    def beat(self, known: Mapping[str, str | None]) -> None:
        """Look at each address once, at the same time: one that hangs must not delay the others.

        ``known``: addresses with the incarnation that this server was connected to, if it told one.
        """
        self._misses = {address: self._misses.get(address, 0) for address in known}
        if not known:
            return
        with ThreadPoolExecutor(min(len(known), 16)) as executor:
            looks = {executor.submit(self._look, address): address for address in known}
            for done in as_completed(looks):
                address = looks[done]
                try:
                    look = done.result()
                except Exception as error:  # one strange server must not hide the others
                    logger.warning("could not look at prefill server %s: %r", address, error)
                    look = Look(Sign.SILENT)
                self._judge(address, known[address], look)

    def _judge(self, address: str, incarnation: str | None, look: Look) -> None:
        if None not in (incarnation, look.incarnation) and look.incarnation != incarnation:
            self._misses[address] = 0
            self._lost(address, True, "it was restarted")
            return
        if look.sign is Sign.ALIVE:
            self._misses[address] = 0
            return
        self._misses[address] += 1
        logger.warning(
            "prefill server %s: no sign of life (%s), %d of %d",
            address,
            look.sign.name.lower(),
            self._misses[address],
            self._max_failures,
        )
        if self._misses[address] >= self._max_failures:
            self._misses[address] = 0
            self._lost(
                address,
                look.sign is Sign.GONE,
                "nobody listens there any more"
                if look.sign is Sign.GONE
                else f"no sign of life in {self._max_failures} heartbeats",
            )


#: Data-parallel, context-parallel, tensor-parallel and pipeline-parallel rank in a prefill server.
Rank = tuple[int, int, int, int]
#: SGLang's question for where one rank of a server listens; None: no answer.
AskRank = Callable[..., "dict[str, Any] | None"]
#: SGLang's question for the data-parallel ranks of some rooms, by the room's number in decimal.
AskRooms = Callable[[str, list[int]], dict[str, int]]

#: Seconds between two questions for rooms that a prefill server does not know yet.
_ASK_AGAIN_S = 0.02


class Connections:
    """One for each decode rank. The scheduler's thread asks; any thread may ``forget``."""

    def __init__(
        self,
        manager: Any,
        executor: Executor,
        ask_rooms: AskRooms | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._executor = executor
        self._ask_rooms = ask_rooms or _ask_rooms
        self._clock = clock
        self._lock = threading.Lock()
        #: By server and data-parallel rank: what each of its ranks that we need answered.
        self._ranks: dict[tuple[str, int], Future[dict[Rank, dict[str, Any] | None]]] = {}
        self._rooms: dict[str, Future[dict[str, int]]] = {}
        self._ask_rooms_at: dict[str, float] = {}

    def is_connected(self, address: str, dp_rank: int) -> bool:
        """Whether a room needs no question: this decode rank has registered there already."""
        info = self._manager.prefill_info_table.get(address)
        return info is not None and all(
            f"{address}_{dp_rank}_{cp_rank}_{info.target_tp_rank}" in self._manager.connection_pool
            for cp_rank in info.target_cp_ranks
        )

    def is_ready(self, address: str, dp_rank: int, ask: AskRank) -> bool:
        """Whether a receiver may be initialised now; asks for what is missing, with ``ask``. The
        topology of the server at ``address`` is known."""
        if self.is_connected(address, dp_rank):
            return True
        info = self._manager.prefill_info_table.get(address)
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
                self._ranks[address, dp_rank] = self._executor.submit(_ask_all, ask, wanted)
                return False
        return future.done()

    def answer(self, address: str, rank: Rank) -> dict[str, Any] | None:
        """What ``is_ready`` has asked for; None where the server did not say. Never waits."""
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
        """The data-parallel ranks of those of ``rooms`` that are known; asks for the rest."""
        known: dict[str, int] = {}
        with self._lock:
            future = self._rooms.get(address)
            if future is not None:
                if not future.done():
                    return {}
                del self._rooms[address]
                self._ask_rooms_at[address] = self._clock() + _ASK_AGAIN_S
                if future.exception() is None:
                    known = future.result()
                else:
                    logger.error("prefill server %s: %r", address, future.exception())
            found = {room: int(known[str(room)]) for room in rooms if str(room) in known}
            missing = [room for room in rooms if room not in found]
            if missing and self._clock() >= self._ask_rooms_at.get(address, 0.0):
                self._rooms[address] = self._executor.submit(self._ask_rooms, address, missing)
            elif not missing:
                self._ask_rooms_at.pop(address, None)
        return found

    def forget(self, address: str) -> None:
        """The server is disconnected: what it answered is not used, nor what it still answers."""
        with self._lock:
            for key in [key for key in self._ranks if key[0] == address]:
                del self._ranks[key]
            self._rooms.pop(address, None)
            self._ask_rooms_at.pop(address, None)


def _ask_all(ask: AskRank, wanted: list[Rank]) -> dict[Rank, dict[str, Any] | None]:
    answers: dict[Rank, dict[str, Any] | None] = {}
    for rank in wanted:
        answers[rank] = ask(*rank)
        if answers[rank] is None:  # the room fails, whatever the others would say
            break
    return answers


def _ask_rooms(address: str, rooms: list[int]) -> dict[str, int]:
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    answer: dict[str, int] = CommonKVReceiver.query_prefill_dp_ranks(address, rooms)
    return answer

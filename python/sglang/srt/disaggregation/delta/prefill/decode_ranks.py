"""The decode ranks that a prefill rank knows: messages from and to them, their liveness, and where
they find this rank (``ServedRooms``).

Ranks of servers with the radix cache ping. Others (stock ones too) send nothing when they end, and
register under a new name after a restart. So the table is bounded: of the ranks that neither ping
nor have rooms, the least recently used are forgotten, with their pools' addresses, NIXL's
connection and prepared lists.

Contract: ``take`` and ``tick`` run on the reader thread, which owns the tables. ``tell`` may come
from any thread; ``ServedRooms.tell`` comes from the scheduler's. No call waits for a peer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import requests

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.address_pool import AddressPool
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.rooms import UNDER_WAY, Announcement, RoomTable
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.rank import RankView
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo  # or Mooncake's
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: Maximum number of registered decode ranks.
_MAX_REGISTERED = 4096
#: Number of successive pings that a rank may miss. Decode sets the interval.
_MAX_MISSED_PINGS = 3
#: Longest ping interval in seconds to accept, because a lost rank must be forgotten at some time.
_MAX_INTERVAL_S = 3600.0
#: Seconds to keep a socket for an answer to a rank that is not registered.
_STRANGER_SOCKET_S = 2.0
#: Seconds that a bootstrap server may take to answer, as in SGLang.
_REGISTER_TIMEOUT_S = 5.0


class DecodeRanks:
    """The decode ranks of one prefill rank."""

    def __init__(
        self,
        rooms: RoomTable,
        registered: dict[str, KVArgsRegisterInfo],
        writer: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``registered``: SGLang's ``decode_kv_args_table``; ``writer``: this rank's number among
        those that write for one decode rank."""
        self._rooms = rooms
        self._registered = registered
        self._writer = writer
        self._clock = clock
        #: Sockets to decode ranks. Backends send messages of their own over them too.
        self.sockets = wire.PeerSockets(clock)
        #: Sockets for answers to ranks that are not registered. Closed soon, because a message can
        #: name any address, and ZeroMQ would try to connect there for ever.
        self._strangers = wire.PeerSockets(clock)
        #: Callback that answers the client when decode computes the request. Set only on the rank
        #: that talks to the tokenizer.
        self.on_computed: Callable[[int], None] = lambda room: None
        #: Name of each rank that pings -> time at which it counts as silent, and its registration.
        self._heard: dict[str, tuple[float, KVArgsRegisterInfo]] = {}
        #: Addresses of the ranks that the last tick found silent.
        self._gone: list[tuple[str, int]] = []
        self._timeout_s = environment.PEER_TIMEOUT.read()

    # ---- to decode ranks ----

    def tell(self, room: int, reason: str, announcements: list[Announcement]) -> None:
        """Notify decode ranks that no write to pages of ``room`` is or will be under way."""
        for info in announcements:
            self._send(info, wire.Stopped(room, self._writer, reason), self.sockets)

    def refuse_stranger(self, info: Announcement) -> None:
        """Tell a decode rank that announced a room without a registration to connect again."""
        self._send(
            info,
            wire.Stopped(
                info.room,
                self._writer,
                "the decode rank is not registered at this prefill rank (was prefill restarted?)",
                unknown_peer=True,
            ),
            self._strangers,
        )

    def _send(self, info: Announcement, message: wire.Stopped, sockets: wire.PeerSockets) -> None:
        """Send ``message``. Best effort, because the peer also has a deadline of its own."""
        if not info.is_ours or info.gets_nothing:
            return  # a stock peer would not understand; this rank does not write to a dummy
        try:
            sockets.send(info.endpoint, info.dst_port, message)
        except (OSError, ValueError) as error:
            logger.warning(
                "room %s: could not notify decode rank %s:%s that it ended (%s); the rank frees "
                "its pages after SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT. Check the network",
                info.room,
                info.endpoint,
                info.dst_port,
                error,
            )

    # ---- from decode ranks ----

    def take(self, message: wire.Message) -> None:
        """Serve a control message.

        Raises:
            ControlError: the message is not for a prefill rank.
            OSError, ValueError: the sender cannot be answered.
        """
        if isinstance(message, wire.Ping):
            info = self._registered.get(message.peer)
            if info is not None:
                missed_s = _MAX_MISSED_PINGS * min(message.interval_s, _MAX_INTERVAL_S)
                silence_s = max(self._timeout_s, missed_s)
                self._heard[message.peer] = self._clock() + silence_s, info
            self._answer(message, info, wire.Pong(message.to, info is not None))
        elif isinstance(message, wire.Withdraw):
            self._withdraw(message)
        elif isinstance(message, wire.ComputedByDecode):
            self.on_computed(message.room)
        else:
            raise wire.ControlError(f"a {type(message).__name__} is not for a prefill rank")

    def _answer(
        self,
        asked: wire.Ping | wire.Withdraw,
        info: KVArgsRegisterInfo | None,
        answer: wire.Message,
    ) -> None:
        """Answer a registered rank where it registered, and another one where it says it is."""
        if info is None:
            self._strangers.send(asked.host, asked.port, answer)
        else:
            self.sockets.send(info.endpoint, int(info.dst_port), answer)

    def _withdraw(self, message: wire.Withdraw) -> None:
        number, text = message.room, f"decode cancelled it: {message.reason}"
        room, info = self._rooms.room(number), self._registered.get(message.peer)
        is_peer = room is not None and message.peer in room.announcements
        # Send no answer of its own to a peer of the room, because it is notified once with the
        # others: a second message could meet a new request of that number. The answer for a
        # complete room is the completion.
        is_told = room is not None and room.reason is None and is_peer
        # Accept it from a rank that has not announced the room, because it may be about to.
        is_its_own = is_peer or (info is not None and (room is None or not room.is_announced))
        if is_its_own:
            self._rooms.withdraw(number, text)
        else:
            text = f"room {number}: decode rank {message.peer} is not one of its peers"
        # Answer if the room ended before or is unknown: no write is under way.
        is_written = is_its_own and room is not None and room.state in UNDER_WAY
        if message.wants_answer and not is_told and not is_written:
            self._answer(message, info, wire.Stopped(number, self._writer, text))

    # ---- liveness ----

    def tick(self) -> list[str]:
        """Return decode ranks to drop: they missed their pings (their rooms fail), or they are too
        many, never ping and have no rooms. Called about once a second by the reader thread."""
        self._rooms.tick()
        now = self._clock()
        # Drop the sockets of ranks that were silent at the last tick: a rank that lives has its
        # messages by now, and to a lost one ZeroMQ would try to connect for ever.
        for where in self._gone:
            self.sockets.drop(*where)
        # Sockets may be opened again, for a write to such a rank that settles much later.
        self.sockets.drop_unused(self._timeout_s)
        self._strangers.drop_unused(_STRANGER_SOCKET_S)
        heard = list(self._heard.items())
        silent = {peer: self._heard.pop(peer)[1] for peer, (until, _) in heard if now >= until}
        self._gone = [(info.endpoint, int(info.dst_port)) for info in silent.values()]
        # Compare registrations, because over Mooncake another process may have the same name now.
        lost = [peer for peer, info in silent.items() if self._registered.get(peer, info) == info]
        for peer in lost:
            for room in self._rooms.all():
                if peer in room.announcements:
                    text = f"decode rank {peer} was silent for {self._timeout_s} s or longer"
                    self._rooms.fail(room, Reason.PEER_LOST, text)
        registered, announced = list(self._registered), self._rooms.last_announced
        for peer in announced.keys() - registered:
            del announced[peer]
        excess = len(registered) - _MAX_REGISTERED
        if excess <= 0:
            return lost
        in_use = set(self._heard).union(*(room.announcements for room in self._rooms.all()))
        unused = [peer for peer in registered if peer not in in_use]
        return lost + sorted(unused, key=lambda peer: announced.get(peer, 0.0))[:excess]


class ServedRooms:
    """Registers at the bootstrap server which data-parallel rank serves a room, for decode.

    Needed if ranks are chosen by load (``--load-balance-method``) and not by the room's number, the
    default on prefill servers. SGLang's own method runs on the scheduler's thread, which stalls for
    up to 5 s if the address that the client has named does not answer; runs on each tensor-parallel
    rank; and registers rank 0 without data-parallel attention.
    """

    def __init__(self, rank: RankView, args: ServerArgs) -> None:
        self._rank = rank
        self._args = args
        self.pool = AddressPool("pd-served-rooms")

    def tell(self, address: str, room: int) -> None:
        """Register at the bootstrap server ``address`` (host:port) that this rank serves ``room``.
        Never waits. Only the first rank of a data-parallel group does so."""
        if self._rank.writer_id == 0:
            served = {"bootstrap_room": room, "dp_rank": self._rank.dp_rank}
            url = f"http://{address}/register_dp_rank"
            told = self.pool.submit(
                address, partial(requests.post, url, json=served, timeout=_REGISTER_TIMEOUT_S)
            )
            told.add_done_callback(partial(self._log, address, room))

    def _log(self, address: str, room: int, told: Future[requests.Response]) -> None:
        try:
            told.result().raise_for_status()
        except Exception as error:  # of any class, because the client names the address
            logger.error(
                "room %d: could not register at bootstrap server %s that data-parallel rank %d "
                "serves it (%s): the decode server waits for it until its deadline. Check the "
                "address that the router sends",
                room,
                address,
                self._rank.dp_rank,
                error,
            )

    def why_not_found(self, room: int) -> str:
        """Return a likely reason why no decode rank announces ``room``, as the end of a sentence;
        empty if a decode server finds this rank by the room's number."""
        args, ours = self._args, self._rank.dp_rank
        follows = args.dp_size > 1 and args.load_balance_method == "follow_bootstrap_room"
        expected = room % args.dp_size if follows else ours
        if expected == ours:
            return ""
        return (
            f"; this is data-parallel rank {ours}, and without disagg_prefill_dp_rank decode "
            f"looks for the room on rank {expected}, which follows from its number: check that the "
            "router sends it"
        )

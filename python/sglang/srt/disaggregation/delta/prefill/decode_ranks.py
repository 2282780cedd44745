"""The decode ranks that a prefill rank knows: messages from and to them, whether they live, and
where they find this rank (``ServedRooms``).

Those of servers with the radix cache ping. Others (stock ones too) say nothing when they end, and a
restarted one registers under a new name. So the table is bounded: of those that neither ping nor
have rooms, the ones that announced nothing for longest are forgotten, with their pools' addresses,
NIXL's connection and prepared lists.
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

#: Decode ranks that are registered at most.
_MOST_REGISTERED = 4096
#: Pings in a row that a rank may miss: how often it pings is decode's setting.
_MISSED_PINGS = 3
#: Longest interval in seconds that is believed, so that a rank that is gone is forgotten.
_MAX_INTERVAL_S = 3600.0
#: How long an answer to a rank that is not registered may take to be sent.
_STRANGER_S = 2.0
#: How long a bootstrap server may take to answer; SGLang's.
_TELL_S = 5.0


class DecodeRanks:
    """One for each prefill rank. Used by the thread that reads messages; ``tell`` by any."""

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
        #: Also for messages of a backend's own.
        self.sockets = wire.PeerSockets(clock)
        #: For answers to ranks that are not registered. Anybody can name any address: those sockets
        #: are closed soon, so that ZeroMQ does not go on connecting there.
        self._strangers = wire.PeerSockets(clock)
        #: Decode computes the request of this room: has it answered. From most ranks SGLang answers
        #: nobody.
        self.on_computed: Callable[[int], None] = lambda room: None
        #: Name of each rank that pings -> time at which it counts as silent, and its registration.
        self._heard: dict[str, tuple[float, KVArgsRegisterInfo]] = {}
        #: Where those listened that the last tick found gone.
        self._gone: list[tuple[str, int]] = []
        self._timeout_s = environment.PEER_TIMEOUT.read()

    # ---- to decode ranks ----

    def tell(self, room: int, reason: str, announcements: list[Announcement]) -> None:
        """Nothing is written for ``room``, now and later: they may have their pages back."""
        for info in announcements:
            self._send(info, wire.Stopped(room, self._writer, reason), self.sockets)

    def refuse_stranger(self, info: Announcement) -> None:
        """A decode rank that is not registered here announced a room: it must connect again."""
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
        """Best effort: a peer that cannot be told finds out by its own deadline."""
        if not info.is_ours or info.gets_nothing:
            return  # a stock peer would not understand; a dummy's pages are not written from here
        try:
            sockets.send(info.endpoint, info.dst_port, message)
        except (OSError, ValueError) as error:
            logger.warning(
                "could not notify decode rank %s:%s that room %s ended (%s): it frees the room's "
                "pages after its SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
                info.endpoint,
                info.dst_port,
                info.room,
                error,
            )

    # ---- from decode ranks ----

    def take(self, message: wire.Message) -> None:
        """A control message arrived.

        Raises:
            ControlError: it is not one for a prefill rank.
            OSError, ValueError: its sender cannot be answered.
        """
        if isinstance(message, wire.Ping):
            info = self._registered.get(message.peer)
            if info is not None:
                missed_s = _MISSED_PINGS * min(message.interval_s, _MAX_INTERVAL_S)
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
        # Told with the room's other decode ranks, once: a second message could meet a new request
        # of that number. Of a room that is complete the completion itself is the answer.
        is_told = room is not None and room.reason is None and is_peer
        # One that has not announced it may be about to.
        is_its_own = is_peer or (info is not None and (room is None or not room.is_announced))
        if is_its_own:
            self._rooms.withdraw(number, text)
        else:
            text = f"room {number}: decode rank {message.peer} is not one of its peers"
        # It ended before, or nothing is known of it any more: nothing is under way.
        is_written = is_its_own and room is not None and room.state in UNDER_WAY
        if message.wants_answer and not is_told and not is_written:
            self._answer(message, info, wire.Stopped(number, self._writer, text))

    # ---- liveness ----

    def tick(self) -> list[str]:
        """Return decode ranks to drop: they missed their pings (their rooms fail), or they are too
        many, never ping and have no rooms. Called about once a second by the reader thread."""
        self._rooms.tick()
        now = self._clock()
        # Those that the last tick found gone have been told by now, if they are there after all.
        # Kept, ZeroMQ would try to connect to those that are not ten times a second, for ever.
        for where in self._gone:
            self.sockets.drop(*where)
        # A write to one of those may settle much later, and the word of that opens a socket anew.
        self.sockets.drop_unused(self._timeout_s)
        self._strangers.drop_unused(_STRANGER_S)
        heard = list(self._heard.items())
        silent = {peer: self._heard.pop(peer)[1] for peer, (until, _) in heard if now >= until}
        self._gone = [(info.endpoint, int(info.dst_port)) for info in silent.values()]
        # Over Mooncake another process may have registered under the name of one that ended.
        lost = [peer for peer, info in silent.items() if self._registered.get(peer, info) == info]
        for peer in lost:
            for room in self._rooms.all():
                if peer in room.announcements:
                    text = f"decode rank {peer} was silent for {self._timeout_s} s or longer"
                    self._rooms.fail(room, Reason.PEER_LOST, text)
        registered, announced = list(self._registered), self._rooms.last_announced
        for peer in announced.keys() - registered:
            del announced[peer]
        excess = len(registered) - _MOST_REGISTERED
        if excess <= 0:
            return lost
        in_use = set(self._heard).union(*(room.announcements for room in self._rooms.all()))
        unused = [peer for peer in registered if peer not in in_use]
        return lost + sorted(unused, key=lambda peer: announced.get(peer, 0.0))[:excess]


class ServedRooms:
    """Tells the bootstrap server which data-parallel rank serves a room, for decode to ask there.
    One for each prefill rank.

    That is where ranks are chosen by load (``--load-balance-method``), and not by the room's
    number, as SGLang does it for prefill servers by default. SGLang tells it in the scheduler's
    thread, which stands still for up to 5 s where the address that the client has named does not
    answer; each of the tensor-parallel ranks does; and without data-parallel attention all say that
    they are rank 0.
    """

    def __init__(self, rank: RankView, args: ServerArgs) -> None:
        self._rank = rank
        self._args = args
        self.pool = AddressPool("pd-served-rooms")

    def tell(self, address: str, room: int) -> None:
        """This rank serves ``room``: have the bootstrap server at ``address`` (host:port) know it.
        Never waits. A rank that does not speak for its data-parallel group says nothing."""
        if self._rank.writer_id == 0:
            served = {"bootstrap_room": room, "dp_rank": self._rank.dp_rank}
            url = f"http://{address}/register_dp_rank"
            told = self.pool.submit(
                address, partial(requests.post, url, json=served, timeout=_TELL_S)
            )
            told.add_done_callback(partial(self._log, address, room))

    def _log(self, address: str, room: int, told: Future[requests.Response]) -> None:
        try:
            told.result().raise_for_status()
        except Exception as error:  # the address is what the client says
            logger.error(
                "could not notify bootstrap server %s that data-parallel rank %d serves room %d "
                "(%s): the decode server of this request waits for it until its deadline",
                address,
                self._rank.dp_rank,
                room,
                error,
            )

    def why_not_found(self, room: int) -> str:
        """What may be why nobody announces ``room`` here, as the end of a sentence; empty where a
        decode server finds this rank by itself."""
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

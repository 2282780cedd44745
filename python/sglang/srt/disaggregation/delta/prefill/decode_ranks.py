"""The decode ranks that a prefill rank knows: messages from and to them, and whether they live.

Those of servers with the radix cache ping. Others (stock ones too) say nothing when they end, and a
restarted one registers under a new name. So the table is bounded: of those that neither ping nor
have rooms, the ones that announced nothing for longest are forgotten, with their pools' addresses,
NIXL's connection and prepared lists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.room import Announcement
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo  # or Mooncake's

logger = logging.getLogger(__name__)

#: Decode ranks that are registered at most.
_MOST_REGISTERED = 4096
#: How long an answer to a rank that is not registered may take to be sent.
_STRANGER_S = 2.0


class Frontend(Protocol):
    """The way to the process that answers clients."""

    def yielded(self, room: int) -> None:
        """Decode computes the request of ``room``."""


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
        #: Who answers clients; None on a rank from which SGLang answers nobody.
        self.frontend: Frontend | None = None
        #: When each decode rank that pings was last heard of, by the name it registered under, and
        #: what it registered.
        self._heard: dict[str, tuple[float, KVArgsRegisterInfo]] = {}
        #: Where those listened that the last tick found gone.
        self._gone: list[tuple[str, int]] = []
        self._timeout_s = environment.PEER_TIMEOUT.read()

    # ---- to decode ranks ----

    def tell(self, room: int, reason: str, announcements: list[Announcement]) -> None:
        """Nothing is written for ``room``, now and later: they may have their pages back."""
        for info in announcements:
            self._send(info, wire.Stopped(room, self._writer, reason))

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

    def _send(
        self, info: Announcement, message: wire.Stopped, sockets: wire.PeerSockets | None = None
    ) -> None:
        """Best effort: a peer that cannot be told finds out by its own deadline."""
        is_ours = info.delta is not None or info.delta_error is not None
        is_dummy = info.is_dummy() if callable(info.is_dummy) else info.is_dummy
        if not is_ours or is_dummy:
            return  # a stock peer would not understand; a dummy's pages are not written from here
        try:
            (sockets or self.sockets).send(info.endpoint, info.dst_port, message)
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
                self._heard[message.peer] = self._clock(), info
            self._answer(message, info, wire.Pong(message.to, info is not None))
        elif isinstance(message, wire.Withdraw):
            self._withdraw(message)
        elif isinstance(message, wire.ComputedByDecode):
            if self.frontend is not None:
                self.frontend.yielded(message.room)
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
        rooms, room, text = self._rooms, message.room, f"decode cancelled it: {message.reason}"
        # Told with the room's other decode ranks, once: a second message could meet a new request
        # of that number. Of a room that is complete the completion itself is the answer.
        known, info = rooms.room(room), self._registered.get(message.peer)
        is_peer = known is not None and message.peer in known.announcements
        is_told = rooms.stopped(room) is None and is_peer
        # One that has not announced it may be about to.
        is_its_own = is_peer or (info is not None and (known is None or not known.is_announced))
        if is_its_own:
            rooms.fail(room, Reason.ABORTED, text)
        else:
            text = f"room {room}: decode rank {message.peer} is not one of its peers"
        if not message.wants_answer or is_told:
            return
        if not is_its_own or not rooms.is_under_way(room):
            # Nothing is known of its room any more, or it ended before: nothing is under way.
            self._answer(message, info, wire.Stopped(room, self._writer, text))

    # ---- liveness ----

    def tick(self) -> list[str]:
        """Called every second or so by the reader thread. Decode ranks to drop: they used to ping,
        and have not for ``SGLANG_DISAGGREGATION_PEER_TIMEOUT``, so that their rooms fail; or they
        are too many, do not ping and have no rooms."""
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
        lost = [peer for peer, (at, _) in heard if now - at >= self._timeout_s]
        gone = [self._heard.pop(peer)[1] for peer in lost]
        self._gone = [(info.endpoint, int(info.dst_port)) for info in gone]
        for peer in lost:
            for room in self._rooms.numbers(peer):
                self._rooms.fail(
                    room,
                    Reason.PEER_LOST,
                    f"decode rank {peer} was silent for {self._timeout_s} s",
                )
        return lost + self._too_many()

    def _too_many(self) -> list[str]:
        """Registrations beyond what is kept: of those that neither ping nor have rooms, the ones
        that announced nothing for longest."""
        registered, announced = list(self._registered), self._rooms.last_announced
        for peer in announced.keys() - registered:
            del announced[peer]
        excess = len(registered) - _MOST_REGISTERED
        if excess <= 0:
            return []
        in_use = self._heard.keys() | self._rooms.peers()
        unused = [peer for peer in registered if peer not in in_use]
        return sorted(unused, key=lambda peer: announced.get(peer, 0.0))[:excess]

"""The decode ranks that a prefill rank knows: what they ask, what they are told, whether they live.

Those of servers with the radix cache ping. Others (stock ones too) say nothing when they end, and a
restarted one registers under a new name; what a prefill rank keeps of a decode rank (its pools'
addresses, NIXL's connection, prepared lists) would stay for ever. Whether such a rank still exists
shows at the port to which prefill's messages would go: it is probed from a thread of its own.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Protocol

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.room import Announcement
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.manager import DeltaManager

logger = logging.getLogger(__name__)

#: Probes in a row without an answer, over which the whole timeout is spread. Counted, not timed: a
#: prefill process that did not run for a while has not probed.
_PROBES = 4
_CONNECT_S = 1.0
#: How long an answer to a rank that is not registered may take to be sent.
_STRANGER_S = 2.0


class Registered(Protocol):
    """What a decode rank registered: SGLang's ``KVArgsRegisterInfo``, as far as it is used here."""

    endpoint: str
    dst_port: int


class Frontend(Protocol):
    """The way to the process that answers clients."""

    def yielded(self, room: int) -> None:
        """Decode computes the request of ``room``."""


class Probes:
    """Finds ranks that never ping and are gone; ``gone`` is called by the reader thread."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        answers: Callable[[str, int], bool] | None = None,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """``answers``: whether anybody listens at an address; ``start``: runs a round of probes."""
        self._interval_s = timeout_s / _PROBES
        self._clock = clock
        self._answers = answers or _answers
        self._start = start or _in_background
        self._next_at = clock() + self._interval_s
        #: By name, of ranks that have answered: what they registered, and the probes in a row since
        #: then. (NIXL needs no way to that port, so that a rank behind a firewall never answers.)
        self._unanswered: dict[str, tuple[Registered, int]] = {}
        self._results: dict[str, tuple[Registered, bool]] | None = None
        self._is_probing = False

    def gone(self, registered: Mapping[str, Registered], pinging: Container[str]) -> list[str]:
        """Ranks of ``registered`` (by name) at whose port somebody has answered, and nobody for the
        whole timeout; those that ping are not probed. Never waits."""
        results, self._results = self._results, None
        lost = []
        for name, (info, answered) in (results or {}).items():
            known, count = self._unanswered.get(name, (None, 0))
            if registered.get(name) is not info or name in pinging:
                self._unanswered.pop(name, None)
            elif answered:
                self._unanswered[name] = info, 0
            elif known is info:
                self._unanswered[name] = info, count + 1
                if count + 1 >= _PROBES:
                    del self._unanswered[name]
                    lost.append(name)
        for name in self._unanswered.keys() - registered.keys():
            del self._unanswered[name]
        now = self._clock()
        if not self._is_probing and now >= self._next_at:
            self._next_at = now + self._interval_s
            wanted = {name: info for name, info in list(registered.items()) if name not in pinging}
            if wanted:
                self._is_probing = True
                self._start(lambda: self._probe(wanted))
        return lost

    def _probe(self, wanted: dict[str, Registered]) -> None:
        results = {}
        try:
            for name, info in wanted.items():
                results[name] = info, self._answers(info.endpoint, int(info.dst_port))
        except Exception:
            logger.exception("probing decode ranks that do not ping; the next round is as usual")
        self._results, self._is_probing = results, False


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _in_background(probe: Callable[[], None]) -> None:
    threading.Thread(target=probe, name="pd-probes", daemon=True).start()


class DecodeRanks:
    """One for each prefill rank. Used by the thread that reads messages; ``tell`` by any."""

    def __init__(
        self,
        manager: DeltaManager,
        rooms: RoomTable,
        clock: Callable[[], float] = time.monotonic,
        probes: Probes | None = None,
    ) -> None:
        self._manager = manager
        self._rooms = rooms
        self._clock = clock
        self._sockets = wire.PeerSockets(clock)
        #: For answers to ranks that are not registered. Anybody can name any address: those sockets
        #: are closed soon, so that ZeroMQ does not go on connecting there.
        self._strangers = wire.PeerSockets(clock)
        #: Who answers clients; None on a rank from which SGLang answers nobody.
        self.frontend: Frontend | None = None
        #: When each decode rank that pings was last heard of, by the name it registered under, and
        #: what it registered.
        self._heard: dict[str, tuple[float, Registered]] = {}
        #: Where those listened that the last tick found gone.
        self._gone: list[tuple[str, int]] = []
        self._timeout_s = environment.PEER_TIMEOUT.read()
        self._probes = probes or Probes(self._timeout_s, clock)

    # ---- to decode ranks ----

    @property
    def sockets(self) -> wire.PeerSockets:
        """For messages of a backend's own to decode ranks."""
        return self._sockets

    def tell(self, room: int, reason: str, announcements: list[Announcement]) -> None:
        """Nothing is written for ``room``, now and later: they may have their pages back."""
        for info in announcements:
            self._send(info, wire.Stopped(room, self._manager.writer_id, reason))

    def refuse_stranger(self, info: Announcement) -> None:
        """A decode rank that is not registered here announced a room: it must connect again."""
        self._send(
            info,
            wire.Stopped(
                info.room,
                self._manager.writer_id,
                "this prefill rank does not know the decode rank (was it restarted?)",
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
            (sockets or self._sockets).send(info.endpoint, info.dst_port, message)
        except (OSError, ValueError) as error:
            logger.warning(
                "could not tell decode rank %s:%s that room %s ended (%s): it frees the room's "
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
            info = self._manager.decode_kv_args_table.get(message.peer)
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
        self, asked: wire.Ping | wire.Withdraw, info: Registered | None, answer: wire.Message
    ) -> None:
        """Answer a registered rank where it registered, and another one where it says it is."""
        if info is None:
            self._strangers.send(asked.host, asked.port, answer)
        else:
            self._sockets.send(info.endpoint, int(info.dst_port), answer)

    def _withdraw(self, message: wire.Withdraw) -> None:
        rooms, room, text = self._rooms, message.room, f"decode gave it up: {message.reason}"
        # Told with the room's other decode ranks, once: a second message could meet a new request
        # of that number. Of a room that is complete the completion itself is the answer.
        is_peer = room in rooms.numbers(message.peer)
        is_told = rooms.stopped(room) is None and is_peer
        if is_peer or message.peer in self._manager.decode_kv_args_table:
            # One that is not a peer of the room may withdraw it before its announcement is here.
            refused = rooms.one_too_many(room, message.peer)
        else:
            refused = f"room {room}: decode rank {message.peer} is not registered here"
        if refused is None:
            rooms.fail(room, Reason.ABORTED, text)
        if not message.wants_answer or is_told:
            return
        if refused is not None or not rooms.is_under_way(room):
            # Nothing is known of its room any more, or it ended before: nothing is under way.
            answer = wire.Stopped(room, self._manager.writer_id, refused or text)
            self._answer(message, self._manager.decode_kv_args_table.get(message.peer), answer)

    # ---- liveness ----

    def tick(self) -> list[str]:
        """Called every second or so by the reader thread. Decode ranks to drop: they used to ping,
        and have not for ``SGLANG_DISAGGREGATION_PEER_TIMEOUT``, or never did and nobody listens at
        their port for as long; their rooms fail."""
        self._rooms.tick()
        now = self._clock()
        # Those that the last tick found gone have been told by now, if they are there after all.
        # Kept, ZeroMQ would try to connect to those that are not ten times a second, for ever.
        for where in self._gone:
            self._sockets.drop(*where)
        # A write to one of those may settle much later, and the word of that opens a socket anew.
        self._sockets.drop_unused(self._timeout_s)
        self._strangers.drop_unused(_STRANGER_S)
        heard = list(self._heard.items())
        lost = [peer for peer, (at, _) in heard if now - at >= self._timeout_s]
        gone = [self._heard.pop(peer)[1] for peer in lost]
        registered = self._manager.decode_kv_args_table
        for peer in self._probes.gone(registered, self._heard):
            lost.append(peer)
            info = registered.get(peer)  # a worker may just have lost the connection
            if info is not None:
                gone.append(info)
        self._gone = [(info.endpoint, int(info.dst_port)) for info in gone]
        for peer in lost:
            for room in self._rooms.numbers(peer):
                self._rooms.fail(
                    room,
                    Reason.PEER_LOST,
                    f"decode rank {peer} gave no sign in {self._timeout_s} s",
                )
        return lost

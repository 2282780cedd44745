"""Time as a scheduler sees it: it stands still while the scheduler does one long thing.

A prefill rank's side of its rooms: who announced them, who is told when they end early.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.delta import control
from sglang.srt.disaggregation.delta.control import PeerSockets
from sglang.srt.disaggregation.delta.metrics import STATS, Reason
from sglang.srt.disaggregation.delta.prefill.gate import RoomGate
from sglang.srt.disaggregation.delta.prefill.listeners import Listeners
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: What one turn of the scheduler's loop counts at most, seconds. An idle one sleeps no longer.
TURN_S = 1.0


class SchedulerTime:
    """Counts seconds of the scheduler's turns: written by its thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_at = clock()
        self._seconds = 0.0

    def turn(self) -> None:
        """The scheduler has taken the requests that had come to it."""
        now = self._clock()
        self._seconds += min(now - self._turned_at, TURN_S)
        self._turned_at = now

    def seconds(self) -> float:
        """Seconds so far. A turn that is under way does not count yet."""
        return self._seconds


class PrefillRooms:
    """One for each prefill rank. Used by the scheduler, transfer workers and the reader thread."""

    def __init__(
        self,
        manager: Any,
        clock: Callable[[], float] = time.monotonic,
        listeners: Listeners | None = None,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._sockets = PeerSockets()
        #: When each decode rank that pings was last heard of, by the name it registered under.
        self._heard: dict[str, float] = {}
        self._lease_s = max(environment.QUARANTINE_TIMEOUT.read() / 2, 1.0)
        self._claim_s = environment.CLAIM_TIMEOUT.read()
        self._peer_s = environment.PEER_TIMEOUT.read()
        self._listeners = listeners or Listeners(self._peer_s, clock)
        self._ticked_at = clock()
        #: How long an announcement waits for its request: a scheduler that compiles or loads
        #: something takes no requests, and rooms must not be over when it looks again.
        self.scheduler_time = SchedulerTime(clock)
        self.gate = RoomGate(self._tell, clock=self.scheduler_time.seconds)
        #: Told of each room that fails: whoever has chunks of it in a queue drops them.
        self.on_failure: Callable[[int, Reason], None] = lambda room, kind: None

    # ---- a room's life ----

    def fail(self, room: int, kind: Reason, text: str) -> bool:
        """Fail one room: nothing more is posted for it, and its decode ranks are told when what was
        posted has settled. The first failure of a room counts; later ones change nothing. False if
        the room is complete: decode is being told so, and no failure changes that."""
        if not self.gate.bar(room):
            return False
        is_here = self._manager.fail_known(room, text)
        self.gate.stop(room, text)
        # Its request may have come in between, and found the room open.
        if is_here or self._manager.fail_known(room, text):
            STATS.failed(kind)
            log = logger.info if kind is Reason.ABORTED else logger.error
            log("KV transfer of room %s failed: %s", room, text)
        self.on_failure(room, kind)
        return True

    def announce(self, room: int, peer: str, info: Any) -> bool:
        """A decode rank listed its pages. False if they will not be filled, which it is told."""
        reason = self.gate.announce(room, peer, info)
        if reason is None:
            return True
        self._tell(room, reason, [info])
        return False

    def refuse_stranger(self, info: Any) -> None:
        """A decode rank that is not registered here announced a room: it must connect again."""
        self._send(
            info,
            control.Stopped(
                info.room,
                self._manager.writer_id,
                "this prefill rank does not know the decode rank (was it restarted?)",
                unknown_peer=True,
            ),
        )

    def _tell(self, room: int, reason: str, destinations: list[Any]) -> None:
        """Nothing of ``room`` is under way: its decode ranks may have their pages back."""
        self._manager.transfer_infos.pop(room, None)
        for info in destinations:
            self._send(info, control.Stopped(room, self._manager.writer_id, reason))

    def _send(self, info: Any, message: control.Stopped) -> None:
        """Best effort: a peer that cannot be told finds out by its own deadline."""
        is_ours = info.delta is not None or info.delta_error is not None
        is_dummy = info.is_dummy() if callable(info.is_dummy) else info.is_dummy
        if not is_ours or is_dummy:
            return  # a stock peer would not understand; a dummy's pages are not written from here
        try:
            self._sockets.send(info.endpoint, info.dst_port, message)
        except (OSError, ValueError) as error:
            logger.warning(
                "could not tell decode rank %s:%s that room %s ended: %s",
                info.endpoint,
                info.dst_port,
                info.room,
                error,
            )

    # ---- messages from decode ranks ----

    def take(self, message: control.Message) -> None:
        """A control message arrived.

        Raises:
            ControlError: it is not one for a prefill rank.
            OSError, ValueError: its sender cannot be answered.
        """
        manager = self._manager
        if isinstance(message, control.Ping):
            known = message.peer in manager.decode_kv_args_table
            if known:
                self._heard[message.peer] = self._clock()
            self._sockets.send(message.host, message.port, control.Pong(message.to, known))
        elif isinstance(message, control.Withdraw):
            text = f"decode gave it up: {message.reason}"
            # By the gate, once: a second word could meet a new request of that number. Of a room
            # that is complete the completion itself is the answer.
            is_told = self.gate.stopped(message.room) is None and message.room in self.gate.rooms(
                message.peer
            )
            self.fail(message.room, Reason.ABORTED, text)
            if self.gate.stop(message.room, text) and message.wants_answer and not is_told:
                # Nothing is known of the room any more, or it ended before: nothing is under way.
                self._sockets.send(
                    message.host,
                    message.port,
                    control.Stopped(message.room, manager.writer_id, text),
                )
        else:
            raise control.ControlError(f"a {type(message).__name__} is not for a prefill rank")

    # ---- time ----

    def enter(self, room: int) -> bool:
        """Whether a write may be posted now; if so, ``leave`` it once it has settled."""
        self._check_suspension()
        return self.gate.enter(room)

    def leave(self, room: int) -> None:
        """What was posted for ``room`` has settled."""
        self.gate.leave(room)

    def complete(self, room: int) -> bool:
        """Whether decode may be told that ``room`` is complete: see ``RoomGate.complete``."""
        return self.gate.complete(room)

    def take_back(self, room: int) -> None:
        """Decode could not be told: the room may fail after all."""
        self.gate.take_back(room)

    def tick(self) -> list[str]:
        """Called every second or so by the reader thread. Decode ranks to be forgotten: they used
        to ping, and have not for ``SGLANG_DISAGGREGATION_PEER_TIMEOUT``, or never did and nobody
        listens at their port for as long; their rooms fail."""
        self._check_suspension()
        now = self._ticked_at = self._clock()
        for room in self.gate.unclaimed(self._claim_s):
            self.fail(  # its request may just be coming
                room,
                Reason.TIMEOUT,
                f"no request for it reached this prefill rank within {self._claim_s:.0f} s of its "
                f"scheduler's turns (SGLANG_DISAGGREGATION_CLAIM_TIMEOUT)",
            )
        silent = [peer for peer, at in list(self._heard.items()) if now - at >= self._peer_s]
        for peer in silent:
            del self._heard[peer]
        silent += self._listeners.gone(self._manager.decode_kv_args_table, self._heard)
        for peer in silent:
            for room in self.gate.rooms(peer):
                self.fail(
                    room, Reason.PEER_LOST, f"decode rank {peer} gave no sign in {self._peer_s} s"
                )
        return silent

    def _check_suspension(self) -> None:
        """If this process did not run for long, decode may have given its pages to others."""
        gap = self._clock() - self._ticked_at
        if gap < self._lease_s:
            return
        for room in self.gate.rooms():
            if self.gate.destinations(room):
                self.fail(
                    room, Reason.PEER_LOST, f"this prefill process did not run for {gap:.0f} s"
                )

"""The state machine of one transfer worker: pure but for the calls that it makes.

It knows no thread and no clock of its own to wait on: commands go in, ``step(now)`` does what is to
be done now and says how long nothing will be. One thread calls all of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.delta.config import Settings
from sglang.srt.disaggregation.delta.metrics import AsyncTransferStats, Reason
from sglang.srt.disaggregation.delta.prefill import send_queue
from sglang.srt.disaggregation.delta.prefill.send_queue import (
    Deadlines,
    Lanes,
    Parcel,
    Phase,
    Room,
    Shipment,
)
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Backend,
    Chunk,
    Rooms,
    State,
    TransferError,
)

logger = logging.getLogger(__name__)


class Worker:
    """Moves the chunks of the rooms that are sharded to it.

    A parcel (one chunk, one peer) goes: waiting in its peer's lane, posted, over. When all of a
    room are over and the gate says yes, its peers are told that it is complete. A room that ends
    early drops what waits, and is quiet when what was posted has settled; its peers are never told
    that it is complete, whatever still lands.
    """

    def __init__(
        self,
        backend: Backend,
        rooms: Rooms,
        settings: Settings,
        stats: AsyncTransferStats,
        index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``index`` names the worker in the statistics. ``clock`` measures posts; it and the
        ``now`` of ``step`` and the chunks' times are one clock, in seconds."""
        self._backend = backend
        self._table = rooms
        self._stats = stats
        self._index = index
        self._clock = clock
        self._rooms: dict[int, Room] = {}
        self._lanes = Lanes(settings.window, settings.quota)
        self._doubt_s = settings.doubt_s
        self._deadlines: Deadlines[Shipment] = Deadlines()
        #: Parcels with handles under way, in the order of posting; looked at when they are due.
        self._flying: dict[Parcel, None] = {}
        self._graveyard = send_queue.Graveyard(settings.graveyard)
        #: Posted parcels that are not over by room number, over all lives of the number: what the
        #: gate counts.
        self._under_way: Counter[int] = Counter()
        self._stopped = False

    # ---- commands ----

    def open(self, number: int) -> None:
        """A request begins; until then, and after ``forget``, its room is unknown here."""
        room = self._rooms.get(number)
        if self._stopped or (room is not None and not room.ended):
            return
        if room is not None:
            room.forgotten = True  # its number is used again
        self._rooms[number] = Room(number)

    def submit(self, chunk: Chunk) -> None:
        """Queue it. A chunk of a room that is unknown or has ended is dropped without a word."""
        room = self._rooms.get(chunk.room)
        if room is None or room.ended:
            return
        shipment = Shipment(chunk, room)
        shipment.parcels = [Parcel(shipment, peer) for peer in chunk.peers]
        room.shipments.append(shipment)
        self._deadlines.add(chunk.deadline, shipment)
        for parcel in shipment.parcels:
            self._lanes.add(parcel)
        self._complete(room)
        self._deliver(room)

    def cancel(self, number: int, reason: Reason) -> None:
        """End the room, for a reason that the caller has already told whoever must know."""
        room = self._rooms.get(number)
        if room is not None and not room.ended:
            self._stats.failed(reason)
            self._end(room)

    def forget(self, number: int) -> None:
        """The request is done with: nothing of it is told any more. What is under way is still
        waited for, released, and reported to the gate."""
        room = self._rooms.pop(number, None)
        if room is not None:
            room.forgotten = True
            self._end(room)

    def stop(self) -> None:
        """Take nothing in any more, and end every room. What is under way is still waited for."""
        self._stopped = True
        for room in list(self._rooms.values()):
            text = f"room {room.number}: the transfer workers of this server are stopping"
            self._fail(room, Reason.ABORTED, text)

    def give_up(self) -> int:
        """Wait for nothing any more; how many transfers that leaves under way, never released."""
        for parcel in self._flying:
            send_queue.keep(parcel)
        left = len(self._flying)
        self._flying.clear()
        return left

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._flying)

    def tables(self) -> dict[str, int]:
        """The size of everything that is kept here; all zero when every room was forgotten and
        everything has settled."""
        return {
            "rooms": len(self._rooms),
            "waiting": self._lanes.waiting,
            "in_window": self._lanes.in_window,
            "peers": self._lanes.peers,
            "deadlines": len(self._deadlines),
            "flying": len(self._flying),
            "graveyard": len(self._graveyard),
            "under_way": len(self._under_way),
        }

    # ---- time ----

    def step(self, now: float) -> float | None:
        """Do what is due, and post at most one parcel. For how many seconds nothing is to be done
        unless a command comes; None: for ever."""
        for parcel in [parcel for parcel in self._flying if parcel.look_at <= now]:
            self._contain(parcel.shipment, self._look, parcel, now)
        for shipment in self._deadlines.passed(now):
            self._contain(shipment, self._expire, shipment, now)
        chosen = self._lanes.take()
        if chosen is not None:
            self._contain(chosen.shipment, self._post, chosen, now)
        self._stats.level(
            self._index, self._lanes.waiting, self._lanes.in_window, len(self._graveyard)
        )
        if chosen is not None:
            return 0.0  # commands first: the next post may be one that was just cancelled
        times = [parcel.look_at for parcel in self._flying]
        due = self._deadlines.next_at()
        if due is not None:
            times.append(due)
        return max(0.0, min(times) - now) if times else None

    # ---- a parcel's way ----

    def _post(self, parcel: Parcel, now: float) -> None:
        room, shipment = parcel.room, parcel.shipment
        parcel.phase = Phase.POSTED  # it is out of its lane: the end of the room must not drop it
        if not self._enter(room):
            parcel.phase = Phase.OVER
            self._lanes.finish(parcel)
            shipment.parcels.remove(parcel)
            self._tidy(shipment)
            self._end(room)
            return
        room.posted += 1
        self._under_way[room.number] += 1
        self._stats.queued(now - parcel.chunk.enqueued_at)
        self._flying[parcel] = None
        failure: Exception | None = None
        try:
            for handle in self._backend.post(parcel.chunk, parcel.peer):
                parcel.handles.append(handle)
        except Exception as error:  # bindings raise what they like
            failure = error
        parcel.open = list(parcel.handles)
        parcel.posted_at = self._clock()
        parcel.look_at = send_queue.next_look(parcel.posted_at, 0.0)
        if failure is not None:
            self._fail_transfer(parcel, "could not be posted", failure)
        if not parcel.open:
            self._settled(parcel, parcel.posted_at)

    def _look(self, parcel: Parcel, now: float) -> None:
        still, was_broken, failure = [], False, None
        for handle in parcel.open:
            try:
                state = self._backend.state(handle)
            except Exception as error:
                state, failure = State.ERROR, error
            if state is State.IN_PROGRESS:
                still.append(handle)
            elif state is not State.DONE:
                was_broken = True
        parcel.open = still
        if was_broken:
            # What was sent of it may still be on its way. It counts as under way for as long as
            # decode would hold its pages without a word, and nobody is told anything before that.
            parcel.settles_at = now + self._doubt_s
            self._fail_transfer(parcel, "was broken off by the transport", failure)
        if still:
            parcel.look_at = send_queue.next_look(now, now - parcel.posted_at, parcel.buried)
        elif now < parcel.settles_at:
            parcel.look_at = parcel.settles_at
            self._bury(parcel)
            self._say_if_overdue(parcel.room)
        else:
            self._settled(parcel, now)

    def _settled(self, parcel: Parcel, now: float) -> None:
        """All its handles are over."""
        room, shipment = parcel.room, parcel.shipment
        del self._flying[parcel]
        moved = bool(parcel.handles) and not parcel.settles_at
        if moved and not room.ended:
            self._stats.settled(now - parcel.posted_at)
        for handle in parcel.handles:
            try:
                self._backend.release(handle)
            except Exception:
                logger.exception("room %d: releasing a transfer", room.number)
        parcel.phase = Phase.OVER
        parcel.handles = []
        room.posted -= 1
        room.buried -= parcel.buried
        self._graveyard.discard(parcel)
        self._lanes.finish(parcel, delivered=moved)
        shipment.parcels.remove(parcel)
        self._complete(room)
        self._under_way[room.number] -= 1
        if not self._under_way[room.number]:
            del self._under_way[room.number]
            self._call(self._table.leave, room.number)
        if room.ended:
            self._tidy(shipment)
            self._say_if_overdue(room)
        else:
            self._deliver(room)

    def _expire(self, shipment: Shipment, now: float) -> None:
        chunk, room = shipment.chunk, shipment.room
        late = ", ".join(f"{parcel.peer} ({parcel.phase.value})" for parcel in shipment.parcels)
        self._fail(
            room,
            Reason.TIMEOUT,
            f"room {room.number}: a chunk was not delivered to {late} within "
            f"{now - chunk.enqueued_at:.1f} s (SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT)",
        )
        for parcel in shipment.parcels:  # only those under way are left
            if not parcel.open:
                continue  # broken off: it has a time of its own
            parcel.look_at = send_queue.next_look(now, now - parcel.posted_at, buried=True)
            self._bury(parcel)
            given_up = self._graveyard.add(parcel)
            if given_up is not None:
                self._give_up(given_up)
        self._say_if_overdue(room)

    def _bury(self, parcel: Parcel) -> None:
        """Its room, which has failed, does not wait for it any more."""
        if not parcel.buried:
            self._lanes.bury(parcel)
            parcel.buried = True
            parcel.room.buried += 1

    def _give_up(self, parcel: Parcel) -> None:
        """Never look at it again. Nobody is told that it is quiet, and its handles are kept."""
        send_queue.keep(parcel)
        self._flying.pop(parcel, None)
        self._lanes.finish(parcel)

    def _contain(self, shipment: Shipment, do: Callable[..., None], *arguments: Any) -> None:
        """Whatever a bug raises here costs the shipment's room, and no other one."""
        try:
            do(*arguments)
        except Exception as error:
            room = shipment.room
            logger.exception("transfer worker %d, room %d: a bug", self._index, room.number)
            text = f"room {room.number}: a bug in transfer worker {self._index}: {error!r}"
            self._fail(room, Reason.INTERNAL, text, error)
            for parcel in list(shipment.parcels):
                if parcel.phase is Phase.POSTED:
                    self._bury(parcel)
                    self._graveyard.discard(parcel)
                    self._give_up(parcel)
            self._deadlines.discard(shipment)
            self._say_if_overdue(room)

    # ---- a room's way ----

    def _enter(self, room: Room) -> bool:
        """Ask the gate. What it raises fails the room."""
        try:
            return self._table.enter(room.number)
        except Exception as error:
            self._fail(room, Reason.TRANSPORT, f"room {room.number}: {error!r}", error)
            return False

    def _complete(self, room: Room) -> None:
        """When everything of the room has landed, tell its peers: unless it was given up before,
        and then never."""
        if room.ended or room.completed or not room.has_landed:
            return
        chunk = room.shipments[-1].chunk
        try:
            room.completed = self._table.complete(room.number)
        except Exception as error:
            self._fail(room, Reason.TRANSPORT, f"room {room.number}: {error!r}", error)
            return
        if not room.completed:
            self._end(room)
            return
        try:
            self._backend.complete(chunk)
        except Exception as error:
            self._call(self._table.take_back, room.number)
            peers = ", ".join(chunk.peers)
            text = f"room {room.number}: {peers} could not be told that it is complete"
            self._fail_because(room, text, error)

    def _deliver(self, room: Room) -> None:
        """Report the chunks at the head of the room that are with all their peers."""
        while room.shipments and not room.shipments[0].parcels and not room.ended:
            shipment = room.shipments.popleft()
            self._deadlines.discard(shipment)
            self._tell(room, self._table.chunk_done, shipment.chunk)
            if shipment.chunk.is_last:
                self._end(room)

    def _fail_transfer(self, parcel: Parcel, what: str, error: Exception | None) -> None:
        text = f"room {parcel.room.number}: a transfer to {parcel.peer} {what}"
        self._fail_because(parcel.room, text, error)

    def _fail_because(self, room: Room, text: str, error: Exception | None) -> None:
        reason = error.reason if isinstance(error, TransferError) else Reason.TRANSPORT
        if error is not None:
            text += f": {error if isinstance(error, TransferError) else repr(error)}"
        self._fail(room, reason, text, error)

    def _fail(self, room: Room, reason: Reason, text: str, error: Exception | None = None) -> None:
        """End the room and say why, unless it has ended: the first cause counts."""
        if room.ended:
            return
        self._stats.failed(reason)
        self._tell(room, self._table.room_failed, room.number, reason, text, error)
        self._end(room)

    def _end(self, room: Room) -> None:
        """Drop what waits; what is under way is waited for."""
        if room.ended:
            return
        room.ended = True
        for shipment in room.shipments:
            for parcel in list(shipment.parcels):
                if parcel.phase is Phase.WAITING:
                    self._lanes.drop(parcel)
                    parcel.phase = Phase.OVER
                    shipment.parcels.remove(parcel)
            self._tidy(shipment)
        room.shipments.clear()
        self._say_if_overdue(room)

    def _tidy(self, shipment: Shipment) -> None:
        if not shipment.parcels:
            self._deadlines.discard(shipment)

    def _say_if_overdue(self, room: Room) -> None:
        if room.posted and room.buried == room.posted and not room.said_overdue:
            room.said_overdue = True
            self._tell(room, self._table.room_overdue, room.number)

    # ---- calls to others ----

    def _tell(self, room: Room, callback: Callable[..., None], *arguments: Any) -> None:
        if not room.forgotten:
            self._call(callback, *arguments)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Whatever it raises must not keep the worker from other rooms."""
        try:
            callback(*arguments)
        except Exception:
            logger.exception("transfer worker %d", self._index)

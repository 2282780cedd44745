"""One transfer worker: what it posts next, when it polls, and how a room ends on it.

A *transfer* is one chunk to one peer: it waits in its peer's queue, is posted, and is over when all
its handles are. When all transfers of a room are over and the room table agrees, its peers are
notified that it is complete. A room that ends early drops what waits, and its peers are never
notified of completion, whatever still lands.

Contract: one thread makes all calls, so there is no lock. Commands (``open`` to ``stop``) come
between steps. ``step(now)`` does what is due and never waits; the caller waits. Backend and room
table may raise: the exception costs its own room and no other one.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any  # Any: handles are the backend's own

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, TransferGauges
from sglang.srt.disaggregation.delta.prefill.rooms import Room, RoomTable
from sglang.srt.disaggregation.delta.prefill.send_queue import (
    RoomTransfers,
    SendQueue,
    Transfer,
    next_poll,
)
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Backend,
    Chunk,
    TransferError,
    TransferSettings,
    TransferState,
)

logger = logging.getLogger(__name__)

#: Tolerated number of stale deadline entries before compaction.
_MAX_STALE_DEADLINES = 64


class Worker:
    """Moves the chunks of the rooms that are sharded to it."""

    def __init__(
        self,
        backend: Backend,
        rooms: RoomTable,
        settings: TransferSettings,
        gauges: TransferGauges,
        index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``index`` names the worker in statistics and log lines. ``clock`` measures posts; ``now``
        of ``step`` and the times of chunks are of the same clock, in seconds."""
        self._backend = backend
        self._table = rooms
        self._gauges = gauges
        self._index = index
        self._clock = clock
        self._rooms: dict[int, RoomTransfers] = {}
        self._queue = SendQueue(settings.window, settings.quota)
        self._doubt_s = settings.doubt_s
        #: Deadlines of transfers. Those of finished ones stay until they get to the front, or until
        #: compaction.
        self._deadlines: list[tuple[float, int, Transfer]] = []
        self._count = itertools.count()
        #: Transfers with handles under way, in the order of posting; polled when they are due.
        self._posted: dict[Transfer, None] = {}
        #: Handles kept alive after an internal error, because some bindings release in the
        #: destructor.
        self._never_released: list[Any] = []
        self._stopped = False

    # ---- commands ----

    def open(self, room: Room) -> None:
        """Accept chunks of ``room`` from now on, until ``forget``."""
        if not self._stopped:
            self._rooms[room.number] = RoomTransfers(room)

    def submit(self, chunk: Chunk) -> None:
        """Queue ``chunk``, or drop it silently if its room is unknown or has ended."""
        room = self._rooms.get(chunk.room)
        if room is None or room.ended:
            return
        if chunk.is_last:
            room.last = chunk
        for peer in chunk.peers:
            transfer = Transfer(chunk, peer, room)
            room.transfers[transfer] = None
            heapq.heappush(self._deadlines, (chunk.deadline, next(self._count), transfer))
            self._queue.add(transfer)
        limit = 2 * (self._queue.waiting + len(self._posted)) + _MAX_STALE_DEADLINES
        if len(self._deadlines) > limit:
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_live]
            heapq.heapify(self._deadlines)
        self._complete(room)
        self._deliver(room)

    def cancel(self, room: Room) -> None:
        """End this room (not a later one with the same number). The caller has already reported
        the reason."""
        known = self._rooms.get(room.number)
        if known is not None and known.room is room:
            self._end(known)

    def forget(self, room: Room) -> None:
        """End this room, whose request is done. Only ``leave`` follows, when nothing is under
        way."""
        self.cancel(room)
        known = self._rooms.get(room.number)
        if known is not None and known.room is room:
            del self._rooms[room.number]

    def stop(self) -> None:
        """Accept nothing more, and end every room. What is under way is still waited for."""
        self._stopped = True
        for room in list(self._rooms.values()):
            self._fail(room, Reason.ABORTED, "the transfer workers of this server are stopping")

    @property
    def busy(self) -> int:
        """Number of transfers under way. They cannot be taken back, and their handles are here:
        some bindings release in the destructor."""
        return len(self._posted)

    def tables(self) -> dict[str, int]:
        """Return the sizes of all tables: zero when every room was forgotten and has settled."""
        return {
            "rooms": len(self._rooms),
            "waiting": self._queue.waiting,
            "in_window": self._queue.in_window,
            "peers": len(self._queue),
            "deadlines": sum(transfer.is_live for _, _, transfer in self._deadlines),
            "posted": len(self._posted),
            "overdue": len(self._posted) - self._queue.in_window,
        }

    # ---- time ----

    def step(self, now: float) -> float | None:
        """Do what is due, and post at most one transfer. Return the seconds until something is due,
        or None if only a command can bring work."""
        for transfer in [transfer for transfer in self._posted if transfer.poll_at <= now]:
            self._contain(self._poll, transfer, now)
        due = self._deadlines
        while due and (due[0][0] <= now or not due[0][2].is_live):
            _, _, transfer = heapq.heappop(due)
            if transfer.is_live:
                self._contain(self._expire, transfer, now)
        chosen = self._queue.take()
        if chosen is not None:
            self._contain(self._post, chosen, now)
        waiting, in_flight = self._queue.waiting, self._queue.in_window
        self._gauges.level(self._index, waiting, in_flight, len(self._posted) - in_flight)
        if chosen is not None:
            return 0.0  # commands first: the next post may be one that was just cancelled
        times = [transfer.poll_at for transfer in self._posted]
        if due:
            times.append(due[0][0])
        return max(0.0, min(times) - now) if times else None

    # ---- a transfer's way ----

    def _post(self, transfer: Transfer, now: float) -> None:
        room, chunk = transfer.room, transfer.chunk
        transfer.is_posted = True  # otherwise the end of the room drops it from the queue again
        if not self._may(self._table.enter, room):
            self._queue.finish(transfer)
            del room.transfers[transfer]
            self._end(room)
            return
        room.posted += 1
        STATS.observe("kv_transfer_queue_seconds", now - chunk.enqueued_at)
        self._posted[transfer] = None
        failure: Exception | None = None
        try:
            for handle in self._backend.post(chunk, transfer.peer):
                transfer.handles.append(handle)
        except Exception as error:  # bindings raise exceptions of any class
            failure = error
        transfer.open = list(transfer.handles)
        transfer.posted_at = self._clock()
        transfer.poll_at = next_poll(transfer.posted_at, 0.0)
        if failure is not None:
            text = f"a transfer to {transfer.peer} could not be posted"
            self._fail_because(room, text, failure)
        if not transfer.open:
            self._settled(transfer, transfer.posted_at)

    def _poll(self, transfer: Transfer, now: float) -> None:
        still, was_broken, failure = [], False, None
        for handle in transfer.open:
            try:
                state = self._backend.state(handle)
            except Exception as error:
                was_never_begun = _reason_of(error) is not Reason.TRANSPORT
                state = TransferState.DROPPED if was_never_begun else TransferState.ERROR
                failure = failure or error
            if state is TransferState.IN_PROGRESS:
                still.append(handle)
            elif state is TransferState.DROPPED:
                transfer.is_dropped = True
            elif state is not TransferState.DONE:
                was_broken = True
        transfer.open = still
        if was_broken:
            # Keep it under way for the quarantine timeout, because bytes that were sent may still
            # land. Decode is not notified before then.
            transfer.settles_at = now + self._doubt_s
        if was_broken or failure is not None:
            text = f"a transfer to {transfer.peer} failed in the transport"
            self._fail_because(transfer.room, text, failure)
        if still:
            age = now - transfer.posted_at
            transfer.poll_at = next_poll(now, age, transfer.is_overdue)
        elif now < transfer.settles_at:
            transfer.poll_at = transfer.settles_at
            self._mark_overdue(transfer)
        else:
            self._settled(transfer, now)

    def _settled(self, transfer: Transfer, now: float) -> None:
        """Release a transfer all of whose handles are over, and do what that allows."""
        room = transfer.room
        del self._posted[transfer]
        moved = bool(transfer.handles) and not transfer.settles_at and not transfer.is_dropped
        if moved and not room.ended:
            STATS.observe("kv_transfer_wire_seconds", now - transfer.posted_at)
        for handle in transfer.handles:
            try:
                self._backend.release(handle)
            except Exception:
                logger.exception(
                    "room %d: a handle of a transfer to %s could not be released; the worker goes "
                    "on", room.room.number, transfer.peer,
                )  # fmt: skip
        room.posted -= 1
        room.overdue -= transfer.is_overdue
        self._queue.finish(transfer, delivered=moved)
        del room.transfers[transfer]
        self._complete(room)
        if not room.posted:
            self._call(self._table.leave, room)
        self._report_if_overdue(room)
        self._deliver(room)

    def _expire(self, transfer: Transfer, now: float) -> None:
        """Fail the room of a transfer that missed its deadline. A posted one is overdue from now
        on, because a write cannot be recalled."""
        chunk, room = transfer.chunk, transfer.room
        late = ", ".join(
            f"{it.peer} ({'posted' if it.is_posted else 'queued'})"
            for it in room.transfers
            if it.chunk is chunk
        )
        self._fail(
            room,
            Reason.TIMEOUT,
            f"a chunk was not delivered to {late} within {now - chunk.enqueued_at:.1f} s "
            f"(SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT)",
        )
        if not transfer.open:
            return  # it was queued and is dropped now, or it is broken and ends at ``settles_at``
        transfer.poll_at = next_poll(now, now - transfer.posted_at, is_overdue=True)
        self._mark_overdue(transfer)
        logger.error(
            "room %d: a transfer to decode rank %s did not settle by its deadline. This server "
            "still waits for it (%d such transfers); decode's pages stay in deferred release "
            "until then, or for its SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
            room.room.number,
            transfer.peer,
            len(self._posted) - self._queue.in_window,
        )

    def _mark_overdue(self, transfer: Transfer) -> None:
        """Count a transfer of a failed room as overdue: the room does not wait for it any more."""
        if not transfer.is_overdue:
            self._queue.mark_overdue(transfer)
            transfer.is_overdue = True
            transfer.room.overdue += 1
        self._report_if_overdue(transfer.room)

    def _contain(
        self, do: Callable[[Transfer, float], None], transfer: Transfer, now: float
    ) -> None:
        """Contain unexpected exceptions: fail only this room. Its table entry is never removed."""
        try:
            do(transfer, now)
        except Exception as error:
            room = transfer.room
            logger.exception(
                "room %d fails: unexpected error in transfer worker %d (bug; please report)",
                room.room.number,
                self._index,
            )
            text = f"unexpected error in transfer worker {self._index}: {error!r}"
            self._fail(room, Reason.INTERNAL, text, error)
            if transfer.is_live:
                self._mark_overdue(transfer)
                self._never_released += transfer.handles
                self._posted.pop(transfer, None)
                self._queue.finish(transfer)
                del room.transfers[transfer]

    # ---- a room's way ----

    def _may(self, step: Callable[[Room], bool], room: RoomTransfers) -> bool:
        """Return what the room table answers. An exception fails the room."""
        try:
            return step(room.room)
        except Exception as error:
            self._fail(room, Reason.TRANSPORT, repr(error), error)
            return False

    def _complete(self, room: RoomTransfers) -> None:
        """Notify the peers of a room when all of it has landed, unless it was given up before."""
        chunk = room.last
        if chunk is None or room.transfers or room.ended or room.is_complete:
            return
        room.is_complete = self._may(self._table.complete, room)
        if not room.is_complete:
            self._end(room)
            return
        try:
            self._backend.complete(chunk)
        except Exception as error:
            self._call(self._table.take_back, room)
            text = f"{', '.join(chunk.peers)} could not be notified that it is complete"
            self._fail_because(room, text, error)

    def _deliver(self, room: RoomTransfers) -> None:
        """End a room whose peers were notified."""
        if room.is_complete and not room.ended:
            self._call(self._table.deliver, room)
            self._end(room)

    def _fail_because(self, room: RoomTransfers, text: str, error: Exception | None) -> None:
        if error is not None:
            text += f": {error if isinstance(error, TransferError) else repr(error)}"
        self._fail(room, _reason_of(error), text, error)

    def _fail(
        self, room: RoomTransfers, reason: Reason, text: str, error: Exception | None = None
    ) -> None:
        """End the room with a reason, unless it has ended: the first cause counts."""
        if not room.ended:
            text = f"room {room.room.number}: {text}"
            self._call(self._table.room_failed, room, reason, text, error)
            self._end(room)

    def _end(self, room: RoomTransfers) -> None:
        """Drop what waits; what is under way is waited for."""
        if room.ended:
            return
        room.ended = True
        for transfer in [transfer for transfer in room.transfers if not transfer.is_posted]:
            self._queue.drop(transfer)
            del room.transfers[transfer]
        self._report_if_overdue(room)

    def _report_if_overdue(self, room: RoomTransfers) -> None:
        if room.ended and room.posted and room.overdue == room.posted:
            self._call(self._table.room_overdue, room)

    def _call(self, callback: Callable[..., None], room: RoomTransfers, *rest: object) -> None:
        """Call the room table. An exception must not keep the worker from other rooms."""
        try:
            callback(room.room, *rest)
        except Exception:
            logger.exception(
                "transfer worker %d: unexpected error in room-table callback %s for room %d",
                self._index,
                getattr(callback, "__name__", callback),
                room.room.number,
            )


def _reason_of(error: Exception | None) -> Reason:
    return error.reason if isinstance(error, TransferError) else Reason.TRANSPORT

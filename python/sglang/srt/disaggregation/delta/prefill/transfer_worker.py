"""The state machine of one transfer worker: pure but for the calls that it makes.

It knows no thread and no clock of its own to wait on: commands go in, ``step(now)`` does what is to
be done now and says how long nothing will be. One thread calls all of it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any  # Any: handles are the backend's own

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, TransferReport
from sglang.srt.disaggregation.delta.prefill import send_queue
from sglang.srt.disaggregation.delta.prefill.rooms import Room, RoomTable
from sglang.srt.disaggregation.delta.prefill.send_queue import (
    ChunkSend,
    RoomQueue,
    SendQueue,
    Transfer,
)
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Backend,
    Chunk,
    TransferError,
    TransferSettings,
    TransferState,
)

logger = logging.getLogger(__name__)

#: Chunks that are over are let lie among the deadlines up to so many more than the others.
_SLACK = 64


class Worker:
    """Moves the chunks of the rooms that are sharded to it.

    A transfer (one chunk, one peer) waits in its peer's queue, is posted, is over. When all of a
    room are over and the room table says yes, its peers are notified that it is complete. A room
    that ends early drops what waits; its peers are never told that, whatever still lands.
    """

    def __init__(
        self,
        backend: Backend,
        rooms: RoomTable,
        settings: TransferSettings,
        report: TransferReport,
        index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``index`` names the worker in the statistics. ``clock`` measures posts; it and the
        ``now`` of ``step`` and the chunks' times are one clock, in seconds."""
        self._backend = backend
        self._table = rooms
        self._report = report
        self._index = index
        self._clock = clock
        self._rooms: dict[int, RoomQueue] = {}
        self._queue = SendQueue(settings.window, settings.quota)
        self._doubt_s = settings.doubt_s
        #: When chunks are due; those that are over stay until they get to the front, or are many.
        self._deadlines: list[tuple[float, int, ChunkSend]] = []
        self._count = itertools.count()
        #: Transfers with handles under way, in the order of posting; polled when they are due.
        self._posted: dict[Transfer, None] = {}
        #: Handles of transfers at which a bug raised: some bindings release in the destructor.
        self._never_released: list[Any] = []
        self._stopped = False

    # ---- commands ----

    def open(self, room: Room) -> None:
        """A request begins; until then, and after ``forget``, its room is unknown here."""
        if not self._stopped:
            self._rooms[room.number] = RoomQueue(room)

    def submit(self, chunk: Chunk) -> None:
        """Queue it. A chunk of a room that is unknown or has ended is dropped silently."""
        room = self._rooms.get(chunk.room)
        if room is None or room.ended:
            return
        send = ChunkSend(chunk, room)
        send.transfers = [Transfer(send, peer) for peer in chunk.peers]
        room.sends.append(send)
        heapq.heappush(self._deadlines, (chunk.deadline, next(self._count), send))
        for transfer in send.transfers:
            self._queue.add(transfer)
        if len(self._deadlines) > 2 * (self._queue.waiting + len(self._posted)) + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].transfers]
            heapq.heapify(self._deadlines)
        self._complete(room)
        self._deliver(room)

    def cancel(self, room: Room) -> None:
        """End the room, and no later one of its number, for a reason that the caller has already
        told whoever must know."""
        queue = self._of(room)
        if queue is not None and not queue.ended:
            self._end(queue)

    def forget(self, room: Room) -> None:
        """The request is done with: the table is notified of nothing more of it but ``leave``, when
        what is under way has settled."""
        queue = self._of(room)
        if queue is not None:
            del self._rooms[room.number]
            self._end(queue)

    def _of(self, room: Room) -> RoomQueue | None:
        queue = self._rooms.get(room.number)
        return queue if queue is not None and queue.room is room else None

    def stop(self) -> None:
        """Take nothing in any more, and end every room. What is under way is still waited for."""
        self._stopped = True
        for room in list(self._rooms.values()):
            self._fail(room, Reason.ABORTED, "the transfer workers of this server are stopping")

    @property
    def busy(self) -> int:
        """How many transfers are under way. They cannot be taken back; this object keeps their
        handles, which some bindings release in the destructor."""
        return len(self._posted)

    def tables(self) -> dict[str, int]:
        """The size of everything that is kept here; all zero when every room was forgotten and
        everything has settled."""
        return {
            "rooms": len(self._rooms),
            "waiting": self._queue.waiting,
            "in_window": self._queue.in_window,
            "peers": len(self._queue),
            "deadlines": sum(bool(send.transfers) for _, _, send in self._deadlines),
            "posted": len(self._posted),
            "overdue": len(self._posted) - self._queue.in_window,
        }

    # ---- time ----

    def step(self, now: float) -> float | None:
        """Do what is due, and post at most one transfer. For how many seconds nothing is to be done
        unless a command comes; None: for ever."""
        for transfer in [transfer for transfer in self._posted if transfer.poll_at <= now]:
            self._contain(transfer.send, self._poll, transfer, now)
        due = self._deadlines
        while due and (due[0][0] <= now or not due[0][2].transfers):
            _, _, send = heapq.heappop(due)
            if send.transfers:
                self._contain(send, self._expire, send, now)
        chosen = self._queue.take()
        if chosen is not None:
            self._contain(chosen.send, self._post, chosen, now)
        waiting, in_flight = self._queue.waiting, self._queue.in_window
        self._report.level(self._index, waiting, in_flight, len(self._posted) - in_flight)
        if chosen is not None:
            return 0.0  # commands first: the next post may be one that was just cancelled
        times = [transfer.poll_at for transfer in self._posted]
        if due:
            times.append(due[0][0])
        return max(0.0, min(times) - now) if times else None

    # ---- a transfer's way ----

    def _post(self, transfer: Transfer, now: float) -> None:
        send = transfer.send
        room = send.room
        transfer.is_posted = True  # the end of the room must not drop it
        if not self._may(self._table.enter, room):
            self._queue.finish(transfer)
            send.transfers.remove(transfer)
            self._end(room)
            return
        room.posted += 1
        STATS.observe("kv_transfer_queue_seconds", now - send.chunk.enqueued_at)
        self._posted[transfer] = None
        failure: Exception | None = None
        try:
            for handle in self._backend.post(send.chunk, transfer.peer):
                transfer.handles.append(handle)
        except Exception as error:  # bindings raise what they like
            failure = error
        transfer.open = list(transfer.handles)
        transfer.posted_at = self._clock()
        transfer.poll_at = send_queue.next_poll(transfer.posted_at, 0.0)
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
                is_refusal = (
                    isinstance(error, TransferError) and error.reason is not Reason.TRANSPORT
                )
                state = TransferState.DROPPED if is_refusal else TransferState.ERROR
                failure = failure or error
            if state is TransferState.IN_PROGRESS:
                still.append(handle)
            elif state is TransferState.DROPPED:
                transfer.is_dropped = True
            elif state is not TransferState.DONE:
                was_broken = True
        transfer.open = still
        if was_broken:
            # What was sent of it may still be on its way. It counts as under way for as long as
            # decode would hold its pages without a word, and nobody is told anything before that.
            transfer.settles_at = now + self._doubt_s
        if was_broken or failure is not None:
            text = f"a transfer to {transfer.peer} failed in the transport"
            self._fail_because(transfer.send.room, text, failure)
        if still:
            age = now - transfer.posted_at
            transfer.poll_at = send_queue.next_poll(now, age, transfer.is_overdue)
        elif now < transfer.settles_at:
            transfer.poll_at = transfer.settles_at
            self._mark_overdue(transfer)
            self._say_if_overdue(transfer.send.room)
        else:
            self._settled(transfer, now)

    def _settled(self, transfer: Transfer, now: float) -> None:
        """All its handles are over."""
        send = transfer.send
        room = send.room
        del self._posted[transfer]
        moved = bool(transfer.handles) and not transfer.settles_at and not transfer.is_dropped
        if moved and not room.ended:
            STATS.observe("kv_transfer_wire_seconds", now - transfer.posted_at)
        for handle in transfer.handles:
            try:
                self._backend.release(handle)
            except Exception:
                logger.exception("room %d: could not release a transfer", room.number)
        room.posted -= 1
        room.overdue -= transfer.is_overdue
        self._queue.finish(transfer, delivered=moved)
        send.transfers.remove(transfer)
        self._complete(room)
        if not room.posted:
            self._call(self._table.leave, room.room)
        self._say_if_overdue(room)
        self._deliver(room)

    def _expire(self, send: ChunkSend, now: float) -> None:
        chunk, room = send.chunk, send.room
        late = ", ".join(
            f"{transfer.peer} ({'posted' if transfer.is_posted else 'queued'})"
            for transfer in send.transfers
        )
        self._fail(
            room,
            Reason.TIMEOUT,
            f"a chunk was not delivered to {late} within {now - chunk.enqueued_at:.1f} s "
            f"(SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT)",
        )
        for transfer in send.transfers:  # only those under way are left
            if not transfer.open:
                continue  # broken off: it has a time of its own
            transfer.poll_at = send_queue.next_poll(now, now - transfer.posted_at, is_overdue=True)
            self._mark_overdue(transfer)
            logger.error(
                "room %d: a transfer to decode rank %s did not settle by its deadline. This server "
                "still waits for it (%d such transfers); decode's pages stay in deferred release "
                "until then, or for its SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
                room.number,
                transfer.peer,
                len(self._posted) - self._queue.in_window,
            )
        self._say_if_overdue(room)

    def _mark_overdue(self, transfer: Transfer) -> None:
        """Its room, which has failed, does not wait for it any more."""
        if not transfer.is_overdue:
            self._queue.mark_overdue(transfer)
            transfer.is_overdue = True
            transfer.send.room.overdue += 1

    def _contain(self, send: ChunkSend, do: Callable[..., None], *arguments: object) -> None:
        """Whatever a bug raises here costs the send's room, which is never left, and no other."""
        try:
            do(*arguments)
        except Exception as error:
            room = send.room
            logger.exception(
                "transfer worker %d: unexpected error, room %d fails", self._index, room.number
            )
            text = f"unexpected error in transfer worker {self._index}: {error!r}"
            self._fail(room, Reason.INTERNAL, text, error)
            for transfer in send.transfers:  # only those under way are left
                self._mark_overdue(transfer)
                self._never_released += transfer.handles
                self._posted.pop(transfer, None)
                self._queue.finish(transfer)
            send.transfers = []
            self._say_if_overdue(room)

    # ---- a room's way ----

    def _may(self, step: Callable[[Room], bool], room: RoomQueue) -> bool:
        """Ask the room table for a step. What it raises fails the room."""
        try:
            return step(room.room)
        except Exception as error:
            self._fail(room, Reason.TRANSPORT, repr(error), error)
            return False

    def _complete(self, room: RoomQueue) -> None:
        """When everything of the room has landed, tell its peers: unless it was given up before,
        and then never."""
        if room.ended or room.completed or not room.sends:
            return
        chunk = room.sends[-1].chunk
        if not chunk.is_last or any(send.transfers for send in room.sends):
            return
        room.completed = self._may(self._table.complete, room)
        if not room.completed:
            self._end(room)
            return
        try:
            self._backend.complete(chunk)
        except Exception as error:
            self._call(self._table.take_back, room.room)
            text = f"{', '.join(chunk.peers)} could not be notified that it is complete"
            self._fail_because(room, text, error)

    def _deliver(self, room: RoomQueue) -> None:
        """Report the chunks at the head of the room that are with all their peers."""
        while room.sends and not room.sends[0].transfers and not room.ended:
            send = room.sends.popleft()
            if send.chunk.is_last:
                self._call(self._table.deliver, room.room)
                self._end(room)

    def _fail_because(self, room: RoomQueue, text: str, error: Exception | None) -> None:
        reason = error.reason if isinstance(error, TransferError) else Reason.TRANSPORT
        if error is not None:
            text += f": {error if isinstance(error, TransferError) else repr(error)}"
        self._fail(room, reason, text, error)

    def _fail(
        self, room: RoomQueue, reason: Reason, text: str, error: Exception | None = None
    ) -> None:
        """End the room and say why, unless it has ended: the first cause counts."""
        if room.ended:
            return
        text = f"room {room.number}: {text}"
        self._call(self._table.room_failed, room.room, reason, text, error)
        self._end(room)

    def _end(self, room: RoomQueue) -> None:
        """Drop what waits; what is under way is waited for."""
        if room.ended:
            return
        room.ended = True
        for send in room.sends:
            for transfer in list(send.transfers):
                if not transfer.is_posted:
                    self._queue.drop(transfer)
                    send.transfers.remove(transfer)
        room.sends.clear()
        self._say_if_overdue(room)

    def _say_if_overdue(self, room: RoomQueue) -> None:
        if room.ended and room.posted and room.overdue == room.posted:
            self._call(self._table.room_overdue, room.room)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """Whatever it raises must not keep the worker from other rooms."""
        try:
            callback(*arguments)
        except Exception:
            logger.exception("transfer worker %d", self._index)

"""The threads of the transfer workers, and what both backends' managers do with them.

The rest of the process calls ``TransferPool``, which only appends to a queue. The threads run under
SCHED_BATCH: waking one never takes the scheduler's core. ``TransferPool.tick`` notices workers that
do not go on, and fails their rooms instead of letting them wait.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any  # Any: payloads are the backend's own

import numpy.typing as npt

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, TransferReport
from sglang.srt.disaggregation.delta.pages import DeltaMismatch
from sglang.srt.disaggregation.delta.prefill.rooms import UNCLAIMED, Room, RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Backend,
    Chunk,
    Settings,
    use_batch_scheduling,
)
from sglang.srt.disaggregation.delta.prefill.transfer_worker import Worker
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    import numpy as np

    from sglang.srt.disaggregation.common.conn import CommonKVManager
else:
    CommonKVManager = object

logger = logging.getLogger(__name__)


#: What a worker is to do; a number ends its thread, after so many seconds for what is under way.
_Command = Callable[[Worker], None] | float

#: A worker whose step raised (a bug: steps catch what they call) goes on after so many seconds.
_AFTER_A_BUG_S = 0.1
#: Join at most so much longer than a worker may drain.
_JOIN_GRACE_S = 2.0
#: A process that ends waits so many seconds for what is under way.
_DRAIN_S = 1.0


class _Thread:
    """One worker with its queue. Only its own thread touches the worker."""

    def __init__(
        self, worker: Worker, name: str, prepare: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._worker = worker
        self._prepare = prepare
        self._clock = clock
        #: To be done in order. To put one wakes the thread; no lock of it is ever held for long.
        self.commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        #: Since when it has something to do and has not finished a step; None while it waits.
        self.busy_since: float | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        use_batch_scheduling()
        try:
            self._prepare()
        except Exception:
            logger.exception("%s: could not prepare the thread; it continues", self.thread.name)
        wait: float | None = None
        while (drain_s := self._obey(wait)) is None:
            wait = self._step()
        self._worker.stop()
        until = self._clock() + drain_s
        while self._worker.busy and (left := until - self._clock()) > 0:
            wait = self._step()
            self._obey(left if wait is None else min(wait, left))
        if self._worker.busy:
            logger.error(
                "%s: ended with %d transfers under way", self.thread.name, self._worker.busy
            )

    def _obey(self, wait: float | None) -> float | None:
        """Wait so long for a command, and do all there are; not None at that to end."""
        try:
            command = self.commands.get(timeout=wait)
            if self.busy_since is None:
                self.busy_since = self._clock()
            while not isinstance(command, float):
                try:
                    command(self._worker)
                except Exception:
                    logger.exception("%s: a command failed", self.thread.name)
                command = self.commands.get_nowait()
            return command
        except queue.Empty:
            return None

    def _step(self) -> float | None:
        now = self._clock()
        if self.busy_since is None:
            self.busy_since = now
        try:
            wait = self._worker.step(now)
        except Exception:
            logger.exception("%s: a step failed", self.thread.name)
            return _AFTER_A_BUG_S
        self.busy_since = None
        return wait


def worker_of(room: int, workers: int) -> int:
    """The worker of ``room``: the same for all its chunks, which is what keeps them in order.

    Room numbers are scattered first. Data parallel attention gives a scheduler only rooms with one
    remainder, and ``room % workers`` would put all of them into one queue.
    """
    # Times the 64-bit golden ratio (Knuth, "The Art of Computer Programming", volume 3, 6.4); the
    # upper bits of the product depend on every bit of the room.
    return (room * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) * workers >> 64


class TransferPool:
    """Moves chunks on its own threads; nothing here waits for a transfer.

    ``open``, ``submit`` and ``forget`` of a room come from one thread (the scheduler's), ``cancel``
    and ``stop`` from any. All of them only append to a queue: they never block, and what they cause
    happens soon after, on the room's worker.
    """

    def __init__(
        self,
        backend: Backend,
        rooms: RoomTable,
        settings: Settings,
        report: TransferReport,
        *,
        prepare_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``prepare_thread`` is called first on every thread: it sets the CUDA device."""
        self.backend = backend
        self._rooms = rooms
        self._settings = settings
        self._clock = clock
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._threads = [
            _Thread(
                Worker(backend, rooms, settings, report, index, clock),
                f"kv-transfer-{index}",
                prepare_thread,
                clock,
            )
            for index in range(settings.queues)
        ]
        #: Workers in trouble at the last tick, by index; in ``_suspected`` for the first time, too.
        self._in_trouble: dict[int, str] = {}
        self._suspected: set[int] = set()

    def start(self) -> None:
        """Start the threads; once."""
        for each in self._threads:
            each.thread.start()

    def open(self, room: Room) -> None:
        """A request of ``room`` begins."""
        self._put(room.number, lambda worker: worker.open(room))

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk of an open room. Dropped if the room has ended."""
        self._put(chunk.room, lambda worker: worker.submit(chunk))

    def cancel(self, room: Room) -> None:
        """End a room that the table has given up: it is not notified. Harmless for one that is not
        open, or has ended."""
        self._put(room.number, lambda worker: worker.cancel(room))

    def forget(self, room: Room) -> None:
        """The request is done with: nothing is kept of its room but what is under way."""
        self._put(room.number, lambda worker: worker.forget(room))

    def stop(self, drain_s: float = 5.0) -> None:
        """End all rooms, wait at most so many seconds for what is under way, and end the threads.

        Idempotent. Returns when the threads have ended, or with an error in the log for those that
        have not. The backend may be torn down after that only if
        ``alive()`` is 0.
        """
        with self._stop_lock:
            if not self._stopped:
                self._stopped = True
                for each in self._threads:
                    each.commands.put(float(drain_s))
            until = time.monotonic() + drain_s + _JOIN_GRACE_S
            for each in self._threads:
                if each.thread.ident is not None:  # it was started
                    each.thread.join(max(0.0, until - time.monotonic()))
        if self.alive():
            logger.error(
                "%d transfer threads have not ended (py-spy dump shows where)", self.alive()
            )

    def troubles(self) -> dict[int, str]:
        """Workers whose rooms cannot wait for them any longer, by index, and what is wrong."""
        if self._stopped:
            return {}
        found, now = {}, self._clock()
        for index, each in enumerate(self._threads):
            name, since = each.thread.name, each.busy_since
            if each.thread.ident is None:
                continue  # not started
            if not each.thread.is_alive():
                found[index] = f"{name} has ended"
            elif since is not None and now - since >= self._settings.stuck_s:
                found[index] = f"{name} has not finished a step for {now - since:.0f} s"
        return found

    def tick(self) -> None:
        """Every second or so, on another thread: fail the rooms of workers in trouble, those that
        came since the last time included.

        A worker that wakes up finds its rooms stopped: it posts nothing more for them,
        and their peers are never told that they are complete. So the scheduler need not wait for
        what it may have under way.

        Once is no proof: where the process did not run, or this thread was kept waiting together
        with the workers, they are late by the clock and go on at once.
        """
        found = self.troubles()
        troubles = {index: text for index, text in found.items() if index in self._suspected}
        self._suspected = set(found)
        for index, text in troubles.items():
            if index not in self._in_trouble:
                STATS.count("kv_transfer_stuck_workers", 1)
                logger.critical(
                    "KV transfer worker %s; its rooms fail until it makes progress. If it does "
                    "not, restart this prefill server (py-spy dump shows where it hangs)",
                    text,
                )
        for index in self._in_trouble.keys() - troubles.keys():
            logger.error("KV transfer worker %d makes progress again", index)
        self._in_trouble = troubles
        for room in self._rooms.all() if troubles else ():
            why = troubles.get(worker_of(room.number, len(self._threads)))
            if why is not None and room.state not in UNCLAIMED:
                text = f"room {room.number}: transfer worker {why}"
                self._rooms.abandon(room, Reason.INTERNAL, text)

    def alive(self) -> int:
        """Return the number of live threads. Fewer than ``Settings.queues`` before ``stop`` is a
        bug."""
        return sum(each.thread.is_alive() for each in self._threads)

    def _put(self, room: int, command: Callable[[Worker], None]) -> None:
        self._threads[worker_of(room, len(self._threads))].commands.put(command)


class PooledManager(CommonKVManager):
    """Queues what the plan left over. A backend says how bytes move (``make_backend``) and what is
    one chunk (``cut``)."""

    def make_backend(self, settings: Settings) -> Backend:
        """How bytes move."""
        raise NotImplementedError

    def cut(self, *chunk: Any) -> Any:
        """The payload of a chunk, with ``destinations`` by peer. ``chunk``: room, announcements,
        pages, their place among the room's destination pages, chunk id, metadata slot, and pages of
        state; the last two are None but for the last chunk.

        Raises:
            DeltaMismatch: a decode rank listed another number of pages there.
        """
        raise NotImplementedError

    def start_prefill(self) -> None:
        """The threads of a prefill rank."""
        self.start_transfers()
        self.start_reader(self.announcements().take, self.tick_transfers)

    def start_transfers(self) -> None:
        """Start the transfer workers of this prefill rank.

        Raises:
            ValueError: a variable is set to something that cannot be; the message names it.
        """
        settings = Settings.read()
        #: Seconds that a chunk may take, from the queue to its end.
        self.transfer_s = environment.TRANSFER_TIMEOUT.read()
        self.transfer_report = TransferReport()
        self.transfers = TransferPool(
            self.make_backend(settings),
            self.rooms,
            settings,
            self.transfer_report,
            prepare_thread=self._prepare_thread,
        )
        self.rooms.on_stopped = self.room_stopped
        self.transfers.start()
        atexit.register(self.transfers.stop, _DRAIN_S)

    def _prepare_thread(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(self.kv_args.gpu_id)

    def queue_chunk(
        self, room: int, pages: npt.NDArray[np.int32], part: slice, is_last: bool, chunk_id: int,
        metadata_slot: int | None, state_pages: Sequence[Any] | None,
    ) -> None:  # fmt: skip
        """Queue one chunk. What becomes of it is in the room table.

        Raises:
            DeltaMismatch: as ``cut``, or no decode rank is known for the room.
        """
        known = self.rooms.room(room)
        announcements = list(known.announcements.values()) if known is not None else []
        if not announcements:
            raise DeltaMismatch(f"room {room}: no decode rank's pages are known for it")
        payload = self.cut(room, announcements, pages, part, chunk_id, metadata_slot, state_pages)
        now = time.monotonic()
        peers = tuple(payload.destinations)
        self.transfers.submit(Chunk(room, peers, payload, is_last, now + self.transfer_s, now))

    def room_stopped(self, room: Room, kind: Reason) -> None:
        """``room`` failed: what waits of it is dropped."""
        self.transfers.cancel(room)

    def tick_transfers(self) -> None:
        """Every second or so, by the reader thread."""
        self.transfer_report.tick()
        self.transfers.tick()
        self.forget_silent_peers()

"""The threads of the transfer workers.

The rest of the process calls ``TransferPool``, which only appends to a queue. The threads run under
SCHED_BATCH: waking one never takes the scheduler's core. ``TransferPool.tick`` notices workers that
do not go on, and fails their rooms instead of letting them wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, TransferReport
from sglang.srt.disaggregation.delta.prefill.rooms import UNCLAIMED, Room, RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Backend,
    Chunk,
    TransferSettings,
    use_batch_scheduling,
)
from sglang.srt.disaggregation.delta.prefill.transfer_worker import Worker

logger = logging.getLogger(__name__)


#: What a worker is to do; a number ends its thread, after so many seconds for what is under way.
_Command = Callable[[Worker], None] | float

#: A worker whose step raised (a bug: steps catch what they call) goes on after so many seconds.
_AFTER_A_BUG_S = 0.1
#: Join at most so much longer than a worker may drain.
_JOIN_GRACE_S = 2.0


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
        settings: TransferSettings,
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
        """Return the number of live threads. Fewer than ``TransferSettings.queues`` before
        ``stop`` is a bug."""
        return sum(each.thread.is_alive() for each in self._threads)

    def _put(self, room: int, command: Callable[[Worker], None]) -> None:
        self._threads[worker_of(room, len(self._threads))].commands.put(command)

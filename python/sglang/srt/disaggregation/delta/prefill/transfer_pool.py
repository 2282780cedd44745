"""The threads of the transfer workers.

Contract: ``open``, ``submit`` and ``forget`` of a room come from one thread (the scheduler's),
``cancel`` and ``stop`` from any, ``tick`` from the reader thread. All but ``stop`` and ``tick``
only append to a queue: they never block, and the room's worker does the work soon after. Each
worker has one thread and no lock. The threads run under SCHED_BATCH, because waking one must not
take the scheduler's core.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, TransferGauges
from sglang.srt.disaggregation.delta.prefill.rooms import UNCLAIMED, Room, RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Backend,
    Chunk,
    TransferSettings,
    use_batch_scheduling,
)
from sglang.srt.disaggregation.delta.prefill.transfer_worker import Worker

logger = logging.getLogger(__name__)


#: A call for a worker; or a number, which ends its thread after that many seconds for transfers
#: under way.
_Command = Callable[[Worker], None] | float

#: Seconds until the next step after one that raised, which is a bug: steps catch what they call.
_RETRY_AFTER_ERROR_S = 0.1
#: Seconds to wait for a thread beyond the time that its worker may drain.
_JOIN_GRACE_S = 2.0


class _Thread:
    """One worker with its command queue. Only its own thread uses the worker."""

    def __init__(
        self, worker: Worker, name: str, prepare: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._worker = worker
        self._prepare = prepare
        self._clock = clock
        #: Commands in order. A put wakes the thread and never waits long for a lock.
        self.commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        #: When the step under way, or what leads to it, began; None while the thread waits.
        self.busy_since: float | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        use_batch_scheduling()
        try:
            self._prepare()
        except Exception:
            logger.exception(
                "%s: could not select the device; the thread continues without", self.thread.name
            )
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
                "%s: ended with %d transfers under way; decode frees their pages after its "
                "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT",
                self.thread.name,
                self._worker.busy,
            )

    def _obey(self, wait: float | None) -> float | None:
        """Wait up to ``wait`` seconds for a command, and run all that are queued. Return the
        seconds to drain if one of them ends the thread, else None."""
        try:
            command = self.commands.get(timeout=wait)
            if self.busy_since is None:
                self.busy_since = self._clock()
            while not isinstance(command, float):
                try:
                    command(self._worker)
                except Exception:
                    logger.exception(
                        "%s: unexpected error in a command; later commands are run",
                        self.thread.name,
                    )
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
            logger.exception(
                "%s: unexpected error; retrying in %.1f s", self.thread.name, _RETRY_AFTER_ERROR_S
            )
            return _RETRY_AFTER_ERROR_S
        self.busy_since = None
        return wait


def worker_of(room: int, workers: int) -> int:
    """Return the worker of ``room``, which keeps all its chunks in order.

    Room numbers are scattered first, because data parallel attention gives a scheduler only rooms
    with one remainder, and ``room % workers`` would put all of them into one queue.
    """
    # Multiply by the 64-bit golden ratio (Knuth, "The Art of Computer Programming", volume 3, 6.4),
    # because the upper bits of the product depend on every bit of the room.
    return (room * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) * workers >> 64


class TransferPool:
    """Moves chunks on its own threads."""

    def __init__(
        self,
        backend: Backend,
        rooms: RoomTable,
        settings: TransferSettings,
        gauges: TransferGauges,
        *,
        prepare_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``prepare_thread`` is called first on every thread, to set the CUDA device."""
        self.backend = backend
        self._rooms = rooms
        self._settings = settings
        self._clock = clock
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._threads = [
            _Thread(
                Worker(backend, rooms, settings, gauges, index, clock),
                f"kv-transfer-{index}",
                prepare_thread,
                clock,
            )
            for index in range(settings.queues)
        ]
        #: Workers in trouble at the last tick -> when that was noticed.
        self._in_trouble: dict[int, float] = {}
        #: Those, and workers in trouble for the first time.
        self._suspected: set[int] = set()

    def start(self) -> None:
        """Start the threads. Called once."""
        for each in self._threads:
            each.thread.start()

    def open(self, room: Room) -> None:
        """Accept chunks of ``room``."""
        self._put(room.number, lambda worker: worker.open(room))

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk of an open room, or drop it if the room has ended."""
        self._put(chunk.room, lambda worker: worker.submit(chunk))

    def cancel(self, room: Room) -> None:
        """End a room that the table has given up. Changes nothing if it is not open or has
        ended."""
        self._put(room.number, lambda worker: worker.cancel(room))

    def forget(self, room: Room) -> None:
        """Drop everything of a room whose request is done, except what is under way."""
        self._put(room.number, lambda worker: worker.forget(room))

    def stop(self, drain_s: float = 5.0) -> None:
        """End all rooms, wait up to ``drain_s`` for what is under way, and end the threads.

        Idempotent. Logs an error for threads that have not ended in time. Tear the backend down
        only if ``alive()`` is 0 afterwards.
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
                "%d transfer threads have not ended (py-spy dump shows where they hang)",
                self.alive(),
            )

    def troubles(self) -> dict[int, str]:
        """Return the workers that are stuck or ended, by index, with what is wrong."""
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
        """Fail the rooms of workers in trouble. Called about once a second.

        A worker that wakes up finds its rooms stopped: it posts nothing more, and their peers are
        never notified of completion. So the scheduler need not wait for transfers under way.

        A worker must be late at two ticks in a row, because after a suspension of the process all
        workers are late by the clock and go on at once.
        """
        found, now = self.troubles(), self._clock()
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
            logger.warning(
                "KV transfer worker %d recovered after %.1f s: its new rooms are served",
                index,
                now - self._in_trouble[index],
            )
        self._in_trouble = {index: self._in_trouble.get(index, now) for index in troubles}
        for room in self._rooms.all() if troubles else ():
            why = troubles.get(worker_of(room.number, len(self._threads)))
            if why is not None and room.state not in UNCLAIMED:
                text = f"room {room.number}: transfer worker {why}"
                self._rooms.abandon(room, Reason.INTERNAL, text)

    def alive(self) -> int:
        """Return the number of live threads, ``TransferSettings.queues`` until ``stop``."""
        return sum(each.thread.is_alive() for each in self._threads)

    def _put(self, room: int, command: Callable[[Worker], None]) -> None:
        self._threads[worker_of(room, len(self._threads))].commands.put(command)

"""The threads of the transfer workers: their queues and loops, shutdown, and a watchdog.

The rest of the process calls ``TransferPool``, which only appends to a queue. The threads run under
SCHED_BATCH: waking one never takes the scheduler's core. ``Watchdog`` notices workers that do not
go on, and fails their rooms instead of letting them wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, TransferReport
from sglang.srt.disaggregation.delta.prefill.room import Room
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Backend, Chunk, Settings
from sglang.srt.disaggregation.delta.prefill.transfer_worker import Worker

logger = logging.getLogger(__name__)


def use_batch_scheduling() -> None:
    """From now on this thread, and those that it starts, take no core from a running thread when
    they wake up; they wait for a free one, or for their turn.

    Without that, waking a worker may cost the scheduler its core for milliseconds, in the middle of
    ``send``. (Linux' SCHED_BATCH; elsewhere, or where it is forbidden, nothing happens.)
    """
    _set_batch(0)


@contextlib.contextmanager
def batch_scheduling(nice: int = 0) -> Iterator[None]:
    """For native threads that a library starts meanwhile: they get SCHED_BATCH, and are so much
    nicer than this one. Threads of Python's are left alone, whoever starts them: they take the
    interpreter's lock, and whoever holds it must not wait for a core.
    """
    before = _threads()
    yield
    for thread in _threads() - before - {each.native_id for each in threading.enumerate()}:
        _set_batch(thread)
        with contextlib.suppress(AttributeError, OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


def _set_batch(thread: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    """The threads of this process, as Linux numbers them; none elsewhere."""
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()


_Command = Callable[[Worker], None]

#: A worker whose step raised (a bug: steps catch what they call) goes on after so many seconds;
#: each time in a row after twice as many, up to the longest.
_AFTER_A_BUG_S = 0.01
_LONGEST_AFTER_A_BUG_S = 1.0
#: Join at most so much longer than a worker may drain.
_JOIN_GRACE_S = 2.0


class _Thread:
    """One worker with its queue. Only its own thread touches the worker."""

    def __init__(
        self,
        worker: Worker,
        name: str,
        prepare: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._prepare = prepare
        self._clock = clock
        #: Commands, in order; None ends the thread.
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._drain_s = 0.0
        #: Since when it has something to do and has not finished a step; None while it waits.
        self._busy_since: float | None = None
        self._error: Exception | None = None
        self._after_a_bug = _AFTER_A_BUG_S
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, command: _Command) -> None:
        """Have the worker do it. Wakes the thread; takes no lock that is ever held for long."""
        self._commands.put(command)

    def stop(self, drain_s: float) -> None:
        """Have the thread end, after at most so many seconds for what is under way."""
        self._drain_s = drain_s
        self._commands.put(None)

    def trouble(self, now: float, limit_s: float) -> str | None:
        """What is wrong with it, if its rooms cannot wait for it; of a thread that was started."""
        since = self._busy_since
        if not self.thread.is_alive():
            return f"{self.thread.name} has ended"
        if since is None or now - since < limit_s:
            return None
        if self._error is not None:
            return f"each step of {self.thread.name} raises, the last one {self._error!r}"
        return f"{self.thread.name} hangs in a call of the transport for {now - since:.0f} s"

    def _run(self) -> None:
        use_batch_scheduling()
        try:
            self._prepare()
        except Exception:
            logger.exception("%s: could not prepare the thread; it continues", self.thread.name)
        wait: float | None = None
        while self._obey(wait):
            wait = self._step()
        self._worker.stop()
        until = self._clock() + self._drain_s
        while self._worker.busy and (left := until - self._clock()) > 0:
            wait = self._step()
            self._obey(left if wait is None else min(wait, left))
        given_up = self._worker.give_up()
        if given_up:
            logger.error("%s: ended with %d transfers under way", self.thread.name, given_up)

    def _obey(self, wait: float | None) -> bool:
        """Wait so long for a command, and do all there are; False at the sentinel."""
        try:
            command = self._commands.get(timeout=wait)
            if self._busy_since is None:
                self._busy_since = self._clock()
            while command is not None:
                try:
                    command(self._worker)
                except Exception:
                    logger.exception("%s: a command failed", self.thread.name)
                command = self._commands.get_nowait()
            return False
        except queue.Empty:
            return True

    def _step(self) -> float | None:
        now = self._clock()
        if self._busy_since is None:
            self._busy_since = now
        try:
            wait = self._worker.step(now)
        except Exception as error:
            if self._error is None:
                logger.exception("%s: a step failed", self.thread.name)
            self._error = error
            pause = self._after_a_bug
            self._after_a_bug = min(2 * pause, _LONGEST_AFTER_A_BUG_S)
            return pause
        self._busy_since, self._error, self._after_a_bug = None, None, _AFTER_A_BUG_S
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
            for index in range(settings.workers)
        ]

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
        """The request is done with: nothing is kept of its room but what is under way. A callback
        that is just being made may still come after this."""
        self._put(room.number, lambda worker: worker.forget(room))

    def stop(self, drain_s: float = 5.0) -> None:
        """End all rooms, wait at most so many seconds for what is under way, and end the threads.

        Idempotent. Returns when the threads have ended, or with an error in the log for those that
        hang in a call of the backend. The backend may be torn down after that only if
        ``alive()`` is 0.
        """
        with self._stop_lock:
            if not self._stopped:
                self._stopped = True
                for each in self._threads:
                    each.stop(drain_s)
            until = time.monotonic() + drain_s + _JOIN_GRACE_S
            for each in self._threads:
                if each.thread.ident is not None:  # it was started
                    each.thread.join(max(0.0, until - time.monotonic()))
        if self.alive():
            logger.error("%d transfer threads hang in a call of the transport", self.alive())

    def troubles(self) -> dict[int, str]:
        """Workers whose rooms cannot wait for them any longer, by index, and what is wrong."""
        if self._stopped:
            return {}
        now, limit_s = self._clock(), self._settings.stuck_s
        found = {
            index: each.trouble(now, limit_s)
            for index, each in enumerate(self._threads)
            if each.thread.ident is not None
        }
        return {index: text for index, text in found.items() if text is not None}

    def worker_of(self, room: int) -> int:
        """The index of the worker that a room belongs to."""
        return worker_of(room, len(self._threads))

    def alive(self) -> int:
        """How many of the threads run. Fewer than ``Settings.workers`` before ``stop``: a bug."""
        return sum(each.thread.is_alive() for each in self._threads)

    def _put(self, room: int, command: _Command) -> None:
        self._threads[self.worker_of(room)].put(command)


class Watchdog:
    """Of one transfer pool, asked every second or so by a thread that is none of its workers."""

    def __init__(self, pool: TransferPool, rooms: RoomTable) -> None:
        self._pool = pool
        self._rooms = rooms
        #: Workers in trouble, by index.
        self._known: dict[int, str] = {}
        #: Those that seemed to be at the last tick.
        self._suspected: set[int] = set()

    def tick(self) -> None:
        """Fail the rooms of workers in trouble, those that came since the last time included.

        A worker that wakes up finds its rooms stopped: it posts nothing more for them,
        and their peers are never told that they are complete. So the scheduler need not wait for
        what it may have under way.

        Once is no proof: where the process did not run, or this thread was kept waiting together
        with the workers, they are late by the clock and go on at once.
        """
        found = self._pool.troubles()
        troubles = {index: text for index, text in found.items() if index in self._suspected}
        self._suspected = set(found)
        for index, text in troubles.items():
            if index not in self._known:
                STATS.count("kv_transfer_stuck_workers", 1)
                logger.critical(
                    "KV transfer worker %s; its rooms fail until it makes progress. If it does "
                    "not, restart this prefill server (py-spy dump shows where it hangs)",
                    text,
                )
        for index in self._known.keys() - troubles.keys():
            logger.error("KV transfer worker %d makes progress again", index)
        self._known = troubles
        if not troubles:
            return
        for room in self._rooms.claimed():
            why = troubles.get(self._pool.worker_of(room))
            if why is not None:
                text = f"room {room}: transfer worker {why}"
                self._rooms.abandon(room, Reason.INTERNAL, text)

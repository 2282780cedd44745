"""The threads: a queue and a loop for each worker, and what the rest of the process calls."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from sglang.srt.disaggregation.async_transfer.background import stand_back
from sglang.srt.disaggregation.async_transfer.chunk import Chunk
from sglang.srt.disaggregation.async_transfer.interfaces import Backend, Gate, Observer
from sglang.srt.disaggregation.async_transfer.settings import Settings, worker_of
from sglang.srt.disaggregation.async_transfer.stats import AsyncTransferStats
from sglang.srt.disaggregation.async_transfer.worker import Worker
from sglang.srt.disaggregation.delta.failures import Reason

logger = logging.getLogger(__name__)

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
        return f"{self.thread.name} hangs in a call of the transport since {now - since:.0f} s"

    def _run(self) -> None:
        stand_back()
        try:
            self._prepare()
        except Exception:
            logger.exception("%s: preparing the thread; it goes on", self.thread.name)
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
                    logger.exception("%s: a command", self.thread.name)
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
                logger.exception("%s: a step", self.thread.name)
            self._error = error
            pause = self._after_a_bug
            self._after_a_bug = min(2 * pause, _LONGEST_AFTER_A_BUG_S)
            return pause
        self._busy_since, self._error, self._after_a_bug = None, None, _AFTER_A_BUG_S
        return wait


class TransferPool:
    """Moves chunks on its own threads; nothing here waits for a transfer.

    ``open``, ``submit`` and ``forget`` of a room come from one thread (the scheduler's), ``cancel``
    and ``stop`` from any. All of them only append to a queue: they never block, and what they cause
    happens soon after, on the room's worker.
    """

    def __init__(
        self,
        backend: Backend,
        observer: Observer,
        gate: Gate,
        settings: Settings,
        stats: AsyncTransferStats,
        *,
        prepare_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "kv-transfer",
    ) -> None:
        """``prepare_thread`` is called first on every thread: it sets the CUDA device."""
        self.backend = backend
        self._settings = settings
        self._clock = clock
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._threads = [
            _Thread(
                Worker(backend, observer, gate, settings, stats, index, clock),
                f"{name}-{index}",
                prepare_thread,
                clock,
            )
            for index in range(settings.workers)
        ]

    def start(self) -> None:
        """Start the threads; once."""
        for each in self._threads:
            each.thread.start()

    def open(self, room: int) -> None:
        """A request of ``room`` begins."""
        self._put(room, lambda worker: worker.open(room))

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk of an open room. Dropped if the room has ended."""
        self._put(chunk.room, lambda worker: worker.submit(chunk))

    def cancel(self, room: int, reason: Reason) -> None:
        """End a room; the observer is told when it is quiet, but not that it failed. A room that is
        not open or has ended is left alone."""
        self._put(room, lambda worker: worker.cancel(room, reason))

    def forget(self, room: int) -> None:
        """The request is done with: nothing is kept of its room but what is under way. A callback
        that is just being made may still come after this."""
        self._put(room, lambda worker: worker.forget(room))

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
        return worker_of(room, self._settings)

    def alive(self) -> int:
        """How many of the threads run. Fewer than ``Settings.workers`` before ``stop``: a bug."""
        return sum(each.thread.is_alive() for each in self._threads)

    def _put(self, room: int, command: _Command) -> None:
        self._threads[worker_of(room, self._settings)].put(command)

"""Threads for calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any  # Any: what a call returns

_Task = tuple["Future[Any]", Callable[[], Any]]


class CallThreads:
    """Daemon threads, made when they are needed and used again; a call that never returns does not
    keep the process alive. How many there may be is for the caller to bound."""

    def __init__(self, name: str) -> None:
        """``name``: of the threads."""
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Task | None]] = []
        self._closed = False
        #: Threads that were ever made.
        self.made = 0

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Run ``call`` on a thread. The future is done when it has returned or raised, whatever it
        raised, or could not be started; its callbacks run on that thread."""
        future: Future[Any] = Future()
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(inbox,), name=self._name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter is ending
                future.set_exception(error)
                return future
            self.made += 1
        inbox.put((future, call))
        return future

    def close(self) -> None:
        """End the idle threads, and the others as soon as their calls have returned."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: SimpleQueue[_Task | None]) -> None:
        while (task := inbox.get()) is not None:
            future, call = task
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # a store that exits the interpreter is one that failed
                error = raised
            del task, call
            # Idle before the future is done: who waits for it may start the next call at once.
            with self._lock:
                closed = self._closed
                if not closed:
                    self._idle.append(inbox)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, result, error  # an idle thread holds no tensors
            if closed:
                return

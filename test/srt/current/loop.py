"""SGLang's own event loop, stepped by hand from a test.

The scheduler lives on a thread of its own, which runs the loop that the arguments select. That loop
reads ``gracefully_exit`` once at the top of each iteration, where the thread waits for the test.
Because only one of the two threads ever runs, a step is as deterministic as a call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any  # Any: the result of a function called on the other thread

#: Seconds that a step may take before the test fails: the first step compiles and allocates.
PATIENCE = 120


class Loop:
    """A thread that runs functions for the test, and pauses within one of them."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], Any] | bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Return the result of ``function`` on the thread, which stays paused otherwise."""
        return self._ask(function)

    def begin(self, function: Callable[[], Any]) -> None:
        """Run ``function`` on the thread up to its first :meth:`pause`."""
        assert self._ask(function) == "paused", "it ended without a pause"

    def step(self) -> None:
        """Run the function up to its next :meth:`pause`."""
        assert self._ask(False) == "paused", "it ended without a pause"

    def end(self) -> None:
        """Run the function to its end."""
        self._ask(True)

    def pause(self) -> bool:
        """Wait for the test, on the thread; return True if the function has to end."""
        self._answers.put((True, "paused"))
        while callable(order := self._orders.get()):
            self._do(order)
        return order

    def is_here(self) -> bool:
        """Return True if the caller runs on the thread."""
        return threading.current_thread() is self._thread

    def _ask(self, order: Callable[[], Any] | bool) -> Any:
        self._orders.put(order)
        try:
            worked, answer = self._answers.get(timeout=PATIENCE)
        except queue.Empty:
            raise TimeoutError(f"no answer from the scheduler's thread in {PATIENCE} s") from None
        if not worked:
            raise answer
        return answer

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            assert callable(order), "no function is running"
            self._do(order)

    def _do(self, function: Callable[[], Any]) -> None:
        try:
            self._answers.put((True, function()))
        except BaseException as error:
            self._answers.put((False, error))

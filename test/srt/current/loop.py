"""SGLang's own event loop, stepped by hand from a test.

The scheduler lives on a thread of its own, which runs the loop that its arguments ask for. That
loop looks at ``gracefully_exit`` once at the top of each iteration; there the thread waits for the
test. Only one of the two ever runs, so a step is as deterministic as a call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any  # Any: what a function returns that is called on the other thread

#: Seconds that a step may take before the test fails: the first one compiles and allocates.
PATIENCE = 120


class Loop:
    """A thread that runs functions for the test, and pauses within one of them."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], Any] | bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns on the thread; an iteration under way is not continued."""
        return self._ask(function)

    def begin(self, function: Callable[[], Any]) -> None:
        """Runs ``function`` on the thread as far as its first :meth:`pause`."""
        assert self._ask(function) == "paused", "it came to its end"

    def step(self) -> None:
        """Lets the function go on to its next :meth:`pause`."""
        assert self._ask(False) == "paused", "it came to its end"

    def end(self) -> None:
        """Lets the function go on to its end."""
        self._ask(True)

    def pause(self) -> bool:
        """To be called on the thread: whether the function has to end."""
        self._answers.put((True, "paused"))
        while callable(order := self._orders.get()):
            self._do(order)
        return order

    def is_here(self) -> bool:
        """Whether this is the thread."""
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
            assert callable(order), "no loop is under way"
            self._do(order)

    def _do(self, function: Callable[[], Any]) -> None:
        try:
            self._answers.put((True, function()))
        except BaseException as error:
            self._answers.put((False, error))

"""A bounded pool of threads for questions to other servers, some of which never answer.

In a plain pool a few servers that hang take every thread, and questions to healthy servers wait for
their timeouts. Here an address has at most ``_EACH`` questions under way, and addresses that were
slow last time share half of the threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar  # Any: arguments and answers

T = TypeVar("T")

#: Questions that may be under way to one address.
_EACH = 2
#: Seconds from which an answer is slow, and addresses that are remembered as slow.
_SLOW_S, _MOST_SLOW = 1.0, 1024


class AddressPool:
    """Used by any thread; ``submit`` never waits."""

    def __init__(
        self, name: str, threads: int = 64, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``name``: of the threads, which are started when they are needed."""
        self._executor = ThreadPoolExecutor(threads, name)
        self._slow_limit = threads // 2
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._under_way: Counter[str] = Counter()
        #: Addresses whose last question was slow, the oldest first.
        self._slow: dict[str, None] = {}

    def submit(self, address: str, ask: Callable[..., T], *args: Any) -> Future[T]:
        """Call ``ask`` with ``args`` in a thread, after earlier questions to ``address``."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(address, deque()).append(
                partial(self._run, address, future, ask, args)
            )
            self._start()
        return future

    def shutdown(self) -> None:
        """Wait for the questions that are under way."""
        self._executor.shutdown(wait=True)

    def _start(self) -> None:
        """Start what may start. Under the lock."""
        slow = sum(self._under_way[address] for address in self._slow)
        for address, questions in list(self._waiting.items()):
            is_slow = address in self._slow
            while questions and self._under_way[address] < _EACH:
                if is_slow and slow >= self._slow_limit:
                    break
                slow += is_slow
                self._under_way[address] += 1
                self._executor.submit(questions.popleft())
            if not questions:
                del self._waiting[address]

    def _run(
        self, address: str, future: Future[T], ask: Callable[..., T], args: tuple[Any, ...]
    ) -> None:
        began, error = self._clock(), None
        try:
            answer = ask(*args)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._slow.pop(address, None)
            if self._clock() - began >= _SLOW_S:
                self._slow[address] = None
                if len(self._slow) > _MOST_SLOW:
                    del self._slow[next(iter(self._slow))]
            self._under_way[address] -= 1
            if not self._under_way[address]:
                del self._under_way[address]
            self._start()
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)

"""A bounded pool of threads for questions to other servers, some of which never answer.

In a plain pool a few servers that hang take every thread, and questions to healthy servers wait for
their timeouts. Here an address has at most ``_EACH`` questions under way, addresses that were slow
last time share half of the threads, and an eighth is left for those that were quick last time.
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

#: Questions that may be under way to one address, and that may wait.
_EACH, _MOST_WAITING = 2, 4096
#: Seconds from which an answer is slow, and addresses of which that is remembered.
_SLOW_S, _MOST_KNOWN = 1.0, 4096


class AddressPool:
    """Used by any thread; ``submit`` never waits."""

    def __init__(
        self, name: str, threads: int = 64, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``name``: of the threads, which are started when they are needed."""
        self._executor = ThreadPoolExecutor(threads, name)
        #: Threads that slow addresses may have, and those with all that were never asked.
        self._slow_limit, self._limit = threads // 2, threads - max(threads // 8, 1)
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._under_way: Counter[str] = Counter()
        #: Whether the last answer of an address was quick; the one asked longest ago comes first.
        self._was_quick: dict[str, bool] = {}

    def submit(self, address: str, ask: Callable[..., T], *args: Any) -> Future[T]:
        """Call ``ask`` with ``args`` in a thread, after earlier queries to ``address``. Its
        result is an ``OSError`` where too many of those wait."""
        future: Future[T] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(address, deque())
            if len(waiting) < _MOST_WAITING:
                waiting.append(partial(self._run, address, future, ask, args))
                self._start([address])
                return future
        text = f"{address} does not answer, and {_MOST_WAITING} queries to it are pending"
        future.set_exception(OSError(text))
        return future

    def shutdown(self) -> None:
        """Wait for the questions that are under way."""
        self._executor.shutdown(wait=True)

    def _start(self, addresses: list[str]) -> None:
        """Start what may start of the questions to ``addresses``. Under the lock."""
        busy: Counter[bool | None] = Counter()
        for address, count in self._under_way.items():
            busy[self._was_quick.get(address)] += count
        for address in addresses:
            questions = self._waiting[address]
            kind = self._was_quick.get(address)
            while questions and self._under_way[address] < _EACH:
                if kind is False and busy[False] >= self._slow_limit:
                    break
                if not kind and busy[False] + busy[None] >= self._limit:
                    break
                busy[kind] += 1
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
            self._was_quick.pop(address, None)
            self._was_quick[address] = self._clock() - began < _SLOW_S
            if len(self._was_quick) > _MOST_KNOWN:
                del self._was_quick[next(iter(self._was_quick))]
            self._under_way[address] -= 1
            if not self._under_way[address]:
                del self._under_way[address]
            self._start(list(self._waiting))
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)

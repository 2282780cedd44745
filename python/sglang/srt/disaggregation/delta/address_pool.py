"""A bounded pool of threads for queries to other servers, some of which never answer.

In a plain pool a few hung servers would take every thread, and queries to healthy servers would
wait for their timeouts. Here an address has at most ``_MAX_RUNNING`` queries in flight, addresses
whose last answer was slow share half of the threads, and an eighth is reserved for addresses whose
last answer was quick.

Contract: any thread; ``_lock`` guards all tables and is not held during a query.
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

#: Maximum queries in flight to one address.
_MAX_RUNNING = 2
#: Maximum threads of a pool: they only wait for answers.
_MAX_THREADS = 64
#: Maximum queued queries of one address.
_MAX_QUEUED = 4096
#: Time from which an answer is slow.
_SLOW_S = 1.0
#: Maximum addresses whose last answer time is remembered.
_MAX_KNOWN = 4096


class AddressPool:
    """Pool of threads with limits per address; see the module's contract."""

    def __init__(self, name: str) -> None:
        """``name``: prefix of the threads' names. Threads are started on demand."""
        self._executor = ThreadPoolExecutor(_MAX_THREADS, name)
        #: Maximum threads of slow addresses.
        self._slow_limit = _MAX_THREADS // 2
        #: Maximum threads of slow and unknown addresses together.
        self._limit = _MAX_THREADS - _MAX_THREADS // 8
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._under_way: Counter[str] = Counter()
        #: Address -> True if its last answer was quick, least recently queried first.
        self._was_quick: dict[str, bool] = {}

    def submit(self, address: str, query: Callable[..., T], *args: Any) -> Future[T]:
        """Queue ``query(*args)`` after earlier queries to ``address``. Return its future, which
        fails with ``OSError`` if too many are queued. Never blocks."""
        future: Future[T] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(address, deque())
            if len(waiting) < _MAX_QUEUED:
                waiting.append(partial(self._run, address, future, query, args))
                self._start([address])
                return future
        text = f"{address} does not answer, and {_MAX_QUEUED} queries to it are pending"
        future.set_exception(OSError(text))
        return future

    def shutdown(self) -> None:
        """Wait for the queries in flight."""
        self._executor.shutdown(wait=True)

    def _start(self, addresses: list[str]) -> None:
        """Start queued queries to ``addresses`` within the limits. Requires the lock."""
        busy: Counter[bool | None] = Counter()
        for address, count in self._under_way.items():
            busy[self._was_quick.get(address)] += count
        for address in addresses:
            queries = self._waiting[address]
            was_quick = self._was_quick.get(address)
            while queries and self._under_way[address] < _MAX_RUNNING:
                if was_quick is False and busy[False] >= self._slow_limit:
                    break
                if not was_quick and busy[False] + busy[None] >= self._limit:
                    break
                busy[was_quick] += 1
                self._under_way[address] += 1
                self._executor.submit(queries.popleft())
            if not queries:
                del self._waiting[address]

    def _run(
        self, address: str, future: Future[T], query: Callable[..., T], args: tuple[Any, ...]
    ) -> None:
        began, error = time.monotonic(), None
        try:
            answer = query(*args)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._was_quick.pop(address, None)
            self._was_quick[address] = time.monotonic() - began < _SLOW_S
            if len(self._was_quick) > _MAX_KNOWN:
                del self._was_quick[next(iter(self._was_quick))]
            self._under_way[address] -= 1
            if not self._under_way[address]:
                del self._under_way[address]
            self._start(list(self._waiting))
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)

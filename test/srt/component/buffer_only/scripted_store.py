"""An in-memory store controlled by a test: calls fail, hang, lose or shorten pages, answer
nonsense.

It is a ``HiCacheStorage`` with the ``_v1`` calls: it reads and writes the host pool's own memory,
as Mooncake does::

    store = ScriptedStore(pool)              # or ScriptedStore(other_pool, content=store.content):
                                             # another server on the same store
    store.fail("batch_set_v1", call=2)       # the 2nd such call from now raises OSError
    gate = store.hang("batch_get_v1")        # the next one waits
    ... gate.entered.wait(60) ...            # until now it has not accessed any memory
    gate.open()                              # now it moves its bytes and returns
    store.answer("batch_set_v1", lambda results: results[:-1])   # nonsense from the next call
    store.drop(key), store.shorten(key)      # changes the store's content

Records: ``store.calls`` (method, keys), ``store.disturbed`` (keys of writes with memory that
changed during the call), ``store.written`` (host pages that reads wrote to, in order). ``open_all``
at the end of a fixture lets every hanging call return.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from sglang.srt.mem_cache.buffer_only import host_pool as page_parts
from sglang.srt.mem_cache.buffer_only.jobs import Job
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

PATIENCE = 60.0
"""Seconds after which a closed gate lets its call fail, so that no test hangs."""


def until(condition: Callable[[], bool], pause: float = 0.005) -> None:
    """Wait until other threads make ``condition`` true; check every ``pause`` seconds."""
    patience, end = threading.Event(), time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        patience.wait(pause)


class Gate:
    """Holds one call until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    @property
    def waiting(self) -> bool:
        """True if the call waits now."""
        return self.entered.is_set() and not self._open.is_set()

    def open(self) -> None:
        """Let the call continue, if it waits."""
        self._open.set()

    def pass_through(self) -> None:
        """Wait at the gate; called by the call itself."""
        self.entered.set()
        if not self._open.wait(PATIENCE):
            raise TimeoutError("the gate of a scripted store was not opened")


class ScriptedStore(HiCacheStorage):
    """Keys are page keys; a page's content is the bytes of all its parts, one after the other."""

    def __init__(self, pool: Any = None, content: dict[str, bytes] | None = None) -> None:
        self.content: dict[str, bytes] = {} if content is None else content
        self.calls: list[tuple[str, list[str]]] = []
        self.disturbed: list[str] = []
        self.written: list[int] = []
        self._lock = threading.Lock()
        self._count: dict[str, int] = defaultdict(int)
        self._before: dict[tuple[str, int], Callable[[], None]] = {}
        self._after: dict[tuple[str, int], Callable[[Any], Any]] = {}
        self._gates: list[Gate] = []
        #: True to refuse writes by their answer, or an error to raise.
        self.refusing: bool | BaseException = False
        #: Maximum number of leading pages that a write stores; None for all.
        self.takes: int | None = None
        if pool is not None:
            self.register_mem_pool_host(pool)

    # ---- the script ----

    def fail(self, method: str, call: int = 1, error: BaseException | None = None) -> None:
        """Let the ``call``-th call of ``method`` from now raise before it does anything."""

        def raise_it() -> None:
            raise error or OSError(f"scripted failure of {method}")

        self._before[method, self._count[method] + call] = raise_it

    def hang(self, method: str, call: int = 1) -> Gate:
        """Let the ``call``-th call of ``method`` from now wait at the returned gate."""
        gate = Gate()
        self._gates.append(gate)
        self._before[method, self._count[method] + call] = gate.pass_through
        return gate

    def answer(self, method: str, change: Callable[[Any], Any], call: int = 1) -> None:
        """Let the ``call``-th call of ``method`` from now do its work and answer
        ``change(answer)``."""
        self._after[method, self._count[method] + call] = change

    def drop(self, *keys: str) -> None:
        """Remove pages from the store, as an eviction does."""
        for key in keys:
            del self.content[key]

    def shorten(self, *keys: str) -> None:
        """Remove half of the pages' bytes without the store's knowledge."""
        for key in keys:
            self.content[key] = self.content[key][: len(self.content[key]) // 2]

    def asked(self, method: str) -> list[list[str]]:
        """Return the keys of each call of ``method``."""
        return [keys for name, keys in self.calls if name == method]

    def hanging(self) -> list[Gate]:
        """Return the gates at which a call waits now."""
        return [gate for gate in self._gates if gate.waiting]

    def open_all(self) -> None:
        """Let every hanging call return, and no later one hang."""
        for gate in self._gates:
            gate.open()

    # ---- calls of HiCache ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        (self.page,) = page_parts.together(page_parts.describe(mem_pool_host))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        def exists() -> int:
            return page_parts.leading([key in self.content for key in keys])

        return self._scripted("batch_exists", keys, exists)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        pages = page_parts.page_numbers(host_indices, self.mem_pool_host.page_size)
        assert len(pages) == len(keys)

        def get() -> list[bool]:
            return [self._read(key, page) for key, page in zip(keys, pages, strict=True)]

        return self._scripted("batch_get_v1", keys, get)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        pages = page_parts.page_numbers(host_indices, self.mem_pool_host.page_size)
        assert len(pages) == len(keys)
        before = [self._bytes(page) for page in pages]

        def put() -> list[bool]:
            if isinstance(self.refusing, BaseException):
                raise self.refusing
            if self.refusing:
                return [False] * len(keys)
            stored = len(keys) if self.takes is None else min(self.takes, len(keys))
            for key, page, was in list(zip(keys, pages, before, strict=True))[:stored]:
                now = self._bytes(page)
                if now != was:
                    self.disturbed.append(key)
                self.content.setdefault(key, now)
            return [index < stored for index in range(len(keys))]

        return self._scripted("batch_set_v1", keys, put)

    def clear(self) -> Any:
        return self._scripted("clear", [], self.content.clear)

    def _not_called(self, *_: Any) -> Any:
        raise NotImplementedError("HiCache moves pages of a stage with the _v1 calls")

    get = batch_get = set = batch_set = exists = _not_called

    # ---- internals ----

    def _scripted(self, method: str, keys: list[str], work: Callable[[], Any]) -> Any:
        with self._lock:
            self._count[method] += 1
            turn = (method, self._count[method])
            self.calls.append((method, list(keys)))
        before = self._before.pop(turn, None)
        if before is not None:
            before()
        answer = work()
        change = self._after.pop(turn, None)
        return answer if change is None else change(answer)

    def _bytes(self, page: int) -> bytes:
        content: bytes = self.page.gather(page).numpy().tobytes()
        return content

    def _read(self, key: str, page: int) -> bool:
        content = self.content.get(key)
        if content is None:
            return False
        self.written.append(page)
        # Short content also overwrites the page, so a caller must not use what the page holds.
        room = self.page.gather(page)
        room[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.page.scatter(page, room)
        return len(content) == self.page.size


class ManualThreads:
    """Like ``jobs.Threads``, but ``run`` does the jobs on the test's thread."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self.name = name
        self.jobs: deque[Job] = deque()

    def submit(self, work) -> Job:
        job = Job(work)
        self.jobs.append(job)
        return job

    def run(self, jobs: int | None = None) -> int:
        """Do the oldest ``jobs`` jobs, or all. Return the number of jobs done."""
        count = len(self.jobs) if jobs is None else min(jobs, len(self.jobs))
        for _ in range(count):
            self.jobs.popleft().run()
        return count

    def close(self, until: float) -> bool:
        return True

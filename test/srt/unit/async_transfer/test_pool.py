"""The threads: started, shared out, stopped; what is tested here needs real ones, and gates."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from sglang.srt.disaggregation.async_transfer import graveyard
from sglang.srt.disaggregation.async_transfer.chunk import Chunk
from sglang.srt.disaggregation.async_transfer.interfaces import State
from sglang.srt.disaggregation.async_transfer.pool import TransferPool
from sglang.srt.disaggregation.async_transfer.settings import Settings, worker_of
from sglang.srt.disaggregation.async_transfer.stats import AsyncTransferStats
from sglang.srt.disaggregation.delta.failures import Reason
from unit.async_transfer.fakes import Diary, FakeGate, Handle, Script, ScriptedBackend

#: No test waits so long unless it fails.
LONG_S = 30.0


class Quick(ScriptedBackend):
    """Delivers at once what the test does not hold."""

    held = False

    def post(self, chunk: Chunk, peer: str) -> Iterator[Handle]:
        for handle in super().post(chunk, peer):
            if not self.held:
                handle.state = State.DONE
            yield handle


class Bell(Diary):
    """Lets a test wait for what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet: queue.SimpleQueue[int] = queue.SimpleQueue()

    def room_quiet(self, room: int) -> None:
        super().room_quiet(room)
        self.quiet.put(room)


class Threads:
    """A pool with everything around it."""

    def __init__(self, backend: ScriptedBackend | None = None, **settings: int) -> None:
        self.backend = backend or Quick()
        self.bell = Bell()
        self.settings = Settings(**settings)
        self.prepared: list[int] = []
        self.pool = TransferPool(
            self.backend,
            self.bell,
            FakeGate(),
            self.settings,
            AsyncTransferStats(),
            prepare_thread=lambda: self.prepared.append(threading.get_ident()),
        )
        self.pool.start()

    def send(self, room: int, chunks: int = 1) -> None:
        """A whole room."""
        self.pool.open(room)
        now = time.monotonic()
        for index in range(chunks):
            last = index == chunks - 1
            self.pool.submit(Chunk(room, ("a",), Script(index), last, now + LONG_S, now))


def test_rooms_on_several_threads() -> None:
    """Guards against chunks of one room on two threads (hazards 34 and 38; the backend complains),
    rooms that get lost between queues, and threads that are not prepared (hazard 47)."""
    threads = Threads(queues=2, threads=5)
    for room in range(200):
        threads.send(room, chunks=3)
    quiet = {threads.bell.quiet.get(timeout=LONG_S) for _ in range(200)}
    assert quiet == set(range(200)) and threads.backend.misuse == []
    for room in range(200):
        assert threads.bell.of(room) == ["done 0", "done 1", "done 2", "quiet"]
    assert len(set(threads.prepared)) == threads.settings.workers == 4
    assert set(threads.backend._threads.values()) == set(threads.prepared)
    threads.pool.stop()


def test_start_and_stop_twenty_times() -> None:
    """Guards against threads that outlive their pool, and a second stop that hangs (hazard 42)."""
    before = threading.active_count()
    for _ in range(20):
        threads = Threads()
        threads.send(1)
        threads.pool.stop()
        threads.pool.stop()
        assert threads.pool.alive() == 0
        assert threads.bell.of(1) == ["done 0", "quiet"] or threads.bell.of(1)[0] == "failed"
    assert threading.active_count() == before


def test_stop_without_start() -> None:
    """Guards against a server that fails early and then hangs or raises in its clean-up."""
    pool = TransferPool(Quick(), Diary(), FakeGate(), Settings(), AsyncTransferStats())
    pool.stop()
    assert pool.alive() == 0


def test_stop_gives_up_what_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a shutdown that waits for ever for a dead peer, or releases what is under way
    (hazard 42); the requests are told."""
    monkeypatch.setattr(graveyard, "KEPT", [])
    backend = Quick()
    backend.held = True
    posted = threading.Event()
    monkeypatch.setattr(
        AsyncTransferStats, "level", lambda *_: posted.set() if backend.posts else 0
    )
    threads = Threads(backend, queues=1, threads=1)
    threads.send(1)
    assert posted.wait(LONG_S)
    threads.pool.stop(drain_s=0.0)
    assert threads.pool.alive() == 0
    assert threads.bell.failure(1)[0] is Reason.ABORTED
    assert backend.handles == graveyard.KEPT and backend.released == 0


def test_the_scheduler_never_waits_for_a_post() -> None:
    """Guards against a lock that is held during a post: with the transport stuck in its call,
    everything that the scheduler calls returns, and other workers go on (hazards 32, 38 and 40)."""
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(Quick):
        def post(self, chunk: Chunk, peer: str) -> Iterator[Handle]:
            if chunk.room == 0:
                entered.set()
                assert go_on.wait(LONG_S)
            yield from super().post(chunk, peer)

    threads = Threads(Stuck())
    threads.send(0)
    assert entered.wait(LONG_S)
    workers = [worker_of(room, threads.settings) for room in range(50)]
    same = workers.index(workers[0], 1)
    other = next(room for room, worker in enumerate(workers) if worker != workers[0])
    threads.send(same)
    threads.send(other)
    assert threads.bell.quiet.get(timeout=LONG_S) == other
    threads.pool.cancel(same, Reason.ABORTED)
    threads.pool.cancel(0, Reason.ABORTED)
    assert threads.bell.of(0) == threads.bell.of(same) == []
    go_on.set()
    assert {threads.bell.quiet.get(timeout=LONG_S) for _ in range(2)} == {0, same}
    assert same not in {post[0] for post in threads.backend.posts}
    threads.pool.stop()


def test_a_bug_in_a_command_or_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an exception that nobody thought of ending a thread, so that its share of all
    rooms hangs for ever (hazard 29)."""
    threads = Threads(queues=1, threads=1)
    worker = threads.pool._threads[0]._worker
    raised = threading.Event()
    step = worker.step

    def broken(now: float) -> float | None:
        monkeypatch.setattr(worker, "step", step)
        raised.set()
        raise AssertionError("a bug")

    monkeypatch.setattr(worker, "step", broken)
    threads.pool._put(1, lambda worker: worker.no_such_method())  # type: ignore[attr-defined]
    threads.send(1)
    assert threads.bell.quiet.get(timeout=LONG_S) == 1 and raised.is_set()
    assert threads.pool.alive() == 1
    threads.pool.stop()

"""The threads: started, shared out, stopped; what is tested here needs real ones, and gates."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS, AsyncTransferStats
from sglang.srt.disaggregation.delta.prefill import send_queue, transfer_pool
from sglang.srt.disaggregation.delta.prefill.room import Room
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, Settings, State
from sglang.srt.disaggregation.delta.prefill.transfer_pool import TransferPool, Watchdog, worker_of
from unit.delta.prefill.fakes import (
    FakeRooms,
    Handle,
    Script,
    ScriptedBackend,
    WatchedWorker,
)

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


class Bell(FakeRooms):
    """Lets a test wait for what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.over: queue.SimpleQueue[int] = queue.SimpleQueue()

    def drained(self, room: int) -> None:
        super().drained(room)
        self.over.put(room)


class WatchedPool(TransferPool):
    """Its workers say when a room is over on them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer_pool, "Worker", WatchedWorker)
            super().__init__(*arguments, **options)


class Threads:
    """A pool with everything around it."""

    def __init__(
        self,
        backend: ScriptedBackend | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        **settings: int,
    ) -> None:
        self.backend = backend or Quick()
        self.bell = Bell()
        self.settings = Settings(**settings)
        self.prepared: list[int] = []
        self.pool = WatchedPool(
            self.backend,
            self.bell,
            self.settings,
            AsyncTransferStats(),
            prepare_thread=lambda: self.prepared.append(threading.get_ident()),
            clock=clock,
        )
        #: By number.
        self.rooms: dict[int, Room] = {}
        self.pool.start()

    def send(self, room: int, chunks: int = 1) -> None:
        """A whole room."""
        self.rooms[room] = Room(room)
        self.pool.open(self.rooms[room])
        now = time.monotonic()
        for index in range(chunks):
            last = index == chunks - 1
            self.pool.submit(Chunk(room, ("a",), Script(index), last, now + LONG_S, now))


@pytest.mark.hazard("chunks-overtake", "wrong-counts", "racing-peer-tables")
def test_rooms_on_several_threads() -> None:
    """Guards against chunks of one room on two threads (the backend complains), rooms that get lost
    between queues, and threads that are not prepared."""
    threads = Threads(queues=2, threads=5)
    for room in range(200):
        threads.send(room, chunks=3)
    quiet = {threads.bell.over.get(timeout=LONG_S) for _ in range(200)}
    assert quiet == set(range(200)) and threads.backend.misuse == []
    for room in range(200):
        assert threads.bell.of(room) == ["done 0", "done 1", "done 2", "drained"]
    assert len(set(threads.prepared)) == threads.settings.workers == 4
    assert set(threads.backend._threads.values()) == set(threads.prepared)
    threads.pool.stop()


@pytest.mark.hazard("handle-release")
def test_start_and_stop_twenty_times() -> None:
    """Guards against threads that outlive their pool, and a second stop that hangs."""
    before = threading.active_count()
    for _ in range(20):
        threads = Threads()
        threads.send(1)
        threads.pool.stop()
        threads.pool.stop()
        assert threads.pool.alive() == 0
        assert threads.bell.of(1) == ["done 0", "drained"] or threads.bell.of(1)[0] == "failed"
    assert threading.active_count() == before


def test_stop_without_start() -> None:
    """Guards against a server that fails early and then hangs or raises in its clean-up."""
    pool = TransferPool(Quick(), FakeRooms(), Settings(), AsyncTransferStats())
    pool.stop()
    assert pool.alive() == 0


@pytest.mark.hazard("handle-release")
def test_stop_gives_up_what_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a shutdown that waits for ever for a dead peer, or releases what is under way;
    the requests are told."""
    monkeypatch.setattr(send_queue, "NEVER_RELEASED", [])
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
    assert backend.handles == send_queue.NEVER_RELEASED and backend.released == 0


@pytest.mark.hazard("source-given-away", "racing-peer-tables", "slow-peer")
def test_the_scheduler_never_waits_for_a_post() -> None:
    """Guards against a lock that is held during a post: with the transport stuck in its call,
    everything that the scheduler calls returns, and other workers go on."""
    backend = Stuck()
    threads = Threads(backend)
    threads.send(0)
    assert backend.entered.wait(LONG_S)
    workers = [worker_of(room, threads.settings.workers) for room in range(50)]
    same = workers.index(workers[0], 1)
    other = next(room for room, worker in enumerate(workers) if worker != workers[0])
    threads.send(same)
    threads.send(other)
    assert threads.bell.over.get(timeout=LONG_S) == other
    for room in threads.rooms[same], threads.rooms[0]:
        threads.pool.cancel(room, Reason.ABORTED)
    assert threads.bell.of(0) == threads.bell.of(same) == []
    backend.go_on.set()
    assert {threads.bell.over.get(timeout=LONG_S) for _ in range(2)} == {0, same}
    assert same not in {post[0] for post in threads.backend.posts}
    threads.pool.stop()


@pytest.mark.hazard("exception-ends-worker")
def test_a_bug_in_a_command_or_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an exception that nobody thought of ending a thread, so that its share of all
    rooms hangs for ever."""
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
    assert threads.bell.over.get(timeout=LONG_S) == 1 and raised.is_set()
    assert threads.pool.alive() == 1
    threads.pool.stop()


class Stuck(Quick):
    """Hangs in the post of room 0 until a test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def post(self, chunk: Chunk, peer: str) -> Iterator[Handle]:
        if chunk.room == 0:
            self.entered.set()
            assert self.go_on.wait(LONG_S)
        yield from super().post(chunk, peer)


class Failed(list[tuple[int, str]]):
    """The listener of a room table: the rooms that failed, and why."""

    def fail_known(self, room: int, text: str) -> bool:
        if room not in dict(self):
            self.append((room, text))
        return False

    def room_stopped(self, room: Room, kind: Reason) -> None:
        assert kind is Reason.INTERNAL

    def room_drained(self, room: int, reason: str, announcements: list[object]) -> None:
        pass

    def room_delivered(self, room: int) -> None:
        raise AssertionError(room)


def watched(threads: Threads, numbers: range) -> tuple[Watchdog, RoomTable, list[Room], Failed]:
    """A watchdog over a pool, with requests of these rooms and what it fails."""
    failed = Failed()
    table = RoomTable(failed)
    rooms = [table.claim(number)[0] for number in numbers]
    return Watchdog(threads.pool, table), table, rooms, failed


@pytest.mark.hazard("exception-ends-worker")
def test_a_worker_that_hangs_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against rooms that wait for ever for a worker stuck in a call of the transport: they
    fail with its name, rooms of others do not, and it serves again when it goes on."""
    now = [0.0]
    backend = Stuck()
    threads = Threads(backend, clock=lambda: time.monotonic() + now[0])
    watchdog, table, rooms, failed = watched(threads, range(20))
    assert table.enter(rooms[0]), "its worker is about to hang with a write of it"
    threads.send(0)
    assert backend.entered.wait(LONG_S)
    watchdog.tick()
    now[0] += threads.settings.stuck_s / 2
    watchdog.tick()
    assert failed == [] and caplog.text == ""
    counted = STATS.totals["kv_transfer_stuck_workers"]
    now[0] += threads.settings.stuck_s / 2 + 1
    workers = threads.settings.workers
    index = worker_of(0, workers)
    theirs = [number for number in range(20) if worker_of(number, workers) == index]
    for _ in range(3):
        watchdog.tick()
    assert [room for room, _ in failed] == theirs and len(theirs) < len(rooms)
    assert STATS.totals["kv_transfer_stuck_workers"] == counted + 1
    name = f"kv-transfer-{index}"
    assert all(f"transfer worker {name} hangs in a call" in text for _, text in failed)
    assert caplog.text.count(f"{name} hangs in a call of the transport for 31 s") == 1
    assert [room.number for room in rooms if room.is_over] == theirs
    late, _ = table.claim(100 + next(r for r in range(20) if worker_of(100 + r, workers) == index))
    watchdog.tick()
    assert late.is_over, "one that came since then"
    backend.go_on.set()
    assert threads.bell.over.get(timeout=LONG_S) == 0
    threads.pool.stop()
    watchdog.tick()
    assert f"worker {index} makes progress again" in caplog.text


@pytest.mark.hazard("exception-ends-worker")
def test_a_process_that_was_stopped() -> None:
    """Guards against rooms that fail because the whole process did not run, or the thread that
    looks was kept waiting with the worker: the worker goes on at once."""
    now = [0.0]
    backend = Stuck()
    threads = Threads(backend, clock=lambda: time.monotonic() + now[0])
    watchdog, _, rooms, failed = watched(threads, range(20))
    threads.send(0)
    assert backend.entered.wait(LONG_S)
    watchdog.tick()
    now[0] += 3600
    watchdog.tick()  # first
    backend.go_on.set()
    assert threads.bell.over.get(timeout=LONG_S) == 0
    deadline = time.monotonic() + LONG_S
    while threads.pool.troubles():
        assert time.monotonic() < deadline
    watchdog.tick()
    assert failed == [] and not any(room.is_over for room in rooms)
    threads.pool.stop()


def test_a_worker_that_is_dead_or_raises_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a thread that is gone, or whose every step raises, and that nobody misses."""
    now = [0.0]
    threads = Threads(queues=2, threads=2, clock=lambda: time.monotonic() + now[0])
    raises, dies = (each._worker for each in threads.pool._threads)
    raised, dead = threading.Event(), threading.Event()

    def step(now: float) -> float | None:
        if threads.pool._threads[0]._error is not None:  # the step before this one
            raised.set()
        raise AssertionError("a bug")

    def die(now: float) -> float | None:
        dead.set()
        raise SystemExit

    monkeypatch.setattr(raises, "step", step)
    monkeypatch.setattr(dies, "step", die)
    for index in range(2):
        threads.pool._threads[index].put(lambda worker: None)
    assert raised.wait(LONG_S) and dead.wait(LONG_S)
    threads.pool._threads[1].thread.join(LONG_S)
    assert threads.pool.troubles() == {1: "kv-transfer-1 has ended"}
    now[0] += 31
    text = "each step of kv-transfer-0 raises, the last one AssertionError('a bug')"
    assert threads.pool.troubles() == {0: text, 1: "kv-transfer-1 has ended"}
    threads.pool.stop(drain_s=0.0)


def test_an_idle_worker_is_not_stuck() -> None:
    """Guards against rooms of a quiet server that fail because their worker had nothing to do."""
    now = [0.0]
    threads = Threads(clock=lambda: time.monotonic() + now[0])
    threads.send(1)
    assert threads.bell.over.get(timeout=LONG_S) == 1
    deadline = time.monotonic() + LONG_S
    while any(each._busy_since is not None for each in threads.pool._threads):
        assert time.monotonic() < deadline
    now[0] += 3600
    assert threads.pool.troubles() == {}
    threads.pool.stop()

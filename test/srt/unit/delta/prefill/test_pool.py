"""The transfer threads: start, distribution of rooms, watch and stop; with real threads and
gates."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.observability import STATS, TransferGauges
from sglang.srt.disaggregation.delta.prefill import transfer_pool
from sglang.srt.disaggregation.delta.prefill.rooms import Room
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Chunk,
    TransferSettings,
    TransferState,
)
from sglang.srt.disaggregation.delta.prefill.transfer_pool import TransferPool, worker_of
from unit.delta.prefill.rig import Handle, Script, Side, Transport

#: Timeout that only failing tests reach.
LONG_S = 30.0


class Gated(Transport):
    """Delivers at once, unless ``held``; hangs in the post of room 0 until a test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self.entered, self.go_on = threading.Event(), threading.Event()
        #: Serving threads, by room.
        self.threads: defaultdict[int, set[int]] = defaultdict(set)

    def post(self, chunk: Chunk, peer: str) -> Iterator[Handle]:
        self.threads[chunk.room].add(threading.get_ident())
        if chunk.room == 0:
            self.entered.set()
            assert self.go_on.wait(LONG_S)
        for handle in super().post(chunk, peer):
            if not self.held:
                handle.state = TransferState.DONE
            yield handle


class Threads(Side):
    """A rank with a pool of real threads."""

    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.transport, self.settings = Gated(), TransferSettings(**settings)
        self.workers: list[Any] = []
        self.prepared: list[int] = []
        #: Offset of the pool's clock in seconds.
        self.ahead_s = 0.0
        #: Rooms with no further writes, complete or stopped.
        self._over: queue.SimpleQueue[int] = queue.SimpleQueue()
        worker = transfer_pool.Worker
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                transfer_pool, "Worker", lambda *given: self.workers.append(worker(*given))
                or self.workers[-1]
            )  # fmt: skip
            self.pool = TransferPool(
                self.transport,
                self.table,
                self.settings,
                TransferGauges(),
                prepare_thread=lambda: self.prepared.append(threading.get_ident()),
                clock=lambda: time.monotonic() + self.ahead_s,
            )
        self.table.on_stopped = lambda room, kind: self.pool.cancel(room)
        self.sockets.send = lambda host, port, told: self._over.put(told.room)
        delivered = self.table.deliver

        def told(room: Room) -> None:
            delivered(room)
            self._over.put(room.number)

        self.table.deliver = told  # type: ignore[method-assign]

    def open(self, room: int) -> None:
        """Begin a request that decode has announced."""
        self.announce(room)
        assert self.claim(room) is None
        self.pool.open(self.requests[room])

    def send(self, room: int, chunks: int = 1) -> None:
        """Send a whole room."""
        self.open(room)
        now = time.monotonic()
        for index in range(chunks):
            last = index == chunks - 1
            self.pool.submit(Chunk(room, ("D",), Script(), last, now + LONG_S, now))

    def over(self) -> int:
        """Return the next room without writes in flight."""
        return self._over.get(timeout=LONG_S)

    def wait_until_idle(self) -> None:
        """Wait until no worker has work, however far ahead the clock is."""
        deadline = time.monotonic() + LONG_S
        while self.pool.troubles():
            assert time.monotonic() < deadline

    def same_worker(self, room: int, start: int) -> int:
        """Return a room number from ``start`` on, of the same worker."""
        count = self.settings.queues
        return next(n for n in range(start, 10**6) if worker_of(n, count) == worker_of(room, count))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stop wait for threads that a busy machine runs late."""
    monkeypatch.setattr(transfer_pool, "_JOIN_GRACE_S", LONG_S)


@pytest.fixture
def started() -> Iterator[Threads]:
    threads = Threads()
    threads.pool.start()
    yield threads
    threads.transport.go_on.set()
    threads.pool.stop(drain_s=0.0)
    assert threads.transport.misuse == []


@pytest.mark.hazard("chunks-overtake", "wrong-counts", "racing-peer-tables")
def test_rooms_on_several_threads() -> None:
    """Guards against chunks of one room on two threads, or out of order, rooms that get lost
    between queues, and threads that are not prepared."""
    threads, rooms = Threads(queues=4), range(1, 201)
    threads.pool.start()
    for room in rooms:
        threads.send(room, chunks=3)
    assert {threads.over() for _ in rooms} == set(rooms)
    threads.pool.stop()
    assert {threads.end(room) for room in rooms} == {"delivered"}
    for room in rooms:
        posted = [chunk.is_last for chunk, _ in threads.transport.posts if chunk.room == room]
        assert posted == [False, False, True] and len(threads.transport.threads[room]) == 1
    assert len(set(threads.prepared)) == threads.settings.queues == 4
    assert set().union(*threads.transport.threads.values()) == set(threads.prepared)
    assert threads.transport.misuse == []


def workers() -> int:
    """Return the number of transfer threads in this process. Other threads end at any time."""
    return sum(each.name.startswith("kv-transfer") for each in threading.enumerate())


@pytest.mark.hazard("handle-release")
def test_start_and_stop() -> None:
    """Guards against threads that outlive their pool, or whose end counts as an error, a second
    stop that hangs, and a server that fails before its start and then hangs in its clean-up."""
    before = workers()
    for is_started in (False, *[True] * 20):
        threads = Threads()
        if is_started:
            threads.pool.start()
            threads.send(1)
        for _ in range(2):
            threads.pool.stop()
        assert threads.pool.alive() == 0 and threads.pool.troubles() == {}
        if is_started:
            assert threads.end(1) in ("delivered", "over")
    assert workers() == before


@pytest.mark.hazard("handle-release")
def test_stop_gives_up_what_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a shutdown that waits for ever for a dead peer, or releases transfers in
    flight; the requests must be notified."""
    threads, posted = Threads(queues=1), threading.Event()
    threads.transport.held = True
    monkeypatch.setattr(
        TransferGauges, "level", lambda *_: posted.set() if threads.transport.posts else 0
    )
    threads.pool.start()
    threads.send(1)
    assert posted.wait(LONG_S)
    threads.pool.stop(drain_s=0.0)
    assert threads.pool.alive() == 0 and threads.end(1) == "stopped"
    assert threads.workers[0].busy == len(threads.transport.handles) == 1
    assert threads.transport.released == 0


@pytest.mark.hazard("source-given-away", "racing-peer-tables", "slow-peer")
def test_the_scheduler_never_waits_for_a_post(started: Threads) -> None:
    """Guards against a lock that is held during a post: with the transport stuck in its call, all
    calls of the scheduler must return, and other workers continue."""
    started.send(0)
    assert started.transport.entered.wait(LONG_S)
    same = started.same_worker(0, 1)
    other = next(n for n in range(1, 50) if started.same_worker(0, n) != n)
    started.send(same)
    started.send(other)
    assert started.over() == other
    for room in (same, 0):
        assert started.fail(room)
    assert (started.over(), started.end(0)) == (same, "stopped")
    started.transport.go_on.set()
    assert started.over() == 0
    assert same not in {chunk.room for chunk, _ in started.transport.posts}


@pytest.mark.hazard("exception-ends-worker")
def test_a_worker_that_raises(started: Threads) -> None:
    """Guards against an unexpected exception that ends a thread, so that its share of all rooms
    hangs for ever; and against an ended thread, or one whose every step raises, that is not
    noticed."""
    raises, dies = worker_of(1, 4), worker_of(started.same_worker(1, 2) + 1, 4)
    assert raises != dies
    step, steps, again = started.workers[raises].step, list[float](), threading.Event()

    def broken(now: float) -> float | None:
        steps.append(now)
        if len(steps) == 3:  # the command, a step, and the one after it
            again.set()
        raise AssertionError("a bug")

    def die(now: float) -> float | None:
        raise SystemExit

    started.workers[raises].step = broken  # type: ignore[method-assign]
    started.workers[dies].step = die  # type: ignore[method-assign]
    started.workers[raises].open = broken  # type: ignore[method-assign,assignment]
    started.open(1)  # a command that raises, and a step
    (ended,) = [it for it in threading.enumerate() if it.name == f"kv-transfer-{dies}"]
    started.send(started.same_worker(1, 2) + 1)
    ended.join(LONG_S)
    assert again.wait(LONG_S)
    del started.workers[raises].open
    assert started.pool.troubles() == {dies: f"{ended.name} has ended"}
    started.ahead_s += 31
    assert f"kv-transfer-{raises} has not finished a step for" in started.pool.troubles()[raises]
    started.workers[raises].step = step  # type: ignore[method-assign]
    later = started.same_worker(1, 100)
    started.send(later)
    assert started.over() == later and started.pool.alive() == 3


@pytest.mark.hazard("exception-ends-worker")
def test_a_worker_that_hangs_is_noticed(started: Threads, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against rooms that wait for ever for a worker stuck in a call of the transport: they
    must fail with its name, other workers' rooms must not, and it must serve again afterwards."""
    counted, failed = STATS.totals["kv_transfer_stuck_workers",], started.manager.failure_records
    for number in range(1, 20):
        started.claim(number)
    theirs = [number for number in range(20) if started.same_worker(0, number) == number]
    started.send(0)
    assert started.transport.entered.wait(LONG_S)
    for _ in range(2):
        started.pool.tick()
        assert failed == {} and caplog.text == ""
        started.ahead_s += started.settings.stuck_s / 2 + 0.5
    for _ in range(3):
        started.pool.tick()
    assert sorted(failed) == theirs and len(theirs) < 20
    assert STATS.totals["kv_transfer_stuck_workers",] == counted + 1
    name = f"kv-transfer-{worker_of(0, started.settings.queues)}"
    for text in failed.values():
        assert f"transfer worker {name} has not finished a step for" in text
    assert caplog.text.count(f"KV transfer worker {name} has not finished a step for") == 1
    assert [number for number in range(20) if started.requests[number].is_over] == theirs
    late = started.same_worker(0, 100)
    started.claim(late)
    started.pool.tick()
    assert started.requests[late].is_over, "a room that came later"
    assert started.requests[0].is_over and not started.transport.released
    started.transport.go_on.set()
    assert started.over() == 0
    started.wait_until_idle()
    started.pool.tick()
    assert "recovered after" in caplog.text


@pytest.mark.hazard("exception-ends-worker")
def test_a_process_that_was_stopped(started: Threads) -> None:
    """Guards against rooms that fail because the whole process did not run, the watching thread was
    delayed together with the worker, or the worker was idle for long."""
    for number in range(1, 20):
        started.claim(number)
    started.send(0)
    assert started.transport.entered.wait(LONG_S)
    started.pool.tick()
    started.ahead_s += 3600
    started.pool.tick()  # first
    started.transport.go_on.set()
    assert started.over() == 0
    started.wait_until_idle()
    for _ in range(2):
        started.pool.tick()
        started.ahead_s += 3600
    assert [*started.manager.failure_records] in ([], [0])

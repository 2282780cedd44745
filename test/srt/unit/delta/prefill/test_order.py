"""What is posted when: order within rooms, windows, quotas, peers that stall, and pauses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, State
from unit.delta.prefill.fakes import Bench, Script


def test_no_peers() -> None:
    """Guards against a rank that sends nothing (only dummies) waiting for ever, and against its
    chunk overtaking an earlier one."""
    bench = Bench()
    bench.open(1, 2)
    bench.worker.submit(_without_peers(bench, 1))
    assert bench.rooms.of(1) == ["done 0", "drained"]
    bench.submit(2)
    bench.worker.submit(_without_peers(bench, 2, index=1))
    assert bench.rooms.of(2) == []
    bench.run()
    bench.settle()
    assert bench.rooms.of(2) == ["done 0", "done 1", "drained"]


def _without_peers(bench: Bench, room: int, index: int = 0) -> Chunk:
    return Chunk(room, (), Script(index), True, bench.clock.now + 9, bench.clock.now)


@pytest.mark.hazard("writers-confused")
def test_several_peers_of_one_chunk() -> None:
    """Guards against the first peer that is done completing the chunk for all, and against a peer
    that is told to go on with a room which fails at another."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, "a", "b", "c", last=True, handles=2)
    bench.run()
    for peer in "abc":
        assert bench.rooms.of(1) == []
        for handle in bench.backend.open_handles(peer=peer):
            assert bench.rooms.of(1) == [] and bench.backend.completed == []
            handle.state = State.DONE
            bench.run(0.1)
    assert bench.rooms.of(1) == ["done 0", "drained"] and bench.backend.completed == [1]


@pytest.mark.hazard("slow-peer")
def test_quota_of_a_peer() -> None:
    """Guards against a stalled peer that delays others: its rooms wait in their order, all others'
    are posted, and it takes no more than its quota."""
    bench = Bench(window=8, quota=2)
    bench.open(*range(20))
    for room in range(10):
        bench.submit(room, "stalled")
        bench.submit(room, "stalled", last=True)
        bench.submit(10 + room, "healthy", last=True)
    done = 0
    for _ in range(10):
        bench.run()
        for handle in bench.backend.open_handles(peer="healthy"):
            handle.state = State.DONE
            done += 1
        bench.run(0.01)
    assert done == 10
    assert all(bench.rooms.of(10 + room) == ["done 0", "drained"] for room in range(10))
    assert len(bench.backend.open_handles(peer="stalled")) == 2
    bench.run(121)
    for room in range(10):
        reason, text = bench.rooms.failure(room)
        assert reason == "timeout" and "stalled" in text and "TRANSFER_TIMEOUT" in text
    assert all(bench.rooms.of(10 + room) == ["done 0", "drained"] for room in range(10))


def test_window_of_a_worker() -> None:
    """Guards against unbounded posting: the window holds, but for one transfer of a peer that has
    none."""
    bench = Bench(window=3, quota=2)
    bench.open(*range(30))
    for room in range(30):
        bench.submit(room, f"peer-{room % 6}", last=True)
    bench.run()
    by_peer = [len(bench.backend.open_handles(peer=f"peer-{peer}")) for peer in range(6)]
    assert by_peer == [1] * 6
    bench.backend.settle()
    bench.run(0.001)
    assert bench.worker.tables()["posted"] == 6
    while bench.backend.open_handles():
        bench.settle()
    assert len(bench.backend.handles) == 30
    bench.check()


@pytest.mark.hazard("slow-peer")
def test_stopped_peers_cannot_close_the_window() -> None:
    """Guards against several stopped peers taking all places of a worker between them."""
    bench = Bench(window=4, quota=4)
    bench.open(1, 2, 3)
    for _ in range(9):
        bench.submit(1, "stopped-1")
        bench.submit(2, "stopped-2")
    bench.run()
    assert len(bench.backend.handles) == 4
    for _ in range(5):
        bench.submit(3, "healthy")
        bench.run()
        assert len(bench.backend.open_handles(peer="healthy")) == 1
        bench.settle(3)
    assert bench.rooms.of(3) == [f"done {index}" for index in range(5)]


def test_turns_between_peers() -> None:
    """Guards against a long queue for one peer being served before the short one of another."""
    bench = Bench(window=64, quota=64)
    bench.open(1, 2)
    for _ in range(5):
        bench.submit(1, "a")
    for _ in range(2):
        bench.submit(2, "b")
    bench.run()
    assert [post[2] for post in bench.backend.posts] == ["a", "b", "a", "b", "a", "a", "a"]


@pytest.mark.hazard("chunks-overtake")
def test_chunks_of_one_room_are_posted_in_order() -> None:
    """Guards against a chunk overtaking another of its room while the peer's quota is used up."""
    bench = Bench(window=4, quota=1)
    bench.open(1, 2)
    for _ in range(6):
        bench.submit(1, "a", "b")
        bench.submit(2, "a")
    while bench.run() is not None:
        bench.settle()
    for room, peer in ((1, "a"), (1, "b"), (2, "a")):
        order = [p[1] for p in bench.backend.posts if p[0] == room and p[2] == peer]
        assert order == list(range(6))
    assert bench.rooms.of(1) == [f"done {index}" for index in range(6)]


def test_one_post_a_step() -> None:
    """Guards against a worker that cannot be told to cancel while it posts a long queue."""
    bench = Bench()
    bench.open(1, 2)
    bench.submit(1)
    bench.submit(2)
    assert bench.worker.step(bench.clock.now) == 0.0
    bench.cancel(2, Reason.ABORTED)
    bench.run()
    assert bench.backend.posts == [(1, 0, "a")]


@pytest.mark.hazard("spinning-workers")
def test_idle_worker_does_nothing() -> None:
    """Guards against an idle server that polls."""
    bench = Bench()
    assert bench.run() is None
    bench.open(1)
    bench.submit(1, last=True)
    bench.run()
    bench.settle()
    looks = bench.backend.looks
    assert bench.run() is None
    bench.run(3600)
    assert bench.backend.looks == looks


@pytest.mark.hazard("spinning-workers")
@pytest.mark.parametrize("transfers", [1, 8])
def test_pauses_while_something_is_under_way(transfers: int) -> None:
    """Guards against spinning on a transfer that takes long, with the interpreter's lock: a second
    of it costs some hundred questions, later ones a fraction, and many transfers are looked at
    together."""
    bench = Bench()
    bench.open(1)
    for _ in range(transfers):
        bench.submit(1)
    steps = _count_steps(bench)
    bench.run(1.0)
    assert 600 <= bench.backend.looks / transfers <= 750
    assert steps() <= 750 + transfers
    looks = bench.backend.looks
    bench.run(1.0)
    assert 600 <= (bench.backend.looks - looks) / transfers <= 640
    bench.run(8.1)
    looks = bench.backend.looks
    bench.run(1.0)
    assert 30 <= (bench.backend.looks - looks) / transfers <= 50


def _count_steps(bench: Bench) -> Callable[[], int]:
    taken = 0
    step = bench.worker.step

    def counted(now: float) -> float | None:
        nonlocal taken
        taken += 1
        return step(now)

    bench.worker.step = counted  # type: ignore[method-assign]
    return lambda: taken


def test_short_transfers_are_noticed_soon() -> None:
    """Guards against a pause that is long beside the transfer: looking late may add 50 us, or a
    sixteenth of the time that the transfer took."""
    for took in (10e-6, 100e-6, 1e-3, 5e-3, 12e-3):
        bench = Bench()
        bench.open(1)
        bench.submit(1, last=True)
        start = bench.clock.now
        bench.run(took)
        bench.backend.settle()
        wait = bench.run()
        assert wait is None or wait <= max(50e-6, took / 16) * 1.001
        bench.run(max(50e-6, took / 16))
        assert bench.rooms.of(1) == ["done 0", "drained"], took
        assert bench.clock.now - start <= took + max(50e-6, took / 16) * 1.001

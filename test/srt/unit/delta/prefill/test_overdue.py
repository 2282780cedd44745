"""Deadlines: of what waits, of what is under way, and what becomes of a transfer that misses it."""

from __future__ import annotations

import logging

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill import send_queue
from unit.delta.prefill.fakes import Bench


@pytest.mark.hazard("slow-peer", "dead-peer-leftovers")
def test_deadline_of_what_waits() -> None:
    """Guards against a chunk that waits for ever behind a stalled peer, and against a room that was
    cancelled being reported as late."""
    bench = Bench(quota=1)
    bench.open(1, 2, 3)
    bench.submit(1, within=1000.0)
    bench.run()
    bench.submit(2, within=5.0)
    bench.submit(3, within=5.0)
    bench.cancel(3, Reason.ABORTED)
    bench.run(4.9)
    assert bench.rooms.of(2) == []
    bench.run(0.2)
    reason, text = bench.rooms.failure(2)
    assert reason is Reason.TIMEOUT
    assert text.startswith("room 2: a chunk was not delivered to a (queued) within 5.0 s")
    assert bench.rooms.of(2) == ["failed", "drained"] and bench.rooms.of(3) == ["drained"]


@pytest.mark.hazard("siblings-write-on", "handle-release")
def test_deadline_of_what_is_under_way() -> None:
    """Guards against a handle that is released, or a room that is called quiet, because time ran
    out: it is waited for, rarely, and settles after all."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, "slow peer", within=5.0)
    bench.run(6)
    assert bench.rooms.of(1) == ["failed", "overdue"]
    assert "slow peer (posted)" in bench.rooms.failure(1)[1]
    looks = bench.backend.looks
    bench.run(100)
    assert 480 <= bench.backend.looks - looks <= 490 and bench.backend.released == 0
    assert bench.rooms.busy == {1}
    bench.settle()
    assert bench.rooms.of(1) == ["failed", "overdue", "drained"] and bench.rooms.busy == set()
    bench.forget(1)
    bench.check_empty()


def test_cancelled_and_overdue() -> None:
    """Guards against a cancelled request that waits for ever for what does not settle."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, within=5.0)
    bench.run()
    bench.submit(1, within=9.0)
    bench.run()
    bench.cancel(1, Reason.ABORTED)
    bench.run(6)
    assert bench.rooms.of(1) == []  # the second one has time left
    bench.run(4)
    assert bench.rooms.of(1) == ["overdue"]
    bench.settle()
    assert bench.rooms.of(1) == ["overdue", "drained"]


@pytest.mark.hazard("slow-peer")
def test_overdue_transfers_do_not_use_up_the_window() -> None:
    """Guards against a peer that never answers taking the worker's places with it, and against it
    getting more than one place to try, deadline after deadline."""
    bench = Bench(window=4, quota=3)
    for batch in range(10):
        for room in range(10 * batch, 10 * batch + 10):
            bench.open(room)
            bench.submit(room, "dead", within=1.0)
        bench.run(2)
        assert len(bench.backend.open_handles()) == 3 + batch
    bench.open(*range(100, 110))
    for room in range(100, 110):
        bench.submit(room, "b", last=True)
    bench.run()
    assert len(bench.backend.open_handles(peer="b")) == 3
    for room in range(99):
        bench.forget(room)
    assert bench.worker.tables()["rooms"] == 11


@pytest.mark.hazard("slow-peer")
def test_a_peer_that_comes_back() -> None:
    """Guards against overdue transfers that take a peer's quota for good: some never settle, also
    after the peer registered again."""
    bench = Bench(quota=8)
    bench.open(*range(8))
    for room in range(8):
        bench.submit(room, within=1.0)
    bench.run(2)
    assert bench.worker.tables()["overdue"] == 8
    rooms = range(8, 28)
    bench.open(*rooms)
    for room in rooms:
        bench.submit(room, last=True)
    bench.run()
    assert len(bench.backend.open_handles(8)) == 1 and len(bench.backend.handles) == 9
    bench.settle(8)
    assert len(bench.backend.handles) == 17, "it is back: its whole quota"
    for room in rooms:
        bench.settle(room)
    assert all(bench.rooms.of(room) == ["done 0", "drained"] for room in rooms)
    bench.settle()
    for room in range(28):
        bench.forget(room)
    bench.check_empty()


def test_too_many_overdue_transfers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against looking at ever more dead transfers, against releasing one that is under way,
    and against giving up without a word: its room is never said to be quiet."""
    monkeypatch.setattr(send_queue, "NEVER_RELEASED", [])
    bench = Bench(overdue=2)
    bench.open(1, 2, 3)
    for room in (1, 2, 3):
        bench.submit(room, f"peer-{room}", within=room)
    with caplog.at_level(logging.ERROR):
        bench.run(10)
    assert "peer-1 has not settled" in caplog.text
    assert bench.worker.tables()["overdue"] == 2
    assert [bench.backend.handles[0]] == send_queue.NEVER_RELEASED
    bench.settle()
    assert bench.rooms.of(1) == ["failed", "overdue"] and bench.rooms.busy == {1}
    assert bench.rooms.of(2) == bench.rooms.of(3) == ["failed", "overdue", "drained"]
    assert [handle.releases for handle in bench.backend.handles] == [0, 1, 1]
    assert bench.worker.tables()["peers"] == 0
    bench.check()


def test_after_a_suspension() -> None:
    """Guards against failing what was delivered while this process did not run: transfers are
    looked at before deadlines are."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, last=True, within=5.0)
    bench.run()
    bench.backend.settle()
    bench.clock.now += 100
    bench.run()
    assert bench.rooms.of(1) == ["done 0", "drained"]

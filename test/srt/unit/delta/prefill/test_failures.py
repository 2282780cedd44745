"""Rooms that end early: what raises, what breaks, what is cancelled, and when they are quiet."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill import send_queue
from sglang.srt.disaggregation.delta.prefill.send_queue import Transfer
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Settings, State, TransferError
from unit.delta.prefill.fakes import Bench


@pytest.mark.hazard("exception-ends-worker", "peer-lost-for-ever")
def test_a_post_that_raises() -> None:
    """Guards against one room's exception ending the worker or another room: the next chunk of the
    same peer is served, also of the next request with the same number."""
    bench = Bench()
    bench.open(1, 2)
    error = RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
    bench.submit(1, error=error, handles=0)
    bench.submit(1, last=True)
    bench.submit(2, last=True)
    bench.run()
    reason, text = bench.rooms.failure(1)
    assert reason is Reason.TRANSPORT
    assert "room 1" in text and "to a " in text and "REMOTE_DISCONNECT" in text
    assert bench.rooms.entries[0][4] is error
    assert bench.rooms.of(1) == ["failed", "drained"]
    bench.settle()
    assert bench.rooms.of(2) == ["done 0", "drained"]
    bench.forget(1)
    bench.open(1)
    bench.submit(1, last=True)
    bench.run()
    bench.settle()
    assert bench.rooms.of(1)[2:] == ["done 2", "drained"]
    bench.forget(1)
    bench.forget(2)
    bench.check_empty()


def test_a_backend_names_its_reason() -> None:
    """Guards against a mismatch being counted as a fault of the transport."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, error=TransferError(Reason.MISMATCH, "5 pages for 3"))
    bench.run()
    reason, text = bench.rooms.failure(1)
    assert reason is Reason.MISMATCH and text.endswith("5 pages for 3")


@pytest.mark.hazard("handle-release", "siblings-write-on")
def test_handles_of_a_post_that_raised_halfway_are_waited_for() -> None:
    """Guards against telling decode that a room is quiet while what was posted before the exception
    still writes."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, "a", "b", handles=2, error=RuntimeError("state refused"), last=True)
    bench.run(1.0)
    assert bench.rooms.of(1) == ["failed"] and bench.rooms.busy == {1}
    assert [post[2] for post in bench.backend.posts] == ["a"]
    bench.backend.handles[0].state = State.DONE
    bench.run(1.0)
    assert bench.rooms.of(1) == ["failed"] and bench.backend.released == 0
    bench.settle()
    assert bench.rooms.of(1) == ["failed", "drained"] and bench.rooms.busy == set()
    bench.forget(1)
    bench.check_empty()


@pytest.mark.hazard("siblings-write-on", "poll-raises")
@pytest.mark.parametrize("broken", [State.ERROR, RuntimeError("remote disconnect")])
def test_done_under_way_and_broken(broken: State | Exception) -> None:
    """Guards against quiet, or a release, while one of three handles is under way, and against an
    error of the question ending more than its room."""
    bench = Bench()
    bench.open(1, 2)
    bench.submit(1, handles=3)
    bench.submit(2, last=True)
    bench.run()
    done, under_way, error = bench.backend.handles[:3]
    done.state, error.state = State.DONE, broken
    bench.run(1.0)
    assert bench.rooms.of(1) == ["failed"] and bench.rooms.busy == {1, 2}
    assert bench.rooms.failure(1)[0] is Reason.TRANSPORT
    assert bench.backend.released == 0
    under_way.state = State.DONE
    bench.run(1.0)
    # What the transport broke off may still land: nobody is told that it is quiet.
    assert bench.rooms.of(1) == ["failed", "overdue"] and bench.backend.released == 0
    assert 1 in bench.rooms.busy and bench.rooms.completed == set()
    bench.let_doubt_pass()
    assert bench.rooms.of(1) == ["failed", "overdue", "drained"] and bench.backend.released == 3
    bench.settle()
    assert bench.rooms.of(2) == ["done 0", "drained"]
    bench.check()


def test_peers_that_cannot_be_told() -> None:
    """Guards against a room that counts as delivered although a peer does not know that it is, and
    against a gate that will not let it fail."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, last=True, complete_error=RuntimeError("no note"))
    bench.run()
    bench.settle()
    assert bench.rooms.of(1) == ["failed", "drained"] and bench.rooms.completed == set()
    assert "a could not be notified that it is complete: RuntimeError" in bench.rooms.failure(1)[1]
    bench.forget(1)
    bench.check_empty()


@pytest.mark.hazard("source-given-away")
@pytest.mark.parametrize("how", ["overdue", "cancelled", "stopped at the gate", "sibling broke"])
def test_a_room_that_was_given_up_is_never_complete(how: str) -> None:
    """Guards against a write that lands late and completes a room that failed here, whose source
    pages others have by then."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, "a", "b", last=True, within=5.0)
    bench.run()
    first, second = bench.backend.handles
    if how == "overdue":
        bench.run(6)
    elif how == "cancelled":
        bench.cancel(1, Reason.ABORTED)
    elif how == "stopped at the gate":
        bench.rooms.stopped.add(1)
    else:
        first.state = State.ERROR
        bench.run(1)
    bench.settle()
    bench.let_doubt_pass()
    assert bench.backend.completed == [] and bench.rooms.completed == set()
    assert bench.rooms.of(1)[-1] == "drained" and "done 0" not in bench.rooms.of(1)
    assert second.releases == 1
    bench.forget(1)
    bench.check_empty()


@pytest.mark.hazard("siblings-write-on")
def test_nobody_believes_that_siblings_of_a_lost_connection_are_over() -> None:
    """After one disconnect every other handle of that peer raises, while its writes may be under
    way. Guards against decode being told that its pages are free."""
    bench = Bench()
    bench.open(1, 2)
    bench.submit(1, last=True)
    bench.submit(2, last=True)
    bench.run()
    for handle, error in zip(
        bench.backend.handles, ("REMOTE_DISCONNECT", "NOT_FOUND"), strict=True
    ):
        handle.state = RuntimeError(error)
    bench.run(Settings.doubt_s - 1)
    for room in (1, 2):
        assert bench.rooms.of(room) == ["failed", "overdue"], "the request goes; decode waits"
    assert bench.rooms.busy == {1, 2} and bench.backend.released == 0
    bench.run(2)
    assert bench.rooms.busy == set() and bench.backend.released == 2
    bench.forget(1)
    bench.forget(2)
    bench.check_empty()


@pytest.mark.hazard("exception-ends-worker")
def test_a_bug_fails_its_own_room_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a worker that trips over one transfer again and again, and never looks at
    those behind it."""
    monkeypatch.setattr(send_queue, "NEVER_RELEASED", [])
    bench = Bench()
    bench.open(1, 2, 3)
    for room in (1, 2):
        bench.submit(room, last=True)
    bench.run()
    look = bench.worker._poll

    def trips(transfer: Transfer, now: float) -> None:
        if transfer.room.number == 1:
            raise AssertionError("a bug")
        look(transfer, now)

    monkeypatch.setattr(bench.worker, "_poll", trips)
    bench.settle()
    reason, text = bench.rooms.failure(1)
    assert (
        reason is Reason.INTERNAL
        and "unexpected error in transfer worker 0: AssertionError" in text
    )
    assert bench.rooms.of(1) == ["failed", "overdue"] and bench.rooms.of(2) == ["done 0", "drained"]
    assert bench.backend.completed == [2] and bench.rooms.busy == {1}, "it may still be written"
    bench.submit(3, last=True)
    bench.run()
    bench.settle()
    assert bench.rooms.of(3) == ["done 0", "drained"]
    assert bench.worker.tables() | {"rooms": 0} == dict.fromkeys(bench.worker.tables(), 0)
    bench.check()


def test_the_gate_stops_a_room() -> None:
    """Guards against a post after the gate said no, and against a room that is never quiet because
    nobody cancelled it here."""
    bench = Bench(quota=1)
    bench.open(1, 2)
    bench.submit(1)
    bench.submit(1, last=True)
    bench.submit(2, last=True)
    bench.run()
    bench.rooms.stopped.update({1, 2})
    bench.settle()
    assert bench.rooms.of(1) == ["done 0", "drained"] and bench.rooms.of(2) == ["drained"]
    assert len(bench.backend.posts) == 1 and bench.backend.completed == []
    bench.forget(1)
    bench.forget(2)
    bench.check_empty()


@pytest.mark.parametrize("lands", [False, True])
def test_a_gate_that_raises(lands: bool) -> None:
    """Guards against a room that hangs because its gate raised, before a post or after landing."""
    bench = Bench()
    bench.open(1)

    def broken(room: int) -> bool:
        raise RuntimeError("gate")

    if not lands:
        bench.rooms.enter = broken  # type: ignore[method-assign]
    bench.submit(1, last=True)
    bench.run()
    bench.rooms.complete = broken  # type: ignore[method-assign]
    bench.settle()
    assert bench.backend.completed == []
    assert bench.rooms.of(1) == ["failed", "drained"]
    bench.forget(1)
    bench.check_empty()


def test_observers_that_raise() -> None:
    """Guards against a callback's exception that stops the worker or loses the next callback."""
    bench = Bench()
    bench.open(1, 2)

    def broken(*_: object) -> None:
        raise RuntimeError("observer")

    bench.rooms.chunk_done = bench.rooms.room_failed = broken  # type: ignore[method-assign]
    bench.submit(1, last=True)
    bench.submit(2, error=RuntimeError("post"))
    bench.run()
    bench.settle()
    assert bench.rooms.of(1) == ["drained"] and bench.rooms.of(2) == ["drained"]


@pytest.mark.hazard("handle-release")
def test_a_release_that_raises() -> None:
    """Guards against a handle that is released again because its release raised."""
    bench = Bench()
    bench.open(1)
    calls = []

    def broken(handle: object) -> None:
        calls.append(handle)
        raise RuntimeError("release")

    bench.backend.release = broken  # type: ignore[method-assign]
    bench.submit(1, handles=2, last=True)
    bench.run()
    bench.settle()
    assert calls == bench.backend.handles and bench.rooms.of(1) == ["done 0", "drained"]


def test_stop() -> None:
    """Guards against requests that wait for a worker which is stopping, and against taking in
    more."""
    bench = Bench(quota=1)
    bench.open(1, 2)
    bench.submit(1)
    bench.run()
    bench.submit(2)
    bench.worker.stop()
    bench.open(3)
    bench.submit(3)
    assert bench.rooms.of(1) == ["failed"] and bench.rooms.of(2) == ["failed", "drained"]
    assert bench.worker.busy
    bench.settle()
    assert not bench.worker.busy and bench.rooms.of(1) == ["failed", "drained"]
    assert len(bench.backend.posts) == 1 and bench.worker.give_up() == 0


def test_failures_are_counted_once_by_reason() -> None:
    """Guards against a failure that is counted for every chunk, or under another reason."""
    bench = Bench()
    bench.open(1, 2, 3)
    bench.submit(1, error=RuntimeError())
    bench.submit(1)
    bench.submit(2, within=1.0)
    bench.submit(3)
    bench.run()
    bench.cancel(3, Reason.PEER_LOST)
    bench.cancel(3, Reason.ABORTED)
    bench.run(2)
    counted = {reason: count for reason, count in bench.stats.failures.items() if count}
    assert counted == {Reason.TRANSPORT: 1, Reason.TIMEOUT: 1, Reason.PEER_LOST: 1}

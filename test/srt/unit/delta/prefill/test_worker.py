"""One transfer worker, by named examples: how a room ends on it, who waits for whom, and how often
it looks. Random lives of many rooms are in ``test_state_machine.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill import send_queue
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Settings, State, TransferError
from unit.delta.prefill.fakes import Bench

ERROR = ZeroDivisionError("the transport's")

# ---- how a room ends ----


def broken_off(bench: Bench) -> None:
    bench.backend.handles[0].state = State.ERROR


def raises_at_a_look(bench: Bench) -> None:
    bench.backend.handles[0].state = ERROR


def takes_too_long(bench: Bench) -> None:
    bench.run(6)


def cancelled(bench: Bench) -> None:
    for _ in range(2):
        bench.cancel(1, Reason.PEER_LOST)


def cancelled_and_too_long(bench: Bench) -> None:
    bench.cancel(1, Reason.PEER_LOST)
    assert bench.rooms.of(1) == []
    bench.run(6)


def forgotten(bench: Bench) -> None:
    bench.forget(1)


def stopped_by_the_table(bench: Bench) -> None:
    bench.rooms.stopped.add(1)


def raise_once(owner: object, name: str, error: Exception = ERROR) -> None:
    """The next call of this method raises."""
    call = getattr(owner, name)

    def raises(*arguments: object) -> None:
        setattr(owner, name, call)
        raise error

    setattr(owner, name, raises)


def the_table_raises(bench: Bench) -> None:
    raise_once(bench.rooms, "complete")


def the_table_raises_at_first(bench: Bench) -> None:
    raise_once(bench.rooms, "enter")


def the_backend_refuses(bench: Bench) -> None:
    raise_once(bench.backend, "post", TransferError(Reason.MISMATCH, "5 pages for 3"))


@dataclass(frozen=True)
class End:
    """A way in which room 1 ends early."""

    #: What the room table is told of it, in order.
    told: list[str]
    reason: Reason | None = None
    text: str = ""
    #: Of its chunk: what the backend does with it.
    script: dict[str, Any] = field(default_factory=dict)
    #: Before it is posted, and while it is under way.
    first: Callable[[Bench], None] | None = None
    then: Callable[[Bench], None] | None = None


FAILED, LATE = ["failed", "drained"], ["failed", "overdue", "drained"]
ENDS = {
    "its post raises": End(
        FAILED, Reason.TRANSPORT, f"room 1: a transfer to a could not be posted: {ERROR!r}",
        {"error": ERROR, "handles": 0},
    ),
    "its post raises half way": End(
        FAILED, Reason.TRANSPORT, "a could not be posted", {"error": ERROR, "handles": 2}
    ),
    "the backend names the reason": End(
        FAILED, Reason.MISMATCH, "a could not be posted: 5 pages for 3", first=the_backend_refuses
    ),
    "decode cannot be told": End(
        FAILED, Reason.TRANSPORT, f"a, b could not be notified that it is complete: {ERROR!r}",
        {"complete_error": ERROR},
    ),
    "broken off": End(LATE, Reason.TRANSPORT, "failed in the transport", then=broken_off),
    "raises at a look": End(
        LATE, Reason.TRANSPORT, f"a transfer to a failed in the transport: {ERROR!r}",
        then=raises_at_a_look,
    ),
    "late": End(
        LATE, Reason.TIMEOUT, "not delivered to a (posted), b (posted) within 5.0 s",
        then=takes_too_long,
    ),
    "cancelled": End(["drained"], Reason.PEER_LOST, then=cancelled),
    "cancelled, and late": End(
        ["overdue", "drained"], Reason.PEER_LOST, then=cancelled_and_too_long
    ),
    "forgotten": End([], then=forgotten),
    "stopped": End(["drained"], then=stopped_by_the_table),
    "stopped at first": End(["drained"], first=stopped_by_the_table),
    "the table raises": End(FAILED, Reason.TRANSPORT, repr(ERROR), then=the_table_raises),
    "the table raises at first": End(
        FAILED, Reason.TRANSPORT, repr(ERROR), first=the_table_raises_at_first
    ),
}  # fmt: skip


@pytest.mark.hazard("exception-ends-worker", "peer-lost-for-ever", "source-given-away")
@pytest.mark.parametrize("how", ENDS)
def test_a_room_ends_early(how: str) -> None:
    """Guards against an end that costs another room or the next one of its number, that is told
    twice or without its cause, and against a late write that completes a room which was given
    up."""
    end, bench = ENDS[how], Bench()
    bench.open(1, 2)
    if end.first is not None:
        end.first(bench)
    bench.submit(1, "a", "b", last=True, within=5.0, **end.script)
    bench.submit(2, last=True)
    bench.run()
    if end.then is not None:
        end.then(bench)
    bench.settle()
    bench.let_doubt_pass()
    assert bench.rooms.of(1) == end.told and bench.rooms.of(2) == ["done 0", "drained"]
    assert bench.rooms.completed == {2} and bench.backend.completed == [2]
    if "failed" in end.told:
        (failed,) = [entry for entry in bench.rooms.entries if entry[0] == "failed"]
        assert failed[2] is end.reason and end.text in failed[3]
        if end.reason is Reason.MISMATCH:
            assert isinstance(failed[4], TransferError)
        else:
            is_raised = "error" in end.script or repr(ERROR) in end.text
            assert failed[4] is (ERROR if is_raised else None)
    counted = {reason: count for reason, count in bench.stats.failures.items() if count}
    assert counted == ({end.reason: 1} if end.reason else {})
    began = len(bench.backend.handles)
    bench.forget(1)
    bench.rooms.stopped.clear()
    bench.open(1)
    bench.submit(1, last=True)
    bench.run()
    bench.settle()
    assert bench.rooms.of(1)[len(end.told) :] == ["done 1", "drained"]
    assert len(bench.backend.handles) == began + 1
    bench.forget(1)
    bench.forget(2)
    bench.check_empty()


@pytest.mark.hazard("siblings-write-on", "poll-raises", "handle-release")
@pytest.mark.parametrize("broken", [State.ERROR, ERROR])
def test_what_was_broken_off_may_still_land(broken: State | Exception) -> None:
    """After one disconnect every other handle of that peer raises, while its writes may be under
    way. Guards against decode being told that its pages are free, against a release while one of
    three handles is under way, and against a chunk behind it that is sent."""
    bench = Bench(quota=1)
    bench.open(1)
    bench.submit(1, handles=3)
    bench.submit(1, last=True)
    bench.run()
    done, under_way, error = bench.backend.handles
    done.state, error.state = State.DONE, broken
    bench.run(1.0)
    assert bench.rooms.of(1) == ["failed"] and bench.backend.released == 0
    under_way.state = State.DONE
    bench.run(Settings.doubt_s - 2)
    assert bench.rooms.of(1) == ["failed", "overdue"], "the request goes; decode waits"
    assert bench.rooms.busy == {1} and bench.backend.released == 0
    bench.run(2)
    assert bench.rooms.of(1) == LATE and bench.rooms.busy == set()
    assert len(bench.backend.posts) == 1
    bench.forget(1)
    bench.check_empty()


@pytest.mark.hazard("slow-peer", "dead-peer-leftovers", "siblings-write-on", "handle-release")
def test_deadlines() -> None:
    """Guards against a chunk that waits for ever behind a stalled peer; and against a handle that
    is released, or a room that is called quiet, because time ran out: it is waited for, rarely."""
    bench = Bench(quota=1)
    bench.open(1, 2)
    bench.submit(1, "slow", within=5.0)
    bench.submit(2, "slow", within=5.0)
    bench.run(4.9)
    assert bench.rooms.entries == []
    bench.run(0.2)
    assert "slow (posted) within 5.0 s" in bench.rooms.failure(1)[1]
    reason, text = bench.rooms.failure(2)
    assert reason is Reason.TIMEOUT and "TRANSFER_TIMEOUT" in text
    assert text.startswith("room 2: a chunk was not delivered to slow (queued) within 5.0 s")
    assert bench.rooms.of(1) == ["failed", "overdue"] and bench.rooms.of(2) == FAILED
    looks = bench.backend.looks
    bench.run(100)
    assert 480 <= bench.backend.looks - looks <= 505 and bench.backend.released == 0
    assert bench.rooms.busy == {1}
    bench.settle()
    assert bench.rooms.of(1) == LATE and bench.rooms.busy == set()


@pytest.mark.hazard("exception-ends-worker")
def test_a_bug_costs_its_own_room() -> None:
    """Guards against a worker that trips over one transfer again and again, and never looks at
    those behind it; and against a word that nothing is written, which a bug cannot know."""
    bench = Bench()
    bench.open(1, 2)
    raise_once(bench.stats, "queued")
    bench.submit(1, last=True)
    bench.submit(2, last=True)
    bench.run()
    bench.settle()
    reason, text = bench.rooms.failure(1)
    assert reason is Reason.INTERNAL
    assert "unexpected error in transfer worker 0: ZeroDivisionError" in text
    assert bench.rooms.of(1) == ["failed", "overdue"] and bench.rooms.of(2) == ["done 0", "drained"]
    assert bench.rooms.busy == {1}
    assert bench.worker.tables() | {"rooms": 0} == dict.fromkeys(bench.worker.tables(), 0)
    bench.check()


@pytest.mark.hazard("handle-release", "exception-ends-worker")
def test_what_else_raises() -> None:
    """Guards against a callback's or a release's exception that stops the worker, loses the next
    callback, or has a handle released again."""
    bench = Bench()
    bench.open(1, 2)
    calls: list[object] = []

    def broken(handle: object, *_: object) -> None:
        calls.append(handle)
        raise RuntimeError("broken")

    bench.rooms.chunk_done = bench.rooms.room_failed = broken  # type: ignore[method-assign]
    bench.backend.release = broken  # type: ignore[method-assign]
    bench.submit(1, handles=2, last=True)
    bench.submit(2, error=ERROR, handles=0)
    bench.run()
    bench.settle()
    assert bench.rooms.of(1) == bench.rooms.of(2) == ["drained"]
    assert [each for each in calls if each in bench.backend.handles] == bench.backend.handles


@pytest.mark.hazard("handle-release")
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
    assert bench.rooms.of(1) == ["failed"] and bench.rooms.of(2) == FAILED
    assert bench.worker.busy
    bench.settle()
    assert not bench.worker.busy and bench.rooms.of(1) == FAILED
    assert len(bench.backend.posts) == 1 and bench.worker.give_up() == 0


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


# ---- who waits for whom ----


def test_turns_between_peers() -> None:
    """Guards against a long queue for one peer that is served before another's short one, and
    against a worker that cannot be told to cancel while it posts a long queue."""
    bench = Bench(window=64, quota=64)
    bench.open(1, 2, 3)
    for _ in range(4):
        bench.submit(1, "a")
    bench.submit(2, "b")
    bench.submit(3, "b")
    assert bench.worker.step(bench.clock.now) == 0.0
    bench.cancel(3, Reason.ABORTED)
    bench.run()
    assert [peer for _, _, peer in bench.backend.posts] == ["a", "b", "a", "a", "a"]


@pytest.mark.hazard("slow-peer")
def test_a_window_that_is_full() -> None:
    """Guards against unbounded posting, and against stopped peers that take all places between
    them: a peer that has nothing under way may always post one."""
    bench = Bench(window=4, quota=4)
    bench.open(1, 2, 3)
    for _ in range(9):
        for room, peer in enumerate(("stopped-1", "stopped-2", "healthy"), 1):
            bench.submit(room, peer)
    for count in range(9):
        bench.run()
        under_way = [peer for _, _, peer in bench.backend.posts]
        assert under_way.count("healthy") == count + 1
        assert len(bench.backend.open_handles(peer="healthy")) == 1
        bench.settle(3)
    assert len(bench.backend.open_handles()) == 4
    assert bench.rooms.of(3) == [f"done {index}" for index in range(9)]


@pytest.mark.hazard("slow-peer", "peer-lost-for-ever")
def test_a_dead_peer_that_comes_back() -> None:
    """Guards against overdue transfers that take a worker's window or a peer's quota for good, and
    against a dead peer that gets more than one place to try, deadline after deadline."""
    bench = Bench(window=8, quota=3)
    for batch in range(10):
        for room in range(10 * batch, 10 * batch + 10):
            bench.open(room)
            bench.submit(room, "dead", within=1.0)
        bench.run(2)
        assert len(bench.backend.open_handles()) == 3 + batch
    for room in range(99):
        bench.forget(room)
    assert bench.worker.tables()["rooms"] == 1
    bench.open(*range(100, 112))
    for room in range(100, 112):
        bench.submit(room, "dead", last=True)
    bench.run()
    bench.settle(100)
    assert len(bench.backend.handles) == 12 + 1 + 3, "it is back: its whole quota"
    for room in range(100, 112):
        bench.settle(room)
        assert bench.rooms.of(room) == ["done 0", "drained"]
        bench.forget(room)
    bench.settle()
    bench.forget(99)
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
    assert bench.rooms.of(2) == bench.rooms.of(3) == LATE
    assert [handle.releases for handle in bench.backend.handles] == [0, 1, 1]
    assert bench.worker.tables()["peers"] == 0
    bench.check()


# ---- how often it looks ----


@pytest.mark.hazard("spinning-workers")
@pytest.mark.parametrize("transfers", [1, 8])
def test_pauses(transfers: int) -> None:
    """Guards against a worker that spins with the interpreter's lock, on nothing or on a transfer
    that takes long: a second of it costs some hundred looks, later ones a fraction, and many
    transfers are looked at together."""
    bench = Bench()
    assert bench.run() is None
    bench.open(1)
    for number in range(transfers):
        bench.submit(1, last=number == transfers - 1)
    start, steps, step = bench.clock.now, [], bench.worker.step

    def counted(now: float) -> float | None:
        steps.append(now)
        return step(now)

    bench.worker.step = counted  # type: ignore[method-assign]
    for seconds, least, most in ((1.0, 600, 750), (1.0, 600, 640), (8.1, 0, 9999), (1.0, 30, 50)):
        looks = bench.backend.looks
        bench.run(seconds)
        assert least <= (bench.backend.looks - looks) / transfers <= most
    in_the_first_second = [now for now in steps if now <= start + 1.0]
    assert len(in_the_first_second) <= 750 + transfers
    bench.settle()
    looks = bench.backend.looks
    bench.run(3600)
    assert bench.run() is None and bench.backend.looks == looks


@pytest.mark.parametrize("took", [10e-6, 100e-6, 1e-3, 5e-3, 12e-3])
def test_short_transfers_are_noticed_soon(took: float) -> None:
    """Guards against a pause that is long beside the transfer: looking late may add 50 us, or a
    sixteenth of the time that the transfer took."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, last=True)
    bench.run(took)
    bench.backend.settle()
    bench.run(max(50e-6, took / 16))
    assert bench.rooms.of(1) == ["done 0", "drained"]

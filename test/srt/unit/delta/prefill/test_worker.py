"""One transfer worker under a real room table, by named examples: the end of a room, waits between
rooms, and the rate of checks. Random lives of many rooms are in ``test_state_machine.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    TransferError,
    TransferSettings,
    TransferState,
)
from unit.delta.prefill.rig import ERROR, Bench

# ---- ends of a room ----


def broken_off(bench: Bench) -> None:
    bench.transport.handles[0].state = TransferState.ERROR


def raises_at_a_look(bench: Bench) -> None:
    bench.transport.handles[0].state = ERROR


def takes_too_long(bench: Bench) -> None:
    bench.run(6)


def cancelled(bench: Bench) -> None:
    for _ in range(2):
        bench.fail(1, Reason.PEER_LOST, "it is gone")


def cancelled_and_too_long(bench: Bench) -> None:
    cancelled(bench)
    bench.run()
    assert bench.end(1) == "stopped"
    bench.run(6)


def forgotten(bench: Bench) -> None:
    bench.forget(1)


def raise_once(owner: object, name: str, error: Exception) -> None:
    """Make the next call of this method raise."""
    call = getattr(owner, name)

    def raises(*arguments: object) -> None:
        setattr(owner, name, call)
        raise error

    setattr(owner, name, raises)


def the_table_raises(bench: Bench) -> None:
    raise_once(bench.table, "enter", ERROR)


def the_backend_refuses(bench: Bench) -> None:
    raise_once(bench.transport, "post", TransferError(Reason.MISMATCH, "5 pages for 3"))


@dataclass(frozen=True)
class End:
    """A way in which room 1 ends early."""

    #: Outcomes of the request and its decode ranks: at once, after its writes settled, and after
    #: broken transfers count as over.
    seen: str
    reason: Reason | None = None
    text: str = ""
    error: type = type(None)
    #: The transport's behaviour with the chunk.
    script: dict[str, Any] = field(default_factory=dict)
    #: Run before the post, and during the transfer.
    first: Callable[[Bench], None] | None = None
    then: Callable[[Bench], None] | None = None


BROKEN = type(ERROR)
ENDS = {
    "its post raises": End(
        "over told, over, over", Reason.TRANSPORT,
        f"room 1: a transfer to a could not be posted: {ERROR!r}", BROKEN,
        {"error": ERROR, "handles": 0},
    ),
    "its post raises half way": End(
        "stopped, over told, over", Reason.TRANSPORT, "a could not be posted", BROKEN,
        {"error": ERROR, "handles": 2},
    ),
    "the backend names the reason": End(
        "over told, over, over", Reason.MISMATCH, "a could not be posted: 5 pages for 3",
        TransferError, first=the_backend_refuses,
    ),
    "decode cannot be told": End(
        "open, over told, over", Reason.TRANSPORT,
        f"a, b could not be notified that it is complete: {ERROR!r}", BROKEN,
        {"complete_error": ERROR},
    ),
    "broken off": End(
        "open, over, over told", Reason.TRANSPORT, "failed in the transport", then=broken_off
    ),
    "raises at a look": End(
        "open, over, over told", Reason.TRANSPORT,
        f"a transfer to a failed in the transport: {ERROR!r}", BROKEN, then=raises_at_a_look,
    ),
    "late": End(
        "over, over told, over", Reason.TIMEOUT,
        "not delivered to a (posted), b (posted) within 5.0 s", then=takes_too_long,
    ),
    "cancelled": End("stopped, over told, over", Reason.PEER_LOST, "it is gone", then=cancelled),
    "cancelled, and late": End(
        "over, over told, over", Reason.PEER_LOST, "it is gone", then=cancelled_and_too_long
    ),
    "cancelled at first": End(
        "over told, over, over", Reason.PEER_LOST, "it is gone", first=cancelled
    ),
    "forgotten": End("over, over, over", then=forgotten),
    "the table raises": End(
        "over told, over, over", Reason.TRANSPORT, repr(ERROR), BROKEN, first=the_table_raises
    ),
}  # fmt: skip


@pytest.mark.hazard("exception-ends-worker", "peer-lost-for-ever", "source-given-away")
@pytest.mark.parametrize("how", ENDS)
def test_a_room_ends_early(how: str) -> None:
    """Guards against an end that costs another room or the next room with its number, that is sent
    twice, too early or without its cause, and against a late write that completes an abandoned
    room."""
    end, bench, seen = ENDS[how], Bench(), list[str]()
    before = STATS.totals["kv_transfer_failed", end.reason.value] if end.reason else 0

    def look() -> None:
        hosts = [host for host, room, _ in bench.told() if room == 1]
        assert hosts in ([], ["a", "b"])
        assert not hosts or not bench.transport.under_way(1), "a write is still in flight"
        seen.append(bench.end(1) + " told" * bool(hosts))

    bench.open(1, peers="ab")
    bench.open(2)
    room = bench.requests[1]
    bench.submit(1, last=True, within=5.0, **end.script)
    bench.submit(2, last=True)
    if end.first is not None:
        end.first(bench)
    bench.run()
    if end.then is not None:
        end.then(bench)
    look()
    bench.settle()
    look()
    bench.let_doubt_pass()
    look()
    assert ", ".join(seen) == end.seen and bench.end(2) == "delivered"
    assert [chunk.room for chunk in bench.transport.completed] == [2]
    assert isinstance(room.error, end.error) and end.text in (room.reason or "")
    if end.reason is not None:
        assert STATS.totals["kv_transfer_failed", end.reason.value] == before + 1
    began = len(bench.transport.handles)
    bench.forget(1)
    bench.open(1)
    bench.submit(1, last=True)
    bench.run()
    bench.settle()
    assert bench.end(1) == "delivered" and len(bench.transport.handles) == began + 1
    for number in (1, 2):
        bench.forget(number)
    bench.check_empty()


@pytest.mark.hazard("siblings-write-on", "poll-raises", "handle-release")
@pytest.mark.parametrize("broken", [TransferState.ERROR, ERROR])
def test_what_was_broken_off_may_still_land(broken: TransferState | Exception) -> None:
    """After one disconnect every other handle of that peer raises, while its writes may be in
    flight. Guards against telling decode that its pages are free, against a release while one of
    three handles is in flight, and against sending a chunk behind it."""
    bench = Bench(quota=1)
    bench.open(1)
    bench.submit(1, handles=3)
    bench.submit(1, last=True)
    bench.run()
    done, under_way, error = bench.transport.handles
    done.state, error.state = TransferState.DONE, broken
    bench.run(1.0)
    assert bench.end(1) == "stopped" and bench.transport.released == 0
    under_way.state = TransferState.DONE
    bench.run(TransferSettings.doubt_s - 2)
    assert bench.end(1) == "over" and bench.told() == [], "the request ends; decode waits"
    assert bench.transport.released == 0
    bench.run(2)
    assert len(bench.told()) == 1 and len(bench.transport.posts) == 1
    bench.forget(1)
    bench.check_empty()


@pytest.mark.hazard("slow-peer", "dead-peer-leftovers", "siblings-write-on", "handle-release")
def test_deadlines() -> None:
    """Guards against a chunk that waits for ever behind a stalled peer; and against a handle that
    is released, or a decode rank that is notified, because of a timeout: the handle must be
    awaited, with rare checks."""
    bench = Bench(quota=1)
    bench.open(1, 2, peers=["slow"])
    for number in (1, 2):
        bench.submit(number, within=5.0)
    bench.run(4.9)
    assert bench.end(1) == bench.end(2) == "open"
    bench.run(0.2)
    posted, queued = (bench.requests[number].reason or "" for number in (1, 2))
    assert "slow (posted) within 5.0 s" in posted and "TRANSFER_TIMEOUT" in queued
    assert queued.startswith("room 2: a chunk was not delivered to slow (queued) within 5.0 s")
    assert bench.end(1) == bench.end(2) == "over"
    assert [room for _, room, _ in bench.told()] == [2]
    looks = bench.transport.looks
    bench.run(100)
    assert 480 <= bench.transport.looks - looks <= 505 and bench.transport.released == 0
    bench.settle()
    assert [room for _, room, _ in bench.told()] == [1]


@pytest.mark.hazard("exception-ends-worker")
def test_a_bug_costs_its_own_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a worker that fails on one transfer again and again, and never reaches those
    behind it; and against a message that no more is written, which is unknown after a bug."""
    bench, calls = Bench(), list[float]()
    observe = STATS.observe

    def raises_once(name: str, value: float) -> None:
        calls.append(value)
        if len(calls) == 1:
            raise ERROR
        observe(name, value)

    monkeypatch.setattr(STATS, "observe", raises_once)
    bench.open(1, 2)
    for number in (1, 2):
        bench.submit(number, last=True)
    bench.run()
    bench.settle()
    text = bench.requests[1].reason or ""
    assert "unexpected error in transfer worker 0: ZeroDivisionError" in text
    assert (bench.end(1), bench.end(2)) == ("over", "delivered") and bench.told() == []
    assert bench.worker.tables() | {"rooms": 0} == dict.fromkeys(bench.worker.tables(), 0)


@pytest.mark.hazard("handle-release", "exception-ends-worker")
def test_a_release_that_raises() -> None:
    """Guards against an exception that stops the worker, or causes a second release of a handle."""
    bench, calls = Bench(), list[object]()

    def broken(handle: object) -> None:
        calls.append(handle)
        raise RuntimeError("broken")

    bench.transport.release = broken  # type: ignore[method-assign]
    bench.open(1, 2)
    bench.submit(1, handles=2, last=True)
    bench.submit(2, handles=1, error=ERROR)
    bench.run()
    bench.settle()
    assert (bench.end(1), bench.end(2)) == ("delivered", "over")
    assert calls == bench.transport.handles and len(bench.told()) == 1


@pytest.mark.hazard("handle-release")
def test_stop() -> None:
    """Guards against requests that wait for a stopping worker, and against accepting more."""
    bench = Bench(quota=1)
    bench.open(1, 2)
    for number in (1, 2):
        bench.submit(number)
        bench.run()
    bench.worker.stop()
    bench.open(3)
    bench.submit(3)
    assert (bench.end(1), bench.end(2)) == ("stopped", "over") and bench.worker.busy
    bench.settle()
    assert bench.end(1) == "over" and not bench.worker.busy
    assert len(bench.transport.posts) == 1 and not bench.worker.busy


def test_after_a_suspension() -> None:
    """Guards against failing a transfer that was delivered during a suspension of this process:
    transfers must be checked before deadlines."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, last=True, within=5.0)
    bench.run()
    bench.transport.settle()
    bench.clock.now += 20
    bench.run()
    assert bench.end(1) == "delivered"


# ---- waits between rooms ----


def test_turns_between_peers() -> None:
    """Guards against a long queue for one peer that is served before another peer's short one, and
    against a worker that cannot receive a cancellation while it posts a long queue."""
    bench = Bench(window=64, quota=64)
    for room, peer in ((1, "a"), (2, "b"), (3, "b")):
        bench.open(room, peers=peer)
    for room in (1, 1, 1, 1, 2, 3):
        bench.submit(room)
    assert bench.step() == 0.0
    bench.fail(3)
    bench.run()
    assert [peer for _, peer in bench.transport.posts] == ["a", "b", "a", "a", "a"]


@pytest.mark.hazard("slow-peer")
def test_a_window_that_is_full() -> None:
    """Guards against unbounded posting, and against stopped peers that together occupy all places:
    a peer without transfers in flight may always post one."""
    bench = Bench(window=4, quota=4)
    for room, peer in enumerate(("stopped-1", "stopped-2", "healthy"), 1):
        bench.open(room, peers=[peer])
        for chunk in range(9):
            bench.submit(room, last=chunk == 8)
    for count in range(9):
        bench.run()
        posted = [peer for _, peer in bench.transport.posts]
        assert posted.count("healthy") == count + 1
        assert len(bench.transport.under_way(peer="healthy")) == 1
        bench.settle(3)
    assert len(bench.transport.under_way()) == 4 and bench.end(3) == "delivered"


@pytest.mark.hazard("slow-peer")
def test_a_place_that_an_overdue_transfer_leaves() -> None:
    """Guards against chunks that keep waiting although the window has a place again, until another
    event, which may come much later."""
    bench = Bench(window=2, quota=2)
    bench.open(1, peers=["dead"])
    bench.open(2, peers=["slow"])
    bench.submit(1, within=1.0)
    for _ in range(2):
        bench.submit(2)
    for seconds, posted in ((0.0, ["dead", "slow"]), (2.0, ["dead", "slow", "slow"])):
        bench.run(seconds)
        assert [peer for _, peer in bench.transport.posts] == posted


@pytest.mark.hazard("slow-peer", "peer-lost-for-ever")
def test_a_dead_peer_that_comes_back() -> None:
    """Guards against overdue transfers that occupy a worker's window or a peer's quota for good,
    and against a dead peer that gets more than one place for each trial."""
    bench = Bench(window=8, quota=3)
    for batch in range(10):
        rooms = range(10 * batch, 10 * batch + 10)
        bench.open(*rooms, peers=["dead"])
        for room in rooms:
            bench.submit(room, within=1.0)
        bench.run(2)
        assert len(bench.transport.under_way()) == 3 + batch
    for room in range(100):
        bench.forget(room)
    again = range(100, 112)
    bench.open(*again, peers=["dead"])
    for room in again:
        bench.submit(room, last=True)
    bench.run()
    bench.settle(100)
    assert len(bench.transport.handles) == 12 + 1 + 3, "it has recovered: its whole quota"
    for room in again:
        bench.settle(room)
        assert bench.end(room) == "delivered"
        bench.forget(room)
    bench.settle()
    bench.check_empty()


@pytest.mark.hazard("slow-peer")
def test_what_was_never_begun_shows_nothing() -> None:
    """Guards against a dead peer that gets its whole quota again because a chunk waiting in the
    transport was dropped with its room."""
    bench = Bench(window=8, quota=2)
    bench.open(*range(1, 5), peers=["dead"])
    for room in (1, 2):
        bench.submit(room, within=1.0)
    bench.run(2)
    bench.transport.handles[1].state = TransferState.DROPPED
    bench.run(1)
    assert bench.end(2) == "over" and [room for _, room, _ in bench.told()] == [2]
    for room in (3, 4):
        bench.submit(room)
    bench.run()
    assert len(bench.transport.posts) == 3, "one place is overdue"


# ---- rate of checks ----


@pytest.mark.hazard("spinning-workers")
@pytest.mark.parametrize("transfers", [1, 8])
def test_pauses(transfers: int) -> None:
    """Guards against a worker that spins with the interpreter's lock, when idle or on a long
    transfer: the first second of a transfer costs some hundred checks, later ones a fraction, and
    many transfers are checked together."""
    bench = Bench()
    assert bench.run() is None
    bench.open(1)
    for number in range(transfers):
        bench.submit(1, last=number == transfers - 1)
    start, steps, step = bench.clock.now, list[float](), bench.worker.step

    def counted(now: float) -> float | None:
        steps.append(now)
        return step(now)

    bench.worker.step = counted  # type: ignore[method-assign]
    for seconds, least, most in ((1.0, 600, 750), (1.0, 600, 640), (8.1, 0, 9999), (1.0, 30, 50)):
        looks = bench.transport.looks
        bench.run(seconds)
        assert least <= (bench.transport.looks - looks) / transfers <= most
    in_the_first_second = [now for now in steps if now <= start + 1.0]
    assert len(in_the_first_second) <= 750 + transfers
    bench.settle()
    looks = bench.transport.looks
    bench.run(3600)
    assert bench.run() is None and bench.transport.looks == looks


@pytest.mark.parametrize("took", [10e-6, 100e-6, 1e-3, 5e-3, 12e-3])
def test_short_transfers_are_noticed_soon(took: float) -> None:
    """Guards against a pause that is long compared with the transfer: a late check may add 50 us,
    or a sixteenth of the time that the transfer took."""
    bench = Bench()
    bench.open(1)
    bench.submit(1, last=True)
    bench.run(took)
    bench.transport.settle()
    bench.run(max(50e-6, took / 16))
    assert bench.end(1) == "delivered"

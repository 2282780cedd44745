"""A backend whose calls fail, one by one: what is under way is known, and released once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl import backend
from sglang.srt.disaggregation.delta.nixl.descriptors import Form
from sglang.srt.disaggregation.delta.prefill.transfer_backend import State, TransferError
from unit.delta.nixl.fakes import nixlRemoteDisconnectError
from unit.delta.nixl.sides import Bench

PAGES: dict[str, Any] = {"pages": [1, 2, 7], "to": [3, 4, 1], "state": ((1,), (2,))}
#: Without lists, with lists: the call that makes a transfer.
MAKES = ("initialize_xfer", "make_prepped_xfer")


@pytest.fixture(params=list(Form), ids=lambda form: form.value)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A backend that describes everything in one form, as far as that is possible."""

    def choose(*, has_prepared: bool, **_: Any) -> Form:
        chosen: Form = request.param if has_prepared else Form.RANGES
        return chosen

    monkeypatch.setattr(backend.descriptors, "choose", choose)
    return Bench()


def post(bench: Bench, **chunk: Any) -> tuple[list[Any], Exception | None]:
    """What a worker learns of a post: the handles that it got, and what ended it."""
    posted = []
    try:
        for each in bench.backend.post(bench.chunk(**(chunk or PAGES)), "decode"):
            posted.append(each)
    except Exception as error:
        return posted, error
    return posted, None


def clear_up(bench: Bench, posted: list[Any]) -> None:
    """What a worker does after a failure: wait for what is under way, and release everything."""
    for each in posted:
        try:
            if bench.backend.state(each) is State.IN_PROGRESS:
                bench.agent.settle(each.handle)
                assert bench.backend.state(each) is State.DONE
        except RuntimeError:
            assert not each.handle.is_posted
    for each in posted:
        bench.backend.release(each)
    bench.check()


@pytest.mark.hazard("exception-ends-worker", "siblings-write-on")
@pytest.mark.parametrize("call", ["get_xfer_descs", "make", "transfer"])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_call_that_raises(bench: Bench, call: str, nth: int) -> None:
    """Guards against transfers that nobody waits for, because a later one of the same chunk could
    not be posted."""
    error = ZeroDivisionError("bindings raise what they like")
    if call == "make":
        made = 0

        def fail_at_the_nth() -> None:
            nonlocal made
            made += 1
            if made == nth + 1:
                raise error

        bench.agent.before.update(dict.fromkeys(MAKES, fail_at_the_nth))
    else:
        bench.agent.script[call].extend([None] * nth + [error])
    posted, raised = post(bench)
    if call == "get_xfer_descs" and raised is None:
        # Lists were there for all but the state, which takes two such calls.
        assert bench.agent.calls[call] == 2 and nth == 2
    else:
        assert raised is error
    under_way = [each.handle for each in posted if each.handle.is_under_way]
    assert under_way == bench.agent.under_way()
    if call == "transfer":
        assert len(under_way) == nth and len(posted) == nth + 1
    assert bench.agent.calls["get_xfer_telemetry"] == 0
    clear_up(bench, posted)


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_transfer_that_is_refused(bench: Bench, nth: int) -> None:
    """Guards against an error that NIXL returns instead of raising it."""

    def refuse() -> None:
        if bench.agent.calls["transfer"] == nth + 1:
            bench.agent.handles[-1].state = "ERR"

    bench.agent.before["transfer"] = refuse
    posted, raised = post(bench)
    assert isinstance(raised, TransferError) and raised.reason is Reason.TRANSPORT
    assert "NIXL refused a transfer to decode" in str(raised)
    assert len(posted) == nth + 1
    clear_up(bench, posted)


def test_no_handle(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against nothing being posted as if it were a transfer."""
    for make in MAKES:
        monkeypatch.setattr(bench.agent, make, lambda *_: None)
    posted, raised = post(bench)
    assert posted == [] and "NIXL made no transfer to decode" in str(raised)
    bench.check()


def test_a_notification_that_raises(bench: Bench) -> None:
    """Guards against a peer that is in use for ever, or a room that counts as complete, because a
    note could not be sent."""
    error = ZeroDivisionError()
    bench.agent.script["send_notif"].append(error)
    with pytest.raises(ZeroDivisionError):
        bench.backend.complete(bench.chunk(**PAGES))
    assert bench.agent.notes["decode"] == []
    bench.check()


def test_an_unknown_peer(bench: Bench) -> None:
    """Guards against a post to a rank that was forgotten."""
    bench.peers.forget("decode")
    posted, raised = post(bench)
    assert isinstance(raised, TransferError) and raised.reason is Reason.PEER_LOST
    assert "decode rank decode is no longer registered" in str(raised)
    assert posted == [] and bench.agent.handles == []


@pytest.mark.hazard("handle-release")
def test_forgotten_while_it_is_posted_to(bench: Bench) -> None:
    """Guards against a transfer that NIXL has made and that is never released, because the peer was
    forgotten by another thread in between; and against removing a peer that is being posted to."""

    info = bench.decode.info("other")
    bench.peers.add(info)

    def forget() -> None:
        bench.peers.forget("decode")
        bench.peers.release(bench.peers.hold("other"))
        assert "decode" in bench.agent.peers, "it is in use"

    bench.agent.before.update(dict.fromkeys(MAKES, forget))
    posted, raised = post(bench)
    for each in posted:
        if each.handle.is_posted:
            bench.agent.settle(each.handle)
        bench.backend.release(each)
    bench.peers.release(bench.peers.hold("other"))
    bench.agent.check()
    assert list(bench.agent.peers) == ["other"] and bench.table == {"other": info}


@pytest.mark.hazard("peer-lost-for-ever")
@pytest.mark.parametrize("noticed_by", ["state", "transfer", "make", "send_notif"])
def test_a_lost_peer_may_register_again(bench: Bench, noticed_by: str) -> None:
    """Guards against a decode rank that is served no more after its connection broke once: it must
    be loaded again, and with lists of its own, even while something is still under way to it."""
    info = bench.decode.info("decode")
    under_way, raised = post(bench)
    assert raised is None
    bench.agent.disconnect("decode")
    stuck = under_way.pop()
    stuck.handle.state = "PROC"  # NIXL does not notice that one
    lost = nixlRemoteDisconnectError("decode")
    posted: list[Any] = []
    if noticed_by == "state":
        with pytest.raises(nixlRemoteDisconnectError):
            bench.backend.state(under_way[0])
    else:
        calls = MAKES if noticed_by == "make" else (noticed_by,)
        for call in calls:
            bench.agent.script[call].append(lost)
        if noticed_by == "send_notif":
            with pytest.raises(nixlRemoteDisconnectError):
                bench.backend.complete(bench.chunk(**PAGES))
        else:
            posted, raised = post(bench)
            assert raised is lost
        bench.agent.script.clear()
    assert bench.table == {}
    assert isinstance(post(bench)[1], TransferError)

    bench.peers.add(info)
    assert bench.table == {"decode": info}
    again, raised = post(bench)
    assert raised is None
    bench.finish(again)
    bench.agent.settle(stuck.handle)
    for each in [*under_way, stuck, *posted]:
        bench.backend.release(each)
    bench.check()


@pytest.mark.hazard("peer-lost-for-ever")
def test_only_a_disconnection_loses_a_peer(bench: Bench) -> None:
    """Guards against forgetting a peer, and failing all its rooms, because one transfer failed."""
    posted, _ = post(bench)
    posted[0].handle.state = RuntimeError("something else")
    with pytest.raises(RuntimeError):
        bench.backend.state(posted[0])
    posted[1].handle.state = "ERR"
    assert bench.backend.state(posted[1]) is State.ERROR
    assert "decode" in bench.table
    bench.agent.settle(posted[2].handle)
    for each in posted:
        bench.backend.release(each)
    bench.check()


@pytest.mark.hazard("drained-per-request")
def test_telemetry_that_raises(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against telemetry that fails a transfer, or that complains about every one."""
    bench.agent.before["get_xfer_telemetry"] = lambda: 1 / 0
    for _ in range(2):
        posted, _ = post(bench)
        bench.finish(posted)
    bench.check()
    assert bench.agent.calls["get_xfer_telemetry"] == 1
    assert caplog.text.count("NIXL gives no telemetry") == 1


@pytest.mark.parametrize("broken", ["ERR", RuntimeError()])
def test_telemetry_of_what_was_delivered(bench: Bench, broken: str | Exception) -> None:
    """Guards against times of broken transfers, and against microseconds taken for seconds."""
    seen: list[float] = []
    bench.stats.transported = seen.append  # type: ignore[method-assign,assignment]
    posted, _ = post(bench)
    bench.finish(posted)
    assert seen == [0.0015] * 3
    posted, _ = post(bench)
    bench.agent.settle(posted[0].handle, broken)
    with contextlib.suppress(RuntimeError):
        bench.backend.state(posted[0])
    for each in posted[1:]:
        bench.agent.settle(each.handle)
    for each in posted:
        bench.backend.release(each)
    assert len(seen) == 3
    bench.check()


def test_an_event_log_that_raises(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a full disk that fails transfers, or keeps peers in use for ever."""
    asked = []

    def full_disk(side: str) -> None:
        asked.append(side)
        raise OSError("no space left on device")

    monkeypatch.setattr(observability, "event_log", full_disk)
    posted, raised = post(bench)
    assert raised is None and len(posted) == 3
    bench.finish(posted)
    assert asked == ["prefill", "prefill"]  # when it was sent, and when it had arrived
    bench.check()


def test_a_release_that_raises(bench: Bench) -> None:
    """Guards against a peer that is in use for ever because NIXL did not like a release."""
    posted, _ = post(bench)
    bench.agent.script["release_xfer_handle"].append(RuntimeError())
    for each in posted:
        bench.agent.settle(each.handle)
    with pytest.raises(RuntimeError):
        bench.backend.release(posted[0])
    for each in posted[1:]:
        bench.backend.release(each)
    bench.check()


def test_stopped_in_the_middle_of_a_post(bench: Bench) -> None:
    """Guards against a peer that is in use for ever because a worker ended half way."""
    running = bench.backend.post(bench.chunk(**PAGES), "decode")
    first = next(running)
    running.close()  # type: ignore[attr-defined]
    assert bench.users() == 1
    bench.backend.release(first)
    bench.check()

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
ERROR = ZeroDivisionError("bindings raise what they like")


@pytest.fixture(params=list(Form), ids=lambda form: form.value)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A backend that describes everything in one form, as far as that is possible."""

    def choose(*, has_prepared: bool, **_: Any) -> Form:
        chosen: Form = request.param if has_prepared else Form.RANGES
        return chosen

    monkeypatch.setattr(backend.descriptors, "choose", choose)
    return Bench()


def post(bench: Bench) -> tuple[list[Any], Exception | None]:
    """What a worker learns of a post: the handles that it got, and what ended it."""
    posted = []
    try:
        for each in bench.backend.post(bench.chunk(**PAGES), "decode"):
            posted.append(each)
    except Exception as error:
        return posted, error
    return posted, None


def release(bench: Bench, *posted: Any) -> None:
    """What a worker does in the end: wait for what is under way, and release everything."""
    for each in posted:
        if each.handle.is_under_way:
            bench.agent.settle(each.handle)
        with contextlib.suppress(Exception):
            assert bench.backend.state(each) is not State.IN_PROGRESS
    for each in posted:
        bench.backend.release(each)


@pytest.mark.hazard("exception-ends-worker", "siblings-write-on", "handle-release")
@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize(
    "fault", ["get_xfer_descs", "make", "transfer", "transfer is refused", "make gives nothing"]
)
def test_a_call_that_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str, nth: int
) -> None:
    """Guards against transfers that nobody waits for, because a later one of the same chunk could
    not be posted; and against errors that NIXL returns instead of raising them."""
    made = 0

    def nothing_at_the_nth(*arguments: Any, make: Any) -> Any:
        nonlocal made
        made += 1
        return make(*arguments) if made <= nth else None

    def fail_at_the_nth() -> None:
        nonlocal made
        made += 1
        if made == nth + 1:
            if fault != "transfer is refused":
                raise ERROR
            bench.agent.handles[-1].state = "ERR"

    if fault == "make gives nothing":
        for name in MAKES:
            make = getattr(bench.agent, name)
            monkeypatch.setattr(
                bench.agent, name, lambda *them, make=make: nothing_at_the_nth(*them, make=make)
            )
    else:
        calls = MAKES if fault == "make" else (fault.split()[0],)
        bench.agent.before.update(dict.fromkeys(calls, fail_at_the_nth))
    posted, raised = post(bench)
    under_way = [each.handle for each in posted if each.handle.is_under_way]
    assert under_way == bench.agent.under_way()
    if fault == "get_xfer_descs":
        # With lists only the state takes such calls: two.
        assert raised is (None if made <= nth else ERROR)
    else:
        assert len(under_way) == nth and len(posted) == nth + fault.startswith("transfer")
        if fault in ("make", "transfer"):
            assert raised is ERROR
        else:
            text = "refused a transfer" if "refused" in fault else "made no transfer"
            assert isinstance(raised, TransferError) and raised.reason is Reason.TRANSPORT
            assert f"NIXL {text} to decode" in str(raised)
    assert bench.agent.calls["get_xfer_telemetry"] == 0
    release(bench, *posted)
    bench.check()


def test_other_calls_that_raise(bench: Bench) -> None:
    """Guards against a peer that is in use for ever, or a room that counts as complete, because a
    note could not be sent, NIXL did not like a release, or a worker ended half way."""
    bench.agent.script["send_notif"].append(ERROR)
    with pytest.raises(ZeroDivisionError):
        bench.backend.complete(bench.chunk(**PAGES))
    assert bench.agent.notes["decode"] == [] and bench.users() == 0
    (first, *others), _ = post(bench)
    bench.agent.script["release_xfer_handle"].append(ERROR)
    with pytest.raises(ZeroDivisionError):
        release(bench, first)
    release(bench, *others)
    running = bench.backend.post(bench.chunk(**PAGES), "decode")
    first = next(running)
    running.close()  # type: ignore[attr-defined]
    assert bench.users() == 1
    bench.backend.release(first)
    bench.check()


@pytest.mark.hazard("handle-release")
def test_forgotten_while_it_is_posted_to(bench: Bench) -> None:
    """Guards against a transfer that NIXL has made and that is never released, because the peer was
    forgotten by another thread in between; against removing a peer that is being posted to; and
    against a post to a rank that was forgotten."""
    info = bench.decode.info("other")
    bench.peers.add(info)

    def forget() -> None:
        bench.peers.forget("decode")
        bench.peers.release(bench.peers.hold("other"))
        assert "decode" in bench.agent.peers, "it is in use"

    bench.agent.before.update(dict.fromkeys(MAKES, forget))
    posted, _ = post(bench)
    release(bench, *posted)
    bench.peers.release(bench.peers.hold("other"))
    bench.agent.check()
    assert list(bench.agent.peers) == ["other"] and bench.table == {"other": info}
    made = len(bench.agent.handles)
    posted, raised = post(bench)
    assert isinstance(raised, TransferError) and raised.reason is Reason.PEER_LOST
    assert "decode rank decode is no longer registered" in str(raised)
    assert posted == [] and len(bench.agent.handles) == made


@pytest.mark.hazard("peer-lost-for-ever")
@pytest.mark.parametrize("noticed_by", ["state", "transfer", "make", "send_notif"])
def test_a_lost_peer_may_register_again(bench: Bench, noticed_by: str) -> None:
    """Guards against a decode rank that is served no more after its connection broke once: it must
    be loaded again, and with lists of its own, even while something is still under way to it."""
    (first, *others), _ = post(bench)
    bench.agent.disconnect("decode")
    first.handle.state = "PROC"  # NIXL does not notice that one
    posted: list[Any] = []
    for call in MAKES if noticed_by == "make" else (noticed_by,):
        bench.agent.script[call].append(nixlRemoteDisconnectError("decode"))
    if noticed_by == "state":
        with pytest.raises(nixlRemoteDisconnectError):
            bench.backend.state(others[0])
    elif noticed_by == "send_notif":
        with pytest.raises(nixlRemoteDisconnectError):
            bench.backend.complete(bench.chunk(**PAGES))
    else:
        posted, raised = post(bench)
        assert isinstance(raised, nixlRemoteDisconnectError)
    bench.agent.script.clear()
    assert bench.table == {}
    assert isinstance(post(bench)[1], TransferError)
    info = bench.decode.info("decode")
    bench.peers.add(info)
    assert bench.table == {"decode": info}
    again, raised = post(bench)
    assert raised is None
    bench.finish(again)
    release(bench, first, *others, *posted)
    bench.peers.add(info)
    bench.check()


@pytest.mark.hazard("peer-lost-for-ever", "drained-per-request")
def test_what_fails_one_transfer(bench: Bench) -> None:
    """Guards against forgetting a peer, and failing all its rooms, because one transfer failed;
    against times of broken transfers, and microseconds taken for seconds."""
    seen: list[float] = []
    bench.stats.transported = seen.append  # type: ignore[method-assign,assignment]
    for broken in ERROR, "ERR", None:
        posted, _ = post(bench)
        if broken is not None:
            bench.agent.settle(posted[0].handle, broken)
        if broken == "ERR":
            assert bench.backend.state(posted[0]) is State.ERROR
        release(bench, *posted)
        assert "decode" in bench.table
    assert seen == [0.0015] * 3
    bench.check()


@pytest.mark.hazard("drained-per-request")
def test_numbers_that_cannot_be_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against telemetry, or a full disk below the event log, that fails transfers, keeps
    peers in use for ever, or complains about every one."""
    asked = []

    def full_disk(side: str) -> None:
        asked.append(side)
        raise OSError("no space left on device")

    monkeypatch.setattr(observability, "event_log", full_disk)
    bench.agent.before["get_xfer_telemetry"] = lambda: 1 / 0
    for _ in range(2):
        posted, raised = post(bench)
        assert raised is None and len(posted) == 3
        bench.finish(posted)
    assert asked == ["prefill"] * 4  # when each was sent, and when it had arrived
    assert bench.agent.calls["get_xfer_telemetry"] == 1
    assert caplog.text.count("NIXL gives no telemetry") == 1
    bench.check()

"""A room whose calls of NIXL fail, one by one: transfers in flight are awaited, and every handle is
released once (``PrefillRank.check``)."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.nixl import descriptors
from unit.delta.nixl.fakes import nixlRemoteDisconnectError
from unit.delta.nixl.prefill_rank import PrefillRank
from unit.delta.transfer.steps import ROOM, failure_of, pages

#: The call that makes a transfer: without lists, with lists.
MAKES = ("initialize_xfer", "make_prepped_xfer")
ERROR = ZeroDivisionError("any exception of a binding")


@pytest.fixture(params=[False, True], ids=["ranges", "prepared"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillRank:
    """A rank that describes all transfers in one form, as far as possible."""
    monkeypatch.setattr(descriptors, "is_selected_faster", lambda *_: request.param)
    return PrefillRank(monkeypatch, ("decode", "other"))


def sent(rank: PrefillRank) -> Any:
    """Send a room of one chunk in three transfers: pages, state and metadata."""
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [3, 4, 1], slot=2, state=[2])
    sender.init(3, 3)
    sender.send(pages(1, 2, 7), [1])
    rank.tick(0.0)
    return sender


def served(rank: PrefillRank) -> None:
    """Deliver a room."""
    sender = sent(rank)
    rank.finish()
    assert sender.poll() == KVPoll.Success
    sender.clear()
    rank.check()


@pytest.mark.hazard("exception-ends-worker", "siblings-write-on", "handle-release")
@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("fault", ["make", "transfer", "transfer is refused", "make gives nothing"])
def test_a_call_that_fails(
    rank: PrefillRank, monkeypatch: pytest.MonkeyPatch, fault: str, nth: int
) -> None:
    """Guards against transfers that are never awaited because a later one of the same chunk could
    not be posted, and against errors that NIXL returns instead of raising them."""
    agent, left = rank.agent, [nth]

    def is_the_nth() -> bool:
        left[0] -= 1
        return left[0] == -1

    def fail() -> None:
        if is_the_nth():
            if fault != "transfer is refused":
                raise ERROR
            agent.handles[-1].state = "ERR"

    calls = ("transfer",) if fault.startswith("transfer") else MAKES
    if fault == "make gives nothing":
        for name in MAKES:
            make = getattr(agent, name)
            monkeypatch.setattr(
                agent, name, lambda *them, make=make: None if is_the_nth() else make(*them)
            )
    else:
        agent.before.update(dict.fromkeys(calls, fail))
    sender = sent(rank)
    assert len(agent.under_way()) == nth and len(agent.handles) == nth + (calls == ("transfer",))
    assert sender.poll() == (KVPoll.Transferring if agent.handles else KVPoll.Failed)
    rank.finish()
    assert sender.poll() == KVPoll.Failed and agent.notes["decode"] == []
    assert len(rank.sockets.stopped) == 1
    error = failure_of(sender)
    if fault in ("make", "transfer"):
        assert error.__cause__ is ERROR
    else:
        text = "refused a transfer" if "refused" in fault else "made no transfer"
        assert f"NIXL {text} to decode" in str(error)
    agent.before.clear()
    rank.check()


@pytest.mark.parametrize("call", ["send_notif", "release_xfer_handle", "get_xfer_descs"])
def test_other_calls_that_raise(rank: PrefillRank, call: str) -> None:
    """Guards against a peer that stays in use for ever, or a room that counts as complete, because
    a note, a release or a list failed."""
    rank.agent.script[call].append(ERROR)
    sender = sent(rank)
    rank.finish()
    is_over = call == "release_xfer_handle"
    assert sender.poll() == (KVPoll.Success if is_over else KVPoll.Failed)
    assert bool(rank.agent.notes["decode"]) == is_over
    sender.clear() if is_over else failure_of(sender)
    rank.check()
    rank.agent.notes.clear()
    served(rank)


@pytest.mark.hazard("handle-release")
def test_forgotten_while_it_is_posted_to(rank: PrefillRank) -> None:
    """Guards against a made transfer that is never released because another thread forgot the peer
    in between; against removing a peer during a post to it; and against a post to a rank that was
    forgotten."""
    agent, peers = rank.agent, rank.manager.peers

    def forget() -> None:
        rank.manager.forget_peer("decode")
        peers.release(peers.hold("other"))
        assert "decode" in agent.peers, "the peer is in use"

    agent.before.update(dict.fromkeys(MAKES, forget))
    sender = sent(rank)
    rank.finish()
    peers.release(peers.hold("other"))
    assert list(agent.peers) == ["other"] == list(rank.manager.decode_kv_args_table)
    assert sender.poll() == KVPoll.Failed
    assert "decode rank decode is no longer registered" in str(failure_of(sender))
    agent.before.clear()
    rank.check()


@pytest.mark.hazard("peer-lost-for-ever")
@pytest.mark.parametrize("noticed_by", ["state", "transfer", "make", "send_notif"])
def test_a_lost_peer_may_register_again(rank: PrefillRank, noticed_by: str) -> None:
    """Guards against a decode rank that is never served again after its connection broke once: it
    must be loaded again, with new lists, even while a transfer to it is still in flight."""
    served(rank)
    lost = nixlRemoteDisconnectError("decode")
    if noticed_by != "state":
        for call in MAKES if noticed_by == "make" else (noticed_by,):
            rank.agent.script[call].append(lost)
    sender = sent(rank)
    if noticed_by == "state":
        rank.agent.disconnect("decode")
        rank.agent.handles[-1].state = "PROC"  # NIXL does not notice the failure of this transfer
        rank.tick(0.25)
    else:
        rank.settle()
        rank.tick(0.25)
    assert "decode" not in rank.manager.decode_kv_args_table
    rank.agent.script.clear()
    rank.register("decode")
    rank.finish()
    assert sender.poll() == KVPoll.Failed
    failure_of(sender)
    served(rank)


@pytest.mark.hazard("peer-lost-for-ever")
@pytest.mark.parametrize("state", [ERROR, "ERR"])
def test_what_fails_one_transfer(rank: PrefillRank, state: Any) -> None:
    """Guards against forgetting a peer, and failing all its rooms, because one transfer failed."""
    sender = sent(rank)
    first, *others = rank.agent.under_way()
    rank.agent.settle(first, state)
    rank.tick(0.25)
    for each in others:
        rank.agent.settle(each)
    rank.finish()
    assert sender.poll() == KVPoll.Failed
    failure_of(sender)
    assert "decode" in rank.manager.decode_kv_args_table
    served(rank)


@pytest.mark.hazard("drained-per-request")
def test_numbers_that_cannot_be_taken(
    rank: PrefillRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a full disk below the event log that fails transfers, or keeps peers in use
    for ever."""

    def full_disk(side: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(observability, "event_log", full_disk)
    for _ in range(2):
        served(rank)

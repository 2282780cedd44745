"""A prefill rank and its decode ranks: messages, liveness, and timeouts.

The orders of a room's steps are in ``test_room_table.py``.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from unit.delta.fakes import announcement
from unit.delta.prefill.rig import PORT, ROOM, Side


@pytest.fixture
def side() -> Side:
    return Side()


FAILED = "kv_transfer_failed"


# ---- messages ----


def test_a_failure_counts_once(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a second, more general failure that hides the cause, is counted or sent again;
    and against a disconnected client that fills the log with errors."""
    before = STATS.totals.copy()
    for room in (ROOM, 8):
        side.announce(room)
        side.claim(room)
    with caplog.at_level(logging.INFO):
        side.fail(ROOM, Reason.MISMATCH, "3 pages, 2 left")
        side.fail(ROOM, Reason.TRANSPORT, "later")
        side.fail(8, text="client went away")
    assert side.manager.failure_records == {ROOM: "3 pages, 2 left", 8: "client went away"}
    assert side.status() == KVPoll.Failed
    assert side.told() == [("D", ROOM, "3 pages, 2 left"), ("D", 8, "client went away")]
    counted = {key[1]: n for key, n in STATS.since(before).items() if key[0] == FAILED and n}
    assert counted == {"mismatch": 1, "aborted": 1}
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def test_who_cannot_be_told_hides_no_other(side: Side) -> None:
    """Guards against an unusable address, or a client's number that no message can carry, that ends
    the scheduler or the messages to other ranks."""
    side.sockets.refuse.add("D")
    for room in (ROOM, 2**64):
        side.claim(room)
        for peer in "DE":
            side.announce(room, peer, of=2)
        side.fail(room)
        assert side.status(room) == KVPoll.Failed
    assert side.told() == [("E", ROOM, "aborted")]


@pytest.mark.parametrize(
    ("fields", "is_told"),
    [
        ({"dummy": True}, False),
        ({"stock": True}, False),
        ({"stock": True, "delta_error": "protocol 2"}, True),
    ],
    ids=["dummy", "stock", "another version"],
)
def test_who_would_understand_is_told(side: Side, fields: dict[str, Any], is_told: bool) -> None:
    """Guards against a message that ends a stock decode server's thread, against a dummy's message
    that counts as a writing rank's, and against a decode server of another version that learns of
    its failure only by a timeout."""
    side.claim()
    side.announce(**fields)
    side.fail()
    assert not side.announce(**fields), "also if it announces too late"
    side.ranks.refuse_stranger(announcement(ROOM, **fields))
    assert len(side.told()) == 3 * is_told


@pytest.mark.hazard("other-side-not-told")
@pytest.mark.parametrize("peer", ["D", "stranger"])
def test_answers(side: Side, peer: str) -> None:
    """Guards against a live rank that counts as dead, against a restarted prefill rank that seems
    to know its peers, against a decode rank's port mixed up with a prefill rank's, and against
    connections to arbitrary addresses: known ranks are answered at their registered address."""
    where = ("D", PORT) if peer == "D" else ("10.6.6.6", 22)
    side.ranks.take(wire.Ping("10.5.5.5:77", peer, "10.6.6.6", 22))
    side.withdraw(peer, host="10.6.6.6", port=22)
    pong, stopped = side.sockets.take()
    assert pong == (*where, wire.Pong("10.5.5.5:77", peer == "D"))
    assert stopped[:2] == where and isinstance(stopped[2], wire.Stopped)
    side.ranks.refuse_stranger(announcement(ROOM))
    ((_, _, message),) = side.sockets.take()
    assert message.unknown_peer and message.room == ROOM, "the rank must connect again"
    for message in (wire.Stopped(7, 0, ""), wire.Pong("a:1", True)):
        with pytest.raises(wire.ControlError):
            side.ranks.take(message)


# ---- liveness ----


@pytest.mark.hazard("dead-peer-leftovers")
def test_a_decode_rank_that_falls_silent(side: Side) -> None:
    """Guards against rooms that wait for ever for a decode server that died, against failing
    another server's rooms with them, and against forgetting a rank that never pinged (stock)."""
    side.register("stock")
    for room, peer in ((7, "D"), (8, "E"), (9, "stock")):
        side.claim(room)
        side.announce(room, peer)
    side.ping("D")
    side.ping("E")
    assert side.advance(100) == []
    side.ping("E")
    assert side.advance(19.5) == []
    assert side.advance(0.5) == ["D"]
    assert [side.status(room) for room in (7, 8, 9)] == [
        KVPoll.Failed,
        KVPoll.WaitingForInput,
        KVPoll.WaitingForInput,
    ]
    assert "was silent" in side.manager.failure_records[7]
    assert side.advance(60) == [], "only once"


@pytest.mark.parametrize(("interval_s", "allowed_s"), [(5, 120), (40, 120), (120, 360)])
def test_a_decode_rank_that_pings_rarely(side: Side, interval_s: float, allowed_s: int) -> None:
    """Guards against a living rank that is forgotten, with its rooms, because its server probes
    less often (SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL) than prefill expects."""
    side.claim()
    side.announce()
    for _ in range(3):
        side.ping(interval_s=interval_s)
        assert side.advance(interval_s + 1) == []
    assert side.advance(allowed_s - interval_s - 2) == []
    assert side.status() == KVPoll.WaitingForInput
    assert side.advance(1) == ["D"] and side.status() == KVPoll.Failed


@pytest.mark.hazard("address-of-a-predecessor")
def test_a_decode_rank_whose_predecessor_falls_silent(side: Side) -> None:
    """Guards against a rank that restarted under its predecessor's name, and is forgotten when the
    predecessor has been silent for long enough."""
    side.ping()
    assert side.advance(119) == []
    side.register("D", host="D2")
    side.claim()
    side.announce(host="D2")
    assert side.advance(10) == [] and side.status() == KVPoll.WaitingForInput
    assert side.sockets.dropped == [("D", PORT)]


@pytest.mark.hazard("dead-peer-leftovers")
@pytest.mark.parametrize("is_registered", [True, False])
def test_the_socket_of_a_decode_rank_that_is_gone(side: Side, is_registered: bool) -> None:
    """Guards against a socket for each decode rank that ever registered, with which ZeroMQ tries to
    connect ten times a second: also if the registration was removed earlier (Mooncake, after a
    failed transfer; NIXL, after it lost the connection)."""
    side.claim()
    side.announce()
    side.ping()
    if not is_registered:
        del side.manager.decode_kv_args_table["D"]
    assert side.advance(119) == [] and side.sockets.dropped == []
    assert side.advance(1) == ["D"]
    assert [room for _, room, _ in side.told()] == [ROOM] and side.sockets.dropped == []
    assert side.advance(5) == [] and side.sockets.dropped == [("D", PORT)], "after its message"


@pytest.mark.hazard("dead-peer-leftovers")
def test_sockets_that_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a dead rank settles minutes after it was abandoned, and its room's end is sent
    then; a stranger is told to connect again. Guards against the sockets that this opens staying
    for ever, and against a table that any sender of pings can grow."""
    opened, opens = list[Any](), zmq.Context.socket

    def socket(context: Any, kind: Any) -> Any:
        opened.append(opens(context, kind))
        return opened[-1]

    def count() -> int:
        return sum(not each.closed for each in opened)

    monkeypatch.setattr(zmq.Context, "socket", socket)
    side = Side(wire.PeerSockets)
    side.register("D", host="127.0.0.1")
    side.claim()
    side.announce(host="127.0.0.1")
    assert side.enter()
    side.ping()
    assert side.advance(120) == ["D"]
    assert side.advance(5) == [] and count() == 0
    side.table.leave(side.requests[ROOM])
    assert count() == 1
    side.advance(121)
    assert count() == 0
    side.ranks.take(wire.Ping("a:1", "stranger", "127.0.0.1", PORT))
    side.ranks.refuse_stranger(announcement(8, host="127.0.0.2"))
    assert count() == 2
    assert side.advance(2) == [] and count() == 0
    assert side.advance(200) == [], "a stranger's next ping is not awaited"


def test_registrations_are_bounded(side: Side) -> None:
    """Guards against keeping all ranks of ended servers that never pinged; and against forgetting a
    rank that pings, has rooms in flight, or was used more recently than others."""
    table = side.manager.decode_kv_args_table
    for number in range(4198):
        side.register(f"gone {number}")
    side.announce(peer="D")
    side.ping("gone 0")
    side.announce(8, "gone 1")
    side.fail(8)
    dropped = side.ranks.tick()
    assert dropped == ["E", *(f"gone {number}" for number in range(2, 105))]
    for peer in dropped:
        del table[peer]
    assert side.ranks.tick() == [] and len(table) == 4096


# ---- timeouts ----


@pytest.mark.parametrize("noticed_by", ["tick", "enter"])
def test_a_process_that_did_not_run(side: Side, noticed_by: str) -> None:
    """The process was stopped by a debugger, a cgroup or a suspended machine: decode has waited its
    bound and reused the pages. Guards against a rank that resumes and writes to them; and against
    rooms that fail because one step took long."""
    side.claim()
    side.announce()
    side.claim(8)  # not announced yet: no pages
    side.clock.now += 29
    assert side.ranks.tick() == [] and side.enter()
    side.table.leave(side.requests[ROOM])
    assert side.advance(300) == [] and side.status() == KVPoll.WaitingForInput
    side.clock.now += 30  # half of the quarantine bound
    if noticed_by == "tick":
        side.ranks.tick()
    assert not side.enter() and side.enter(8)
    assert "did not run for 30 s" in side.manager.failure_records[ROOM]
    assert [room for _, room, _ in side.told()] == [ROOM]


@pytest.mark.hazard("other-side-not-told")
def test_rooms_that_nobody_asked_for_end(side: Side) -> None:
    """An announcement whose request went to another prefill server. Guards against an entry that
    stays, and against decode waiting longer than prefill does; a late request must fail at once."""
    side.advance(5)
    side.announce(7)
    side.claim(8)
    side.announce(8)
    side.advance(119)
    assert side.told() == []
    side.advance(1)
    assert [room for _, room, _ in side.told()] == [7]
    assert [room.number for room in side.table.all()] == [8]
    assert side.manager.open_rooms()["request_status"] == [8]
    assert "SGLANG_DISAGGREGATION_CLAIM_TIMEOUT" in (side.claim(7) or "")

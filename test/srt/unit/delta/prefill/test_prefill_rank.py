"""A prefill rank's rooms: who is told that one ended, when, and how often."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.prefill.decode_ranks import DecodeRanks
from sglang.srt.disaggregation.delta.prefill.room import Room
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from unit.delta.fakes import Clock, Manager, Sockets, announcement

ROOM = 7
REGISTERED = SimpleNamespace(endpoint="10.0.0.1", dst_port=4000)


class Side:
    """A prefill rank with rooms, and what its decode ranks hear."""

    def __init__(self) -> None:
        self.clock, self.manager = Clock(), Manager()
        self.rooms = self.manager.rooms = RoomTable(self.manager, self.clock)
        self.ranks = DecodeRanks(self.manager, self.rooms, self.clock)
        self.manager.decode_ranks = self.ranks
        self.sockets = Sockets()
        self.ranks._sockets = self.ranks._strangers = self.sockets  # type: ignore[assignment]
        self.held: dict[int, Room] = {}
        self.manager.decode_kv_args_table["D"] = REGISTERED

    def request(self, room: int = ROOM) -> None:
        """The request of a room arrives here, as ``DeltaSender`` takes it."""
        self.manager.update_status(room, KVPoll.Bootstrapping)
        self.held[room], refused = self.rooms.claim(room)
        if refused is not None:
            self.rooms.fail(room, Reason.ABORTED, refused)

    def enter(self, room: int = ROOM) -> bool:
        """A worker asks whether it may post a write."""
        return self.rooms.enter(self.rooms.room(room) or Room(room))

    def forget(self, room: int = ROOM) -> None:
        """The request of a room is done with."""
        self.rooms.forget(self.held.pop(room))
        self.manager.forget_status(room)

    def announce(self, room: int = ROOM, peer: str = "D", **fields: Any) -> bool:
        """A decode rank announces a room."""
        info = announcement(room, **fields)
        return self.rooms.announce(room, peer, info, info.required_dst_info_num)

    def withdraw(self, room: int = ROOM, **fields: Any) -> None:
        """A decode rank gives a room up."""
        fields = {"peer": "D", "host": "10.0.0.1", "port": 4000, "reason": "bored"} | fields
        self.ranks.take(wire.Withdraw(room, **fields))

    def stopped(self) -> list[tuple[str, int, str]]:
        """Who was told of which room, and why, since the last look."""
        return [(host, it.room, it.reason) for host, _, it in self.sockets.take()]


@pytest.fixture
def side() -> Side:
    return Side()


def test_registrations_are_bounded(side: Side) -> None:
    """Guards against ranks of servers that never ping and are gone, of which all is kept for ever;
    and against one that is forgotten while it pings, while its rooms are under way, or although
    others were used less recently."""
    table = side.manager.decode_kv_args_table
    table.update({f"gone {number}": REGISTERED for number in range(4200)})
    side.request()
    side.announce()
    side.ranks.take(wire.Ping("10.0.0.9:1", "gone 0", "10.0.0.1", 4000))
    side.rooms.announce(ROOM + 1, "gone 1", announcement(ROOM + 1), 1)
    side.rooms.fail(ROOM + 1, Reason.ABORTED, "over")
    dropped = side.ranks.tick()
    assert dropped == [f"gone {number}" for number in range(2, 107)]
    for peer in dropped:
        del table[peer]
    assert side.ranks.tick() == [] and len(table) == 4096


def test_a_failure_counts_once(side: Side) -> None:
    """Guards against a second, more general failure that hides the cause, is counted again, or is
    told to decode a second time."""
    before = dict(STATS.failures)
    side.request()
    side.announce()
    side.rooms.fail(ROOM, Reason.MISMATCH, "3 pages, 2 left")
    side.rooms.fail(ROOM, Reason.TRANSPORT, "later")
    assert side.manager.failure_records == {ROOM: "3 pages, 2 left"}
    assert side.manager.request_status == {ROOM: KVPoll.Failed}
    assert side.stopped() == [("10.0.0.1", ROOM, "3 pages, 2 left")]
    assert STATS.failures[Reason.MISMATCH] == before[Reason.MISMATCH] + 1
    assert STATS.failures[Reason.TRANSPORT] == before[Reason.TRANSPORT]


@pytest.mark.hazard("other-side-not-told")
def test_all_ranks_are_told_by_the_writer(side: Side) -> None:
    """Guards against one of two decode ranks that holds its pages for their whole bound, and
    against an answer in another rank's name, which would count for that one."""
    side.manager.attn_tp_rank = 3
    side.request()
    side.announce(peer="D", host="10.0.0.1", required_dst_info_num=2)
    side.announce(peer="E", host="10.0.0.2", required_dst_info_num=2)
    side.rooms.fail(ROOM, Reason.ABORTED, "aborted")
    sent = side.sockets.take()
    assert [host for host, _, _ in sent] == ["10.0.0.1", "10.0.0.2"]
    assert {(port, it.writer, it.unknown_peer) for _, port, it in sent} == {(4000, 3, False)}


def test_one_rank_that_cannot_be_told_hides_no_other(side: Side) -> None:
    """Guards against an unusable address that ends the scheduler, or the telling of the others."""
    side.sockets.refuse.add("10.0.0.1")
    side.request()
    side.announce(peer="D", host="10.0.0.1", required_dst_info_num=2)
    side.announce(peer="E", host="10.0.0.2", required_dst_info_num=2)
    side.rooms.fail(ROOM, Reason.ABORTED, "aborted")
    assert [host for host, _, _ in side.stopped()] == ["10.0.0.2"]


def test_a_room_number_beyond_64_bits_fails_like_any_other(side: Side) -> None:
    """Clients choose ``bootstrap_room``. Guards against one that no message can carry ending the
    scheduler when its room fails."""
    side.request(2**64)
    side.announce(2**64)
    side.rooms.fail(2**64, Reason.ABORTED, "aborted")
    assert side.manager.request_status == {2**64: KVPoll.Failed} and side.stopped() == []


@pytest.mark.parametrize("fields", [{"dummy": True}, {"stock": True}])
def test_who_does_not_write_or_would_not_understand_is_not_told(
    side: Side, fields: dict[str, bool]
) -> None:
    """Guards against a message that ends a stock decode server's thread, and against a dummy's word
    counting as that of a rank which writes."""
    side.request()
    side.announce(**fields)
    side.rooms.fail(ROOM, Reason.ABORTED, "aborted")
    assert not side.announce(**fields), "also where it announces too late"
    side.ranks.refuse_stranger(announcement(ROOM, **fields))
    assert side.stopped() == []


def test_a_rank_whose_frame_was_unreadable_is_told(side: Side) -> None:
    """Guards against a decode server of another version that learns of its failure by a timeout."""
    side.request()
    side.announce(stock=True, delta_error="protocol 2")
    side.rooms.fail(ROOM, Reason.MISMATCH, "protocol 2")
    assert len(side.stopped()) == 1


def test_withdrawn_before_anybody_knew_it(side: Side) -> None:
    """Guards against an unanswered withdrawal of a room that never got here, whose pages decode
    would hold for their whole bound; and against entries for it."""
    side.withdraw()
    assert side.stopped() == [("10.0.0.1", ROOM, "decode cancelled it: bored")]
    assert side.manager.request_status == {} and side.manager.failure_records == {}
    assert side.rooms.claim(ROOM)[1] == "decode cancelled it: bored"


@pytest.mark.parametrize("steps", [(), ("request",), ("announce",), ("request", "announce of 2")])
def test_withdrawn_by_a_rank_that_never_registered(side: Side, steps: tuple[str, ...]) -> None:
    """Guards against a message that ends a request of others: only a decode rank that this prefill
    rank knows may withdraw a room. Who asks is answered, and waits for nothing."""
    for step in steps:
        if step == "request":
            side.request()
        else:
            side.announce(required_dst_info_num=2 if step.endswith("2") else 1)
    side.withdraw(peer="stranger", host="10.0.0.9")
    text = f"room {ROOM}: decode rank stranger is not one of its peers"
    assert side.stopped() == [("10.0.0.9", ROOM, text)]
    if "request" not in steps:
        side.request()
    assert side.rooms.stopped(ROOM) is None
    assert side.manager.request_status == {ROOM: KVPoll.Bootstrapping}


def test_withdrawn_by_a_peer_whose_registration_is_gone(side: Side) -> None:
    """Guards against a room that nobody can withdraw, because a decode rank that had announced it
    was dropped here: what it has announced is proof enough."""
    side.request()
    side.announce()
    del side.manager.decode_kv_args_table["D"]
    side.withdraw()
    assert side.stopped() == [("10.0.0.1", ROOM, "decode cancelled it: bored")]


def test_withdrawn_after_the_request_left(side: Side) -> None:
    """Guards against decode waiting for the word of a rank whose request is long done: everything
    was sent, and nothing is under way."""
    side.request()
    side.announce()
    side.forget()
    side.withdraw()
    assert len(side.stopped()) == 1 and side.manager.request_status == {}


@pytest.mark.hazard("other-side-not-told")
@pytest.mark.parametrize("claims", ["before", "after"])
def test_withdrawn_while_its_request_arrives(side: Side, claims: str) -> None:
    """Its sender sets SGLang's status first and claims the room then. Guards against a request that
    finds its room open in the middle of a withdrawal, and then waits for ever: its room is stopped,
    and nothing says that it failed."""
    side.announce()
    side.manager.update_status(ROOM, KVPoll.Bootstrapping)
    if claims == "before":
        side.request()
    side.withdraw()
    if claims == "after":
        side.request()
    assert side.held[ROOM].is_over and not side.enter(ROOM)
    assert side.manager.request_status == {ROOM: KVPoll.Failed}
    assert side.manager.failure_records == {ROOM: "decode cancelled it: bored"}
    assert len(side.stopped()) == 1


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize("steps", ["", "enter", "enter complete"])
def test_withdrawn_by_a_rank_of_another_request(side: Side, steps: str) -> None:
    """Clients choose numbers. Guards against a request that fails because a decode server that was
    given another one of its number gives that up; and against that server's pages held for their
    whole bound."""
    side.request()
    side.announce()
    for step in steps.split():
        getattr(side.rooms, step)(side.held[ROOM])
    side.manager.decode_kv_args_table["E"] = SimpleNamespace(endpoint="10.0.0.2", dst_port=4000)
    side.withdraw(peer="E", host="10.0.0.2")
    assert not side.held[ROOM].is_stopped and side.manager.failure_records == {}
    assert [(host, room) for host, room, _ in side.stopped()] == [("10.0.0.2", ROOM)]
    if "complete" not in steps:
        assert side.enter(ROOM) and side.rooms.complete(side.held[ROOM])
    side.rooms.leave(ROOM)
    side.forget()
    side.request()
    assert not side.held[ROOM].is_stopped


def test_withdrawn_by_a_rank_whose_announcement_is_on_its_way(side: Side) -> None:
    """One of two decode ranks has announced, and the other's withdrawal overtakes its announcement.
    Guards against a room that waits for that one."""
    side.request()
    side.announce(required_dst_info_num=2)
    side.manager.decode_kv_args_table["E"] = SimpleNamespace(endpoint="10.0.0.2", dst_port=4000)
    side.withdraw(peer="E", host="10.0.0.2")
    assert side.held[ROOM].is_over
    assert sorted(host for host, _, _ in side.stopped()) == ["10.0.0.1", "10.0.0.2"]


def test_withdrawn_twice_and_again_late(side: Side) -> None:
    """Guards against a repeated withdrawal that is not answered, or counted, or raises."""
    before = STATS.failures[Reason.ABORTED]
    side.request()
    side.announce()
    for _ in range(3):
        side.withdraw()
    assert STATS.failures[Reason.ABORTED] == before + 1
    side.stopped()
    side.forget()
    side.withdraw()
    assert len(side.stopped()) == 1


def test_a_stranger_is_told_to_connect_again(side: Side) -> None:
    """A decode rank that knew the prefill server before it was restarted. Guards against its
    waiting for a rank that cannot write to it."""
    side.ranks.refuse_stranger(announcement(ROOM))
    ((_, _, message),) = side.sockets.take()
    assert message.unknown_peer and message.room == ROOM


@pytest.mark.parametrize("peer", ["D", "stranger"])
def test_pings_are_answered(side: Side, peer: str) -> None:
    """Guards against a live rank that counts as dead, and against a restarted one that seems to
    know its peers."""
    side.ranks.take(wire.Ping("10.5.5.5:77", peer, "10.0.0.1", 4000))
    assert side.sockets.take() == [("10.0.0.1", 4000, wire.Pong("10.5.5.5:77", peer == "D"))]


@pytest.mark.parametrize("message", [wire.Stopped(7, 0, ""), wire.Pong("a:1", True)])
def test_messages_for_decode(side: Side, message: wire.Message) -> None:
    """Guards against a decode rank's port and a prefill rank's being mixed up in silence."""
    with pytest.raises(wire.ControlError):
        side.ranks.take(message)


def ping(side: Side, peer: str = "D") -> None:
    """A sign of life."""
    side.ranks.take(wire.Ping("a:1", peer, "10.0.0.1", 4000))


def advance(side: Side, seconds: float, *, turns: bool = True) -> list[str]:
    """Time passes, with the reader's clock ticking as it should, and the scheduler's turns with it
    unless it is busy with one thing."""
    silent = []
    end = side.clock.now + seconds
    while side.clock.now < end:
        side.clock.now = min(side.clock.now + 1, end)
        if turns:
            side.rooms.scheduler_time.turn()
        silent += side.ranks.tick()
    return silent


@pytest.mark.hazard("dead-peer-leftovers")
def test_a_decode_rank_that_falls_silent(side: Side) -> None:
    """Guards against rooms of a decode server that died which wait for ever, against another one's
    rooms failing with them, and against a rank that never pinged (stock) being forgotten."""
    for room, peer in ((7, "D"), (8, "E"), (9, "stock")):
        side.manager.decode_kv_args_table[peer] = REGISTERED
        side.request(room)
        side.announce(room, peer)
    ping(side, "D")
    ping(side, "E")
    assert advance(side, 100) == []
    ping(side, "E")
    assert advance(side, 19.5) == []
    assert advance(side, 0.5) == ["D"]
    assert side.manager.request_status == {
        7: KVPoll.Failed,
        8: KVPoll.Bootstrapping,
        9: KVPoll.Bootstrapping,
    }
    assert "was silent" in side.manager.failure_records[7]
    assert advance(side, 60) == [], "once"


@pytest.mark.hazard("dead-peer-leftovers")
@pytest.mark.parametrize("is_registered", [True, False])
def test_the_socket_of_a_decode_rank_that_is_gone(side: Side, is_registered: bool) -> None:
    """Guards against a socket for each decode rank that ever was, with which ZeroMQ tries to
    connect ten times a second: also of one whose registration went before it (Mooncake, after a
    transfer to it failed; NIXL, when it lost the connection)."""
    side.request()
    side.announce()
    ping(side, "D")
    ((host, port, _),) = side.sockets.take()
    if not is_registered:
        del side.manager.decode_kv_args_table["D"]
    assert advance(side, 119) == [] and side.sockets.dropped == []
    assert advance(side, 1) == ["D"]
    assert [room for _, room, _ in side.stopped()] == [ROOM] and side.sockets.dropped == []
    assert advance(side, 5) == [] and side.sockets.dropped == [(host, port)], "once it was told"


@pytest.mark.hazard("dead-peer-leftovers")
def test_a_late_word_to_a_decode_rank_that_is_gone(side: Side) -> None:
    """A write to it settles minutes after it was given up, and its room's end is told. Guards
    against the socket that this opens staying for ever."""
    sockets = side.ranks._sockets = wire.PeerSockets(side.clock)
    side.request()
    side.announce(host="127.0.0.1")
    assert side.enter(ROOM)
    side.ranks.take(wire.Ping("a:1", "D", "127.0.0.1", 4000))
    assert advance(side, 120) == ["D"]
    assert advance(side, 5) == [] and not sockets._sockets
    side.rooms.leave(ROOM)
    assert len(sockets._sockets) == 1
    advance(side, 121)
    assert not sockets._sockets


def test_a_stranger_that_pings_leaves_nothing(side: Side) -> None:
    """Guards against a table that any sender of pings can grow."""
    for number in range(100):
        ping(side, f"stranger {number}")
    assert side.ranks._heard == {}


def test_a_known_rank_is_answered_where_it_registered(side: Side) -> None:
    """Guards against a message that has this server connect to an address of its sender's choice,
    and keep on for as long as a decode rank may be silent."""
    side.ranks.take(wire.Ping("a:1", "D", "10.6.6.6", 22))
    side.withdraw(host="10.6.6.6", port=22)
    assert [sent[:2] for sent in side.sockets.take()] == [("10.0.0.1", 4000)] * 2


def test_a_stranger_is_answered_once(side: Side) -> None:
    """One that connects anew after a restart of this server is to learn that. Guards against
    attempts to connect to whatever address a stranger named, beyond a few seconds."""
    strangers = side.ranks._strangers = wire.PeerSockets(side.clock)
    side.ranks.take(wire.Ping("a:1", "stranger", "127.0.0.1", 4000))
    side.ranks.refuse_stranger(announcement(8, host="127.0.0.2"))
    assert len(strangers._sockets) == 2 and side.sockets.take() == []
    advance(side, 2)
    assert not strangers._sockets


@pytest.mark.parametrize("noticed_by", ["tick", "enter"])
def test_a_process_that_did_not_run(side: Side, noticed_by: str) -> None:
    """Stopped by a debugger, a cgroup or a suspended machine: decode has waited its bound and gave
    the pages to others. Guards against a rank that wakes up and writes to them."""
    side.request()
    side.announce()
    side.request(8)  # not announced yet: nobody's pages
    side.clock.now += 30  # half of the quarantine bound
    if noticed_by == "tick":
        side.ranks.tick()
    assert not side.enter(ROOM) and side.enter(8)
    assert "did not run for 30 s" in side.manager.failure_records[ROOM]
    assert [room for _, room, _ in side.stopped()] == [ROOM]


def test_a_process_that_was_slow(side: Side) -> None:
    """Guards against rooms that fail because one step took long."""
    side.request()
    side.announce()
    side.clock.now += 29
    assert side.enter(ROOM) and side.ranks.tick() == []
    assert advance(side, 300) == [] and side.manager.request_status[ROOM] != KVPoll.Failed


@pytest.mark.hazard("other-side-not-told")
def test_a_request_that_comes_as_its_announcement_ends(side: Side) -> None:
    """Guards against a request that is taken in between the look at the clock and the end of its
    room: the room is stopped, nobody says that it failed, and it waits for ever."""
    told: list[tuple[int, Reason]] = []
    side.manager.room_stopped = (  # type: ignore[method-assign]
        lambda room, kind: told.append((room.number, kind))
    )
    side.announce()
    unclaimed = side.rooms.unclaimed

    def found(for_s: float = 0.0) -> list[int]:
        rooms = unclaimed(for_s)
        if rooms:
            side.request()
        return rooms

    side.rooms.unclaimed = found  # type: ignore[method-assign]
    advance(side, 30)
    assert [room for _, room, _ in side.stopped()] == [ROOM] and not side.enter(ROOM)
    assert side.manager.request_status == {ROOM: KVPoll.Failed}
    assert "no request for it reached" in side.manager.failure_records[ROOM]
    assert told == [(ROOM, Reason.TIMEOUT)]


def test_rooms_that_nobody_asked_for_end(side: Side) -> None:
    """An announcement whose request went to another prefill server. Guards against an entry that
    stays, and against decode waiting longer than prefill does; its late request fails at once."""
    side.announce(7)
    side.request(8)
    side.announce(8)
    advance(side, 29)
    assert side.stopped() == []
    advance(side, 1)
    assert [room for _, room, _ in side.stopped()] == [7]
    assert side.rooms.numbers() == [8]
    assert side.manager.open_rooms()["request_status"] == [8]
    assert "SGLANG_DISAGGREGATION_CLAIM_TIMEOUT" in (side.rooms.claim(7)[1] or "")


@pytest.mark.hazard("other-side-not-told")
def test_a_scheduler_that_is_busy_with_one_thing(side: Side) -> None:
    """It compiles a kernel, loads an adapter or new weights, and the reader's thread runs on.
    Guards against rooms that it finds failed although their requests had come, or come a second
    later because they had to wait as well."""
    advance(side, 5)
    side.announce(7)
    side.announce(8)
    advance(side, 100, turns=False)
    side.rooms.scheduler_time.turn()
    assert side.stopped() == [] and side.rooms.claim(7)[1] is None
    advance(side, 2)
    assert side.stopped() == [] and side.rooms.claim(8)[1] is None
    assert side.rooms.destinations(7) and side.enter(8)


def test_a_busy_scheduler_still_ends_what_nobody_asked_for(side: Side) -> None:
    """Guards against rooms that are never ended on a server whose turns are long."""
    advance(side, 5)
    side.announce(7)
    advance(side, 100, turns=False)
    advance(side, 29)
    assert side.stopped() == []
    advance(side, 1)
    assert [room for _, room, _ in side.stopped()] == [7]


def test_a_failure_is_logged_by_its_kind(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a client that goes away filling the log with errors, and against a real
    failure that is not one."""
    with caplog.at_level(logging.INFO):
        side.request(7)
        side.request(8)
        side.rooms.fail(7, Reason.ABORTED, "client went away")
        side.rooms.fail(8, Reason.TRANSPORT, "link broke")
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels == {
        "KV transfer of room 7 failed: client went away": "INFO",
        "KV transfer of room 8 failed: link broke": "ERROR",
    }

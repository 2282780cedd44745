"""A room given up on decode, and prefill's word that it stopped: in every order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from unit.delta.decode.test_prefill_servers import ADDRESS, RANKS, ROOM, Side


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    made = Side(monkeypatch)
    made.handshake()
    made.room()
    yield made


def stopped(side: Side, room: int = ROOM, writer: int = 0, **fields: bool) -> None:
    """The word of a prefill rank."""
    side.servers.take(wire.Stopped(room, writer, "because", **fields))


def test_stopped_before_the_room_is_given_up(side: Side) -> None:
    """Prefill failed first. Guards against pages held for a word that was already said, and against
    a failure whose cause is lost."""
    stopped(side)
    assert side.manager.request_status[ROOM] == KVPoll.Failed
    assert side.manager.failure_records[ROOM] == "prefill reported: because"
    assert side.hold() is None and not side.servers.deferred_rooms()


def test_stopped_after_the_room_was_given_up(side: Side) -> None:
    """Guards against pages given back before prefill said so, and against its word changing what
    the client is told."""
    side.servers.fail(ROOM, Reason.TIMEOUT, "too late")
    deferred = side.hold()
    assert deferred is not None and not deferred.is_drained()
    stopped(side)
    assert deferred.is_drained()
    assert side.manager.failure_records[ROOM] == "too late"


@pytest.mark.parametrize("before", [0, 1, 2])
def test_two_writers_stop(side: Side, before: int) -> None:
    """Guards against the first of two prefill ranks speaking for both, whether its word comes
    before or after the room is given up."""
    for writer in range(before):
        stopped(side, writer=writer)
        stopped(side, writer=writer)
    deferred = side.hold(writers=2)
    for writer in range(before, 2):
        assert deferred is not None and not deferred.is_drained()
        stopped(side, writer=writer)
        stopped(side, writer=writer)
    assert deferred is None or deferred.is_drained()


def test_stopped_twice_and_late(side: Side) -> None:
    """Guards against a repeated word that leaves an entry or raises, also when the room is gone."""
    deferred = side.hold()
    stopped(side)
    stopped(side)
    assert deferred.is_drained()
    deferred.stop_following()
    side.manager.forget_status(ROOM)
    stopped(side)
    assert not side.servers.deferred_rooms() and not side.manager.progresses
    assert not side.manager.request_status and not side.manager.failure_records


def test_stopped_for_another_room(side: Side) -> None:
    """Guards against a word about one room that gives another one's pages back, or fails it."""
    side.room(8)
    deferred = side.hold(7)
    stopped(side, room=9)
    stopped(side, room=8)
    assert not deferred.is_drained() and side.manager.request_status[7] == KVPoll.WaitingForInput
    assert 9 not in side.manager.request_status and 9 not in side.manager.progresses


def test_a_word_about_the_room_that_is_watched(side: Side) -> None:
    """A new request with the number of a room that is still watched is refused (see DeltaReceiver);
    guards against the word about the old room counting for the new one until then."""
    deferred = side.hold()
    side.manager.forget_status(ROOM)
    side.room()  # the new request, about to be refused
    stopped(side)
    assert deferred.is_drained()
    assert side.manager.request_status[ROOM] == KVPoll.WaitingForInput
    assert ROOM not in side.manager.progresses


def test_a_rank_that_knows_nothing_of_us(side: Side) -> None:
    """Guards against a room that waits for a restarted rank, and against the next request
    announcing itself there without registering first."""
    stopped(side, unknown_peer=True)
    assert side.hold() is None
    assert ADDRESS not in side.manager.prefill_info_table and not side.manager.connection_pool


def test_a_failed_room_is_told_to_all_its_ranks(side: Side) -> None:
    """Guards against one of two prefill ranks that goes on computing and writing; one that cannot
    be told does not hide the other."""
    side.servers.withdraw(ADDRESS, RANKS, ROOM, "the client went away")
    sent = side.sockets.take()
    assert [(host, port) for host, port, _ in sent] == [("10.0.0.1", 4000), ("10.0.0.1", 4001)]
    assert {(it.room, it.peer, it.host, it.port, it.reason) for _, _, it in sent} == {
        (ROOM, "decode-agent", "10.9.9.9", 4999, "the client went away")
    }
    side.sockets.refuse.add("10.0.0.1")
    infos = [*RANKS, {"rank_ip": "10.0.0.2", "rank_port": 4000}]
    side.servers.withdraw(ADDRESS, infos, ROOM, "x")
    assert [host for host, _, _ in side.sockets.take()] == ["10.0.0.2"]


def test_a_room_number_that_no_message_can_carry(side: Side) -> None:
    """Clients choose ``bootstrap_room``. Guards against one beyond 64 bits ending the scheduler
    when its request is aborted."""
    side.servers.withdraw(ADDRESS, RANKS, 2**64, "x")
    assert side.sockets.take() == []


def test_failing_an_unknown_room_leaves_nothing(side: Side) -> None:
    """Guards against a late word that brings a room back which the scheduler is done with."""
    side.manager.forget_status(ROOM)
    side.servers.fail(ROOM, Reason.PEER_FAILED, "late")
    assert not side.manager.request_status and not side.manager.failure_records


def test_watched_rooms_are_used_under_the_lock_only(side: Side) -> None:
    """The scheduler closes watches while the heartbeat walks them and the reader looks them up.
    Guards against "dictionary changed size during iteration" in the thread that notices dead
    servers."""
    lock = side.servers._lock

    class Guarded(dict[int, Any]):
        """Refuses whoever does not hold the lock."""

        def __getattribute__(self, name: str) -> Any:
            assert lock._is_owned(), f"{name} without the lock"  # type: ignore[attr-defined]
            return super().__getattribute__(name)

        def __iter__(self) -> Any:
            assert lock._is_owned(), "walked without the lock"  # type: ignore[attr-defined]
            return super().__iter__()

    side.handshake()
    side.room(7)
    side.servers._deferred = Guarded()
    deferred = side.hold(7)
    side.servers._known()
    assert side.servers.progress_of(7) is deferred.progress
    side.servers.take(wire.Stopped(7, 3, "gone"))
    assert side.servers.deferred_rooms() == [7] and side.servers.deferred(7) is deferred
    side.servers.lost(ADDRESS, True, "gone")
    deferred.stop_following()
    assert side.servers.deferred(7) is None

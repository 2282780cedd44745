"""Messages on a prefill rank's port, from decode ranks and from strangers, over both backends."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

from component.broken import broken
from component.transfer.messages import ANNOUNCEMENTS, DIALECTS, MOONCAKE, NIXL, Dialect
from effort import tries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import INTERVAL_S
from sglang.srt.disaggregation.delta.peer_messages import MessageReader

LOGGER = "sglang.srt.disaggregation.delta.peer_messages"

#: What cannot be served, and what the log says of it; then what only one backend could be sent.
REFUSED: list[tuple[Dialect, list[bytes], str]] = [
    (say, message, complaint)
    for say in DIALECTS
    for message, complaint in (
        (say.announcement()[:5], "at least 8 expected"),
        (say.registration(kv_buffers=1), "registered 1 KV buffers, this prefill rank has 2"),
        (say.registration(tp=(0, 0)), "rank 0 of 0 is invalid"),
        (say.registration(item=32), "KV pages have 32 bytes, this prefill rank's 64"),
        (say.announcement(pages=(-1,)), "a destination page is negative"),
        (say.announcement(pages=(3, 3)), "a destination page is listed twice"),
        (say.announcement(needed=0), "a count or an index is negative"),
        (say.announcement(slot=b"-1"), "a count or an index is negative"),
        (say.announcement(num_pages=3), "2 destination pages came, 3 were sent"),
        (say.announcement(pool_pages=5), "destination page 5, but decode's pool has 5"),
        (say.announcement(metadata_slots=3), "metadata slot 3, but decode has 3"),
        (wire.encode_control(wire.Stopped(7, 0, "no")), "not for a prefill rank"),
    )
]
REFUSED += [
    (NIXL, [], "does not start like"),
    (NIXL, [b"GET / HTTP/1.1"], "does not start like"),
    (NIXL, NIXL.registration()[:11], "12 expected"),
    (MOONCAKE, [], "at least 8 expected"),
    (MOONCAKE, [b"GET / HTTP/1.1"], "at least 8 expected"),
    (MOONCAKE, MOONCAKE.registration()[:9], "10 expected"),
    (MOONCAKE, MOONCAKE.registration(session=b"10.0.0.2"), "does not end with a port"),
    (MOONCAKE, MOONCAKE.announcement(pages=(), slot=b""), "it names no metadata slot"),
]

both = pytest.mark.parametrize("say", DIALECTS, ids=repr)


def state(manager: Any) -> tuple[Any, ...]:
    """Everything that a message could change."""
    return (
        list(manager.decode_kv_args_table),
        {room: len(manager.rooms.destinations(room)) for room in manager.rooms.numbers()},
        dict(manager.request_status),
        manager.rooms.numbers(),
    )


def announcements_in(manager: Any) -> int:
    """How many there are."""
    return sum(len(manager.rooms.destinations(room)) for room in manager.rooms.numbers())


@both
def test_a_room_is_ready_when_its_last_rank_announced_it(say: Dialect) -> None:
    """Guards against rooms that start before every decode rank has listed its pages, and against a
    table entry for a request that is not here."""
    manager, reader = say.acquainted()
    for room in (7, 8):
        manager.update_status(room, KVPoll.Bootstrapping)
    reader.handle(say.announcement(room=7, needed=2))
    reader.handle(say.announcement(room=8))
    reader.handle(say.announcement(room=9))
    assert manager.request_status == {7: KVPoll.Bootstrapping, 8: KVPoll.WaitingForInput}
    assert manager.rooms.room(8).announcements[say.peer].delta.num_pages == 2


@both
def test_a_request_comes_in_the_middle_of_an_announcement(say: Dialect) -> None:
    """Guards against a request that starts between the two places where an announcement is listed,
    without what was announced: it would send the whole prompt, and fail by its number of pages."""
    manager, reader = say.acquainted()
    announce, started = manager.rooms.announce, []

    def while_the_request_comes(*announcement: Any) -> bool:
        manager.update_status(7, KVPoll.Bootstrapping)  # as a sender begins
        assert manager.rooms.claim(7)[1] is None
        started.append((manager.start_if_announced(7), manager.rooms.destinations(7)))
        return bool(announce(*announcement))

    manager.rooms.announce = while_the_request_comes
    reader.handle(say.announcement())
    assert started == [(False, [])]
    assert manager.request_status == {7: KVPoll.WaitingForInput}
    assert len(manager.rooms.destinations(7)) == 1


@pytest.mark.hazard("lists-cut-to-fit")
@pytest.mark.parametrize(("say", "message", "complaint"), REFUSED)
def test_what_cannot_be_served_is_dropped_by_name(
    say: Dialect, message: list[bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One stray or broken message must not end the thread that serves every decode server, nor
    leave half a room behind; the log must say whose it was and what is wrong."""
    manager, reader = say.acquainted()
    before = state(manager)
    with caplog.at_level(logging.ERROR, LOGGER):
        reader.handle(message)
    assert state(manager) == before
    assert complaint in caplog.text


@pytest.mark.hazard("room-number-reused", "bad-kv-in-tree")
@both
def test_a_decode_rank_too_many(say: Dialect) -> None:
    """Guards against a decode rank that is told that it has pages which were sent before it asked:
    those that the room is for had announced it, and this one is of another request of its number.
    That one is refused, and the first is served."""
    manager, reader = say.acquainted()
    first = SimpleNamespace(required_dst_info_num=1)
    assert manager.rooms.announce(7, "another", first, 1)
    for request_first in (False, True):
        if request_first:
            assert manager.rooms.claim(7)[1] is None
        reader.handle(say.announcement(room=7))
        _, _, message = manager.decode_ranks._sockets.sent.pop()
        assert message.room == 7 and "other decode ranks" in message.reason
        assert manager.rooms.destinations(7) == [first]
    manager.rooms.forget(manager.rooms.room(7))
    assert manager.rooms.claim(7)[1] is None, "the number is free"


@both
@pytest.mark.parametrize("ours", [True, False])
def test_a_room_of_a_peer_that_never_registered(say: Dialect, ours: bool) -> None:
    """Its base addresses are unknown, so its pages could be written nowhere. One of ours is told to
    connect again; a stock one would not understand that."""
    manager, reader = say.listener()
    reader.handle(say.announcement(ours=ours))
    assert state(manager) == ([], {}, {}, [])
    sent = manager.decode_ranks._strangers.sent
    assert [(host, port, m.room, m.unknown_peer) for host, port, m in sent] == (
        [("10.0.0.2", 4000, 7, True)] if ours else []
    )


@both
def test_a_room_that_ended_before_it_was_announced_is_answered(say: Dialect) -> None:
    """Prefill may abort a request before decode announces it; decode would wait for its timeout,
    and the announcement would stay in prefill's table for ever."""
    manager, reader = say.acquainted()
    manager.rooms.claim(7)
    manager.rooms.fail(7, Reason.ABORTED, "aborted")
    reader.handle(say.announcement(room=7))
    ((_, _, message),) = manager.decode_ranks._sockets.sent
    assert (message.room, message.reason) == (7, "aborted")
    assert manager.rooms.destinations(7) == []


@both
def test_a_noisy_peer_is_logged_once_in_a_while(
    say: Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    """A port scanner must not fill the disk, and another peer's trouble must still be seen."""
    now = 0.0
    _, reader = say.listener(lambda: now)
    other = [b"x", b"7", b"10.0.0.3", b"1"]
    with caplog.at_level(logging.ERROR, LOGGER):
        for _ in range(1000):
            reader.handle([b"x", b"7", b"10.0.0.2", b"1"])
        reader.handle(other)
        assert len(caplog.records) == 2
        now = INTERVAL_S
        reader.handle(other)
        assert len(caplog.records) == 3


@pytest.mark.hazard("other-side-not-told")
@pytest.mark.fuzz
@both
def test_broken_messages_change_nothing(say: Dialect, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever bytes arrive, the reader survives, what it drops changes nothing, and the next good
    announcement is served."""
    caplog.set_level(logging.CRITICAL)
    rng, count, dropped = random.Random(0), tries(20_000), 0
    manager, _ = say.listener()
    announcements = ANNOUNCEMENTS[say.backend](manager)

    def take(message: list[bytes]) -> None:
        nonlocal dropped
        before = len(manager.decode_kv_args_table), announcements_in(manager)
        try:
            announcements.take(message)
        except Exception:
            after = (
                len(manager.decode_kv_args_table),
                announcements_in(manager),
            )
            assert before == after
            dropped += 1
            raise

    reader = MessageReader(manager.decode_ranks.take, take)
    reader.handle(say.registration())
    kinds = [
        say.registration(),
        say.announcement(),
        say.announcement(9, (), 3),
        say.announcement(10, ours=False),
        wire.encode_control(wire.Withdraw(7, say.peer, "10.0.0.2", 4000, "gone")),
        wire.encode_control(wire.Ping("10.0.0.1:5", say.peer, "10.0.0.2", 4000)),
    ]
    for _ in range(count):
        reader.handle(broken(rng, rng.choice(kinds)))
    assert dropped > 0.3 * count
    for peer, info in manager.decode_kv_args_table.items():
        assert say is NIXL or int(peer.rsplit(":", 1)[1]) >= 0 and len(info.dst_kv_ptrs) >= 2
    for room in manager.rooms.numbers():
        for peer, info in manager.rooms.room(room).announcements.items():
            assert peer in manager.decode_kv_args_table
            assert info.dst_kv_indices.size == 0 or info.dst_kv_indices.min() >= 0
            assert info.required_dst_info_num >= 1
            assert info.dst_aux_index >= 0 or say is MOONCAKE and info.is_dummy
    assert manager.request_status == {} and manager.failure_records == {}
    manager.update_status(123456789, KVPoll.Bootstrapping)
    reader.handle(say.announcement(room=123456789))
    assert manager.request_status == {123456789: KVPoll.WaitingForInput}

"""Messages on a prefill rank's port, from decode ranks and from unknown senders, over both
backends."""

from __future__ import annotations

import logging
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from component.transfer import bare
from component.transfer.messages import DIALECTS, MOONCAKE, NIXL, Dialect
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import INTERVAL_S
from sglang.srt.disaggregation.delta.peer_messages import BadMessage

LOGGER = "sglang.srt.disaggregation.delta.peer_messages"

#: Messages that cannot be served, with their log text; then those of one backend only.
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
    """Return everything that a message could change."""
    return (
        list(manager.decode_kv_args_table),
        {room.number: len(room.announcements) for room in manager.rooms.all()},
        dict(manager.request_status),
    )


@both
def test_a_room_is_ready_when_its_last_rank_announced_it(say: Dialect) -> None:
    """Guards against rooms that start before every decode rank has announced its pages, and against
    a table entry for a request that is not here."""
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
    """Guards against a request that starts between the two places where an announcement is
    recorded, without the announcement: it would send the whole prompt, and fail by its number of
    pages."""
    manager, reader = say.acquainted()
    announce, started = manager.rooms.announce, []

    def while_the_request_comes(*announcement: Any) -> bool:
        manager.update_status(7, KVPoll.Bootstrapping)  # as a sender begins
        assert manager.rooms.claim(7).reason is None
        started.append((manager.request_status[7], bare.destinations(manager, 7)))
        return bool(announce(*announcement))

    manager.rooms.announce = while_the_request_comes
    reader.handle(say.announcement())
    assert started == [(KVPoll.Bootstrapping, [])]
    assert manager.request_status == {7: KVPoll.WaitingForInput}
    assert len(bare.destinations(manager, 7)) == 1


@pytest.mark.hazard("lists-cut-to-fit")
@pytest.mark.parametrize(("say", "message", "complaint"), REFUSED)
def test_what_cannot_be_served_is_dropped_by_name(
    say: Dialect, message: list[bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a stray or broken message that ends the thread which serves every decode
    server, or leaves half a room behind; the log must name the sender and the fault."""
    manager, reader = say.acquainted()
    before = state(manager)
    with caplog.at_level(logging.ERROR, LOGGER):
        reader.handle(message)
    assert state(manager) == before
    assert complaint in caplog.text


@pytest.mark.hazard("room-number-reused", "bad-kv-in-tree")
@both
def test_a_decode_rank_too_many(say: Dialect) -> None:
    """Guards against a decode rank that takes pages sent before its announcement for its own: all
    decode ranks of the room had announced it, and this one belongs to another request with the same
    room number. It is refused, and the first request is served."""
    manager, reader = say.acquainted()
    first = SimpleNamespace(required_dst_info_num=1)
    assert manager.rooms.announce(7, "another", first, 1)
    for request_first in (False, True):
        if request_first:
            assert manager.rooms.claim(7).reason is None
        reader.handle(say.announcement(room=7))
        _, _, message = manager.sockets.sent.pop()
        assert message.room == 7 and "other decode ranks" in message.reason
        assert bare.destinations(manager, 7) == [first]
    manager.rooms.forget(manager.rooms.room(7))
    assert manager.rooms.claim(7).reason is None, "the number can be used again"


@both
@pytest.mark.parametrize("ours", [True, False])
def test_a_room_of_a_peer_that_never_registered(say: Dialect, ours: bool) -> None:
    """Guards against an announcement without base addresses, whose pages cannot be written. A
    decode rank of this package is notified to connect again; a stock one would not understand
    that."""
    manager, reader = say.listener()
    reader.handle(say.announcement(ours=ours))
    assert state(manager) == ([], {}, {})
    sent = manager.sockets.sent
    assert [(host, port, m.room, m.unknown_peer) for host, port, m in sent] == (
        [("10.0.0.2", 4000, 7, True)] if ours else []
    )


#: Number of KV and of state buffers, on decode and on prefill: layers with a sliding window have a
#: separate pool on one of the servers only.
ONE_POOL, TWO_POOLS = (4, 0), (2, 2)


@pytest.mark.parametrize("request_first", [True, False])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(("theirs", "here"), [(ONE_POOL, TWO_POOLS), (TWO_POOLS, ONE_POOL)])
@both
def test_a_window_pool_on_one_side_fails_the_rooms_at_once(
    say: Dialect,
    theirs: tuple[int, int],
    here: tuple[int, int],
    ours: bool,
    request_first: bool,
) -> None:
    """Guards against requests that fail with a message about page numbers, or wait for minutes on
    both servers, because only one has ``--disable-hybrid-swa-memory``. Stock SGLang cannot be
    notified over NIXL and waits."""
    manager, reader = say.listener()
    manager.kv_args.kv_data_ptrs, manager.kv_args.state_data_ptrs = (
        list(range(1, count + 1)) for count in here
    )
    manager.rooms.on_stopped = manager.room_stopped

    def request() -> Any:
        return say.sender(manager, "10.0.0.1:8998", 7, [0], 0)

    sender = request() if request_first else None
    kv_buffers, state_buffers = theirs
    reader.handle(say.registration(kv_buffers, state=struct.pack("2Q", 1, 2)[: 8 * state_buffers]))
    reader.handle(say.announcement(ours=ours))
    assert manager.decode_kv_args_table == {}
    sender = sender or request()
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(Exception, match="--disable-hybrid-swa-memory to both") as failure:
        sender.failure_exception()
    reason = str(failure.value)
    assert say.peer in reason
    sent = [message for _, _, message in manager.sockets.sent]
    if ours:
        assert [(m.room, m.reason, m.unknown_peer) for m in sent] == [(7, reason, False)]
    else:
        assert sent == ([[b"7", b"%d" % KVPoll.Failed, b"0"]] if say is MOONCAKE else [])


@both
def test_a_rank_whose_registration_was_refused_registers_again(say: Dialect) -> None:
    """Guards against a decode rank that is refused for ever because of an earlier registration."""
    manager, reader = say.listener()
    reader.handle(say.registration(kv_buffers=1))
    reader.handle(say.registration())
    reader.handle(say.announcement())
    assert [m.reason for _, _, m in manager.sockets.sent] == []
    assert len(bare.destinations(manager, 7)) == 1


@both
def test_a_refused_registration_under_another_name_ends_no_room(say: Dialect) -> None:
    """Guards against one bad message in the name of a known decode rank, after which each of its
    rooms fails, because it does not register again."""
    manager, reader = say.acquainted()
    manager.rooms.on_stopped = manager.room_stopped
    frames = say.registration(kv_buffers=1)
    reader.handle(frames)  # in the name of that rank
    reader.handle([b"10.9.9.9" if frame == b"10.0.0.2" else frame for frame in frames])
    reader.handle(say.announcement())
    assert manager.sockets.sent == [] and len(bare.destinations(manager, 7)) == 1


@both
def test_refused_registrations_are_small(say: Dialect) -> None:
    """Guards against an unknown sender that fills the memory with names of 64 MB each, or with an
    unlimited number of names."""
    manager, reader = say.listener()
    announcements = manager.announcements()
    for number in range(600):
        frames = say.registration(kv_buffers=1)
        at = frames.index(say.peer.encode())
        name = b"%d:%d" % (number, 4001)
        frames[at] = name if number % 2 else name.rjust(100_000, b"x")
        with pytest.raises(BadMessage):
            announcements.take(frames)
    assert 0 < len(announcements._refused) <= 256
    assert sum(len(text) for text in announcements._refused.values()) < 1 << 18


@both
def test_a_room_that_ended_before_it_was_announced_is_answered(say: Dialect) -> None:
    """Guards against a decode rank that waits for its timeout, and against an announcement that
    stays in prefill's table for ever, if prefill aborts a request before decode announces it."""
    manager, reader = say.acquainted()
    manager.rooms.fail(manager.rooms.claim(7), Reason.ABORTED, "aborted")
    reader.handle(say.announcement(room=7))
    ((_, _, message),) = manager.sockets.sent
    assert (message.room, message.reason) == (7, "aborted")
    assert bare.destinations(manager, 7) == []


@both
def test_a_noisy_peer_is_logged_once_in_a_while(
    say: Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a port scanner that fills the disk with log lines, and against a log limit
    that hides another peer's errors."""
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


@pytest.mark.hazard("leaking-room-records")
@pytest.mark.parametrize("pages", [(), (4, 5)])
@pytest.mark.parametrize("says", [True, False, None])
@both
def test_a_dummy_is_what_says_so(say: Dialect, says: bool | None, pages: tuple[int, ...]) -> None:
    """Guards against a full prefix hit taken for a dummy, whose decode rank would wait for its
    metadata, and against a dummy that is written to. A stock peer (``says`` is None) is a dummy if
    it announces no pages."""
    manager, reader = say.acquainted()
    is_stock = says is None
    slot = b"" if say is MOONCAKE and not pages and says is not False else b"3"
    reader.handle(say.announcement(pages=pages, slot=slot, ours=not is_stock, is_dummy=bool(says)))
    (info,) = manager.rooms.room(7).announcements.values()
    assert say.is_dummy(info) is (not pages if is_stock else says)
    assert (info.delta is None) == is_stock and info.delta_error is None


@both
def test_a_damaged_frame_is_kept_for_its_room(say: Dialect) -> None:
    """Guards against a bad announcement that counts as a dummy, and is skipped silently."""
    manager, reader = say.acquainted()
    reader.handle([*say.announcement(ours=False), b"sglang-delta:\xc1"])
    (info,) = bare.destinations(manager, 7)
    assert info.delta is None and "malformed" in info.delta_error


@both
def test_a_stock_prefill_server_reads_ours(say: Dialect) -> None:
    """Guards against a frame that an unpatched prefill server cannot parse."""
    kind = say.transfer_info
    stock = next(cls for cls in kind.__mro__[1:] if cls.__module__ == kind.__module__)
    info = stock.from_zmq(say.unguarded(say.announcement(pages=(3,))))
    assert info.dst_kv_indices.tolist() == [3] and not hasattr(info, "delta")


# ---- messages of one backend ----


def test_a_peer_that_nixl_refuses_may_register_again() -> None:
    """Guards against a peer in the table that NIXL does not know: its next registration would be
    ignored, and every transfer to it would fail."""
    manager, reader = NIXL.listener()
    reader.handle(NIXL.registration(metadata=b"torn"))
    with pytest.raises(ValueError):
        manager.peers.hold("D")
    assert manager.decode_kv_args_table == {}
    reader.handle(NIXL.registration())
    manager.peers.hold("D")
    assert list(manager.decode_kv_args_table) == ["D"]


def test_pages_of_state_come_as_an_array() -> None:
    """Guards against SGLang's list of numbers, which the scheduler would convert to an array for
    each decode rank: 128k pages take 10 ms."""
    manager, reader = NIXL.acquainted()
    frames = NIXL.announcement(7, pages=(4, 5))
    frames[8] = np.array([6, 7], np.int32).tobytes()
    reader.handle(frames)
    (info,) = bare.destinations(manager, 7)
    assert info.dst_state_indices.tolist() == [6, 7] and info.dst_state_indices.dtype == np.int32


@pytest.mark.parametrize(("tokens", "fits"), [(9, True), (12, True), (8, False), (13, False)])
def test_a_decode_server_that_lists_tokens(tokens: int, fits: bool) -> None:
    """Guards against a decode server with ``--enable-hisparse`` for which all requests fail: its
    pool on the host has pages of one token, and prefill's are larger."""
    manager, reader = MOONCAKE.listener()
    manager.kv_args.page_size = 4
    reader.handle(MOONCAKE.registration(item=16, hisparse=b"1"))
    reader.handle(MOONCAKE.announcement(pages=tuple(range(20, 20 + tokens)), ours=False))
    sender = MOONCAKE.sender(manager, "10.0.0.1:8998", 7, [0], 0)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(3, 0)
    assert sender.poll() == (KVPoll.WaitingForInput if fits else KVPoll.Failed)
    assert sender.num_kv_indices == 3

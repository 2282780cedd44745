"""Messages on the ports of NIXL ranks, from peers and from strangers."""

from __future__ import annotations

import logging
import random
import struct
from typing import Any

import numpy as np
import pytest

from component.broken import broken
from component.nixl.bare import decode, prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import control
from sglang.srt.disaggregation.delta.logs import INTERVAL_S
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl.manager import NixlAnnouncements, _refuse
from sglang.srt.disaggregation.delta.peer_messages import MessageReader
from sglang.srt.disaggregation.delta.wire import DeltaFrame, encode_frame
from sglang.srt.disaggregation.nixl import conn

LOGGER = "sglang.srt.disaggregation.delta.peer_messages"


def registration(
    kv_buffers: int = 2, tp: tuple[int, int] = (1, 0), metadata: bytes = b"metadata", item: int = 64
) -> list[bytes]:
    """A decode rank's registration, as stock SGLang sends it."""
    pointers = struct.pack(f"{kv_buffers}Q", *range(kv_buffers))
    size, rank = (str(number).encode() for number in tp)
    frames = [conn.GUARD, b"None", b"10.0.0.2", b"4000", b"D", metadata, pointers]
    return [*frames, struct.pack("Q", 9), b"", b"0", size, rank, str(item).encode()]


def announcement(
    room: int = 7,
    pages: tuple[int, ...] = (4, 5),
    needed: int = 1,
    slot: bytes = b"3",
    ours: bool = True,
    **frame: Any,
) -> list[bytes]:
    """A room's announcement, with a delta frame if it is ``ours``."""
    frames = [conn.GUARD, str(room).encode(), b"10.0.0.2", b"4000", b"D"]
    frames += [np.array(pages, dtype=np.int32).tobytes(), slot, str(needed).encode(), b""]
    fields = {"decode_prefix_len": 0, "num_pages": len(pages), "is_dummy": False, **frame}
    return [*frames, encode_frame(DeltaFrame(**fields))] if ours else frames


def reader_of(manager: Any) -> MessageReader:
    """What a prefill manager's reading thread runs."""
    return MessageReader(manager.decode_ranks.take, NixlAnnouncements(manager).take)


def state(manager: Any) -> tuple[Any, ...]:
    """Everything that a message could change."""
    return (
        list(manager.decode_kv_args_table),
        {room: list(infos) for room, infos in manager.transfer_infos.items()},
        dict(manager.request_status),
        manager.rooms.numbers(),
    )


def test_a_room_is_ready_when_its_last_rank_announced_it() -> None:
    """Guards against rooms that start before every decode rank has listed its pages, and against a
    table entry for a request that is not here."""
    manager = prefill()
    reader = reader_of(manager)
    reader.handle(registration())
    for room in (7, 8):
        manager.update_status(room, KVPoll.Bootstrapping)
    reader.handle(announcement(room=7, needed=2))
    reader.handle(announcement(room=8))
    reader.handle(announcement(room=9))
    assert manager.request_status == {7: KVPoll.Bootstrapping, 8: KVPoll.WaitingForInput}
    assert manager.transfer_infos[8]["D"].delta.num_pages == 2


@pytest.mark.hazard("lists-cut-to-fit")
@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ([], "does not start like"),
        ([b"GET / HTTP/1.1"], "does not start like"),
        (announcement()[:5], "at least 8 wanted"),
        (registration()[:11], "12 wanted"),
        (registration(kv_buffers=1), "registered 1 KV buffers, this prefill rank has 2"),
        (registration(tp=(0, 0)), "rank 0 of 0 cannot be"),
        (registration(item=32), "KV pages have 32 bytes, this prefill rank's 64"),
        (announcement(pages=(-1,)), "a destination page is negative"),
        (announcement(pages=(3, 3)), "a destination page is listed twice"),
        (announcement(needed=0), "a count or an index is negative"),
        (announcement(slot=b"-1"), "a count or an index is negative"),
        (announcement(num_pages=3), "2 destination pages came, 3 were sent"),
        (announcement(pool_pages=5), "destination page 5, but decode's pool has 5"),
        (announcement(metadata_slots=3), "metadata slot 3, but decode has 3"),
        (control.encode(control.Stopped(7, 0, "no")), "not for a prefill rank"),
    ],
)
def test_what_cannot_be_served_is_dropped_by_name(
    message: list[bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One stray or broken message must not end the thread that serves every decode server, nor
    leave half a room behind; the log must say whose it was and what is wrong."""
    manager = prefill()
    reader = reader_of(manager)
    reader.handle(registration())
    before = state(manager)
    with caplog.at_level(logging.ERROR, LOGGER):
        reader.handle(message)
    assert state(manager) == before
    assert complaint in caplog.text


def test_a_peer_that_nixl_refuses_may_register_again() -> None:
    """Guards against a peer that is listed though NIXL knows nothing of it: its registration would
    be ignored from then on, and every transfer to it would fail."""
    manager = prefill()
    reader = reader_of(manager)
    reader.handle(registration(metadata=b"torn"))
    assert manager.decode_kv_args_table == {}
    reader.handle(registration())
    assert list(manager.decode_kv_args_table) == ["D"]


@pytest.mark.parametrize("ours", [True, False])
def test_a_room_of_a_peer_that_never_registered(ours: bool) -> None:
    """Its base addresses are unknown, so its pages could be written nowhere. One of ours is told to
    connect again; a stock one would not understand that."""
    manager = prefill()
    reader_of(manager).handle(announcement(ours=ours))
    assert state(manager) == ([], {}, {}, [])
    sent = manager.decode_ranks._sockets.sent
    assert [(host, port, m.room, m.unknown_peer) for host, port, m in sent] == (
        [("10.0.0.2", 4000, 7, True)] if ours else []
    )


def test_a_room_that_ended_before_it_was_announced_is_answered() -> None:
    """Prefill may abort a request before decode announces it; decode would wait for its timeout,
    and the announcement would stay in prefill's table for ever."""
    manager = prefill()
    reader = reader_of(manager)
    reader.handle(registration())
    manager.rooms.claim(7)
    manager.rooms.fail(7, Reason.ABORTED, "aborted")
    reader.handle(announcement(room=7))
    ((_, _, message),) = manager.decode_ranks._sockets.sent
    assert (message.room, message.reason) == (7, "aborted") and manager.transfer_infos == {}


def test_a_noisy_peer_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """A port scanner must not fill the disk, and another peer's trouble must still be seen."""
    now = 0.0
    manager = prefill()
    reader = MessageReader(manager.decode_ranks.take, NixlAnnouncements(manager).take, lambda: now)
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
def test_a_hundred_thousand_broken_messages(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever bytes arrive, the reader survives, what it drops changes nothing, and the next good
    announcement is served."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(0)
    manager = prefill()
    announcements = NixlAnnouncements(manager)
    dropped = 0

    def take(message: list[bytes]) -> None:
        nonlocal dropped
        before = len(manager.decode_kv_args_table), sum(map(len, manager.transfer_infos.values()))
        try:
            announcements.take(message)
        except Exception:
            after = (
                len(manager.decode_kv_args_table),
                sum(map(len, manager.transfer_infos.values())),
            )
            assert before == after
            dropped += 1
            raise

    reader = MessageReader(manager.decode_ranks.take, take)
    reader.handle(registration())
    kinds = (
        registration(),
        announcement(),
        announcement(9, (), 3),
        announcement(10, ours=False),
        control.encode(control.Withdraw(7, "D", "10.0.0.2", 4000, "gone")),
        control.encode(control.Ping("10.0.0.1:5", "D", "10.0.0.2", 4000)),
    )
    for _ in range(100_000):
        reader.handle(broken(rng, rng.choice(kinds)))
    assert dropped > 30_000
    for infos in manager.transfer_infos.values():
        for peer, info in infos.items():
            assert peer in manager.decode_kv_args_table
            assert info.dst_kv_indices.size == 0 or info.dst_kv_indices.min() >= 0
            assert info.dst_aux_index >= 0 and info.required_dst_info_num >= 1
    assert manager.request_status == {} and manager.failure_records == {}
    manager.update_status(123456789, KVPoll.Bootstrapping)
    reader.handle(announcement(room=123456789))
    assert manager.request_status == {123456789: KVPoll.WaitingForInput}


def test_a_hundred_thousand_broken_messages_to_decode(caplog: pytest.LogCaptureFixture) -> None:
    """The same on a decode rank's port: only rooms that wait may fail, by a message that is whole,
    and no entry is made."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(0)
    rooms = (5, 6)
    manager = decode(*rooms, 1007)
    reader = MessageReader(manager.servers.take, _refuse)
    kinds = (
        control.encode(control.Stopped(5, 0, "gone")),
        control.encode(control.Stopped(99, 1, "gone", unknown_peer=True)),
        control.encode(control.Pong("10.0.0.1:5", False)),
        control.encode(control.Ping("10.0.0.1:5", "D", "10.0.0.2", 4000)),
        announcement(5),
    )
    for _ in range(100_000):
        reader.handle(broken(rng, rng.choice(kinds)))
    assert set(manager.request_status) == {*rooms, 1007}
    assert manager.request_status[6] == KVPoll.WaitingForInput
    assert set(manager.failure_records) <= {5} and not manager.servers.deferred_rooms()
    reader.handle(control.encode(control.Stopped(1007, 0, "gone")))
    assert manager.request_status[1007] == KVPoll.Failed


def test_broken_notifications_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A notification that cannot be understood, or is of a room that is not here, must not end the
    scheduler that reads it, nor leave an entry."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(0)
    manager = decode(5)
    texts = [b"5_kv_0_0_0", b"7_kv_0_1_0", b"5_state_1", b"9_aux_0"]
    for _ in range(1000):
        notes = [b"_".join(broken(rng, rng.choice(texts).split(b"_"))) for _ in range(100)]
        manager.agent.notes = {"prefill": notes}
        manager.collect_arrivals()
    assert set(manager.transfer_statuses) <= {5} and set(manager.request_status) == {5}

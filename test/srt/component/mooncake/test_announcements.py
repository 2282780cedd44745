"""Messages on a prefill rank's port, from decode servers and from strangers."""

from __future__ import annotations

import logging
import random
import struct
from typing import Any

import numpy as np
import pytest

from component.broken import broken
from component.mooncake.bare import prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import control
from sglang.srt.disaggregation.delta.mooncake.messages import MooncakeAnnouncements
from sglang.srt.disaggregation.delta.peer_messages import MessageReader
from sglang.srt.disaggregation.delta.wire import DeltaFrame, encode_frame

LOGGER = "sglang.srt.disaggregation.delta.peer_messages"
SESSION = b"10.0.0.2:4001"


def registration(
    kv_buffers: int = 2,
    tp: tuple[int, int] = (1, 0),
    session: bytes = SESSION,
    item_len: int = 64,
    hisparse: bytes = b"0",
) -> list[bytes]:
    """A decode rank's registration, as stock SGLang sends it."""
    pointers = struct.pack(f"{kv_buffers}Q", *range(kv_buffers))
    size, rank = (str(number).encode() for number in tp)
    frames = [b"None", b"10.0.0.2", b"4000", session, pointers, struct.pack("Q", 9), b""]
    return [*frames, rank, size, str(item_len).encode(), b"", b"", hisparse, b"", b""]


def announcement(
    room: int = 7,
    pages: tuple[int, ...] = (4, 5),
    needed: int = 1,
    slot: bytes = b"3",
    ours: bool = True,
    **frame: Any,
) -> list[bytes]:
    """A room's announcement, with a delta frame if it is ``ours``."""
    frames = [str(room).encode(), b"10.0.0.2", b"4000", SESSION]
    frames += [np.array(pages, dtype=np.int32).tobytes(), slot, b"", str(needed).encode()]
    fields = {"decode_prefix_len": 0, "num_pages": len(pages), "is_dummy": False, **frame}
    return [*frames, encode_frame(DeltaFrame(**fields))] if ours else frames


def reader_of(manager: Any) -> MessageReader:
    """What the manager's reading thread runs."""
    return MessageReader(manager.decode_ranks.take, MooncakeAnnouncements(manager).take)


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
    assert manager.transfer_infos[8][SESSION.decode()].delta.num_pages == 2


@pytest.mark.hazard("leaking-room-records")
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("dummy", [False, True, None])
def test_a_dummy_is_what_says_so(dummy: bool | None, empty: bool) -> None:
    """Guards against a full prefix hit taken for a dummy, whose decode rank would wait for its
    metadata, and against a dummy that is written to. A stock peer says it by two empty frames."""
    manager = prefill()
    reader = reader_of(manager)
    reader.handle(registration())
    pages = () if empty else (4, 5)
    slot = b"" if empty and dummy is not False else b"3"
    reader.handle(
        announcement(pages=pages, slot=slot, ours=dummy is not None, is_dummy=bool(dummy))
    )
    info = manager.transfer_infos[7][SESSION.decode()]
    assert info.is_dummy is (empty if dummy is None else dummy)


def test_registering_again_ends_the_refusal() -> None:
    """Guards against a decode server that stays shut out after one failed transfer."""
    manager = prefill()
    reader = reader_of(manager)
    reader.handle(registration())
    reader.handle(announcement())
    manager.session_failed(manager.transfer_infos[7][SESSION.decode()])
    assert manager.has_failed_session(SESSION.decode()) and not manager.decode_kv_args_table
    reader.handle(registration())
    assert not manager.has_failed_session(SESSION.decode()) and not manager.session_failures


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ([], "at least 8 wanted"),
        ([b"GET / HTTP/1.1"], "at least 8 wanted"),
        (announcement()[:5], "at least 8 wanted"),
        (registration()[:9], "10 wanted"),
        (registration(kv_buffers=1), "registered 1 KV buffers, this prefill rank has 2"),
        (registration(tp=(0, 0)), "rank 0 of 0 cannot be"),
        (registration(item_len=32), "KV pages have 32 bytes, this prefill rank's 64"),
        (registration(session=b"10.0.0.2"), "does not end with a port"),
        (announcement(pages=(-1,)), "a destination page is negative"),
        (announcement(pages=(3, 3)), "a destination page is listed twice"),
        (announcement(needed=0), "a count or an index is negative"),
        (announcement(slot=b"-1"), "a count or an index is negative"),
        (announcement(pages=(), slot=b""), "no metadata slot is named"),
        (announcement(num_pages=3), "2 destination pages came, 3 were sent"),
        (announcement(pool_pages=5), "destination page 5, but decode's pool has 5"),
        (announcement(metadata_slots=3), "metadata slot 3, but decode has 3"),
        ([b"WATERMARK", b"1", b"2"], "SGLANG_DISAGG_STAGING_BUFFER is not set here"),
        ([b"STAGING_RSP", *[b"1"] * 5, SESSION], "SGLANG_DISAGG_STAGING_BUFFER is not set here"),
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


def test_messages_of_staging_reach_it() -> None:
    """Guards against a prefill server with SGLang's staging buffers that never learns where decode
    has room, and against a watermark that goes back."""
    from sglang.srt.disaggregation.mooncake.conn import PrefillStagingContext

    manager = prefill()
    manager.enable_staging, manager._staging_ctx = True, PrefillStagingContext()
    reader = reader_of(manager)
    reader.handle(registration())
    reader.handle(announcement())
    for mark in ((1, 5), (1, 3)):
        reader.handle([b"WATERMARK", *(str(number).encode() for number in mark), SESSION])
    assert manager._staging_ctx.remote_watermarks == {SESSION.decode(): (1, 5)}
    reader.handle([b"STAGING_RSP", b"7", b"0", b"128", b"1", b"256", SESSION])
    place = manager.transfer_infos[7][SESSION.decode()].staging
    assert (place.offsets[0], place.rounds[0], place.ends[0]) == (128, 1, 256)
    reader.handle([b"STAGING_RSP", b"7", b"9999999999", b"128", b"1", b"256", SESSION])
    assert len(place.offsets) == 1, "a stranger's number is no table length"


def test_a_hundred_thousand_broken_messages(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever bytes arrive, the reader survives, what it drops changes nothing, and the next good
    announcement is served."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(0)
    manager = prefill()
    announcements = MooncakeAnnouncements(manager)
    dropped = 0

    def take(message: list[bytes]) -> None:
        nonlocal dropped
        before = len(manager.decode_kv_args_table), len(manager.transfer_infos)
        try:
            announcements.take(message)
        except Exception:
            assert before == (len(manager.decode_kv_args_table), len(manager.transfer_infos))
            dropped += 1
            raise

    reader = MessageReader(manager.decode_ranks.take, take)
    reader.handle(registration())
    kinds = (
        registration(),
        announcement(),
        announcement(9, (), 3),
        announcement(10, ours=False),
        [b"WATERMARK", b"1", b"2", SESSION],
        [b"STAGING_RSP", *[b"1"] * 5, SESSION],
        control.encode(control.Withdraw(7, "10.0.0.2:4001", "10.0.0.2", 4000, "gone")),
        control.encode(control.Ping("10.0.0.1:5", "10.0.0.2:4001", "10.0.0.2", 4000)),
    )
    for _ in range(100_000):
        reader.handle(broken(rng, rng.choice(kinds)))
    assert dropped > 50_000
    for session, info in manager.decode_kv_args_table.items():
        assert int(session.rsplit(":", 1)[1]) >= 0 and len(info.dst_kv_ptrs) >= 2
    for infos in manager.transfer_infos.values():
        for session, info in infos.items():
            assert session in manager.decode_kv_args_table
            assert info.dst_kv_indices.size == 0 or info.dst_kv_indices.min() >= 0
            assert info.is_dummy or info.dst_aux_index >= 0
    assert manager.request_status == {} and manager.failure_records == {}
    manager.update_status(123456789, KVPoll.Bootstrapping)
    reader.handle(announcement(room=123456789))
    assert manager.request_status == {123456789: KVPoll.WaitingForInput}

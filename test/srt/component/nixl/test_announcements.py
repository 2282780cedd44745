"""Messages on a prefill rank's announcement port, from decode servers and from strangers."""

from __future__ import annotations

import logging
import random
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.wire import DeltaFrame, encode_frame
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.nixl_async.announcements import (
    COMPLAINT_INTERVAL_S,
    AnnouncementReader,
    FailedRooms,
)

LOGGER = "sglang.srt.disaggregation.nixl_async.announcements"


class Manager:
    """The state that announcements may change, and nothing behind it."""

    def __init__(self) -> None:
        self.kv_args = SimpleNamespace(kv_data_ptrs=[1, 2], aux_data_ptrs=[3])
        self.decode_kv_args_table: dict[str, Any] = {}
        self.transfer_infos: dict[int, dict[str, Any]] = {}
        self.statuses: dict[int, Any] = {}
        self.failed_rooms = FailedRooms()
        self.told: list[tuple[int, str]] = []

    def notify_failure(self, room: int, reason: str, announcements: list[Any]) -> None:
        assert [info.agent_name for info in announcements] == ["D"]
        self.told.append((room, reason))

    def _add_remote_peer(self, info: Any) -> None:
        self.decode_kv_args_table[info.agent_name] = info

    def update_status(self, room: int, status: Any) -> None:
        self.statuses[room] = status

    def state(self) -> tuple[Any, ...]:
        return (list(self.decode_kv_args_table), list(self.transfer_infos), dict(self.statuses))


def registration(kv_buffers: int = 2, tp: tuple[int, int] = (1, 0)) -> list[bytes]:
    """A decode rank's registration, as stock SGLang sends it."""
    pointers = struct.pack(f"{kv_buffers}Q", *range(kv_buffers))
    size, rank = (str(number).encode() for number in tp)
    frames = [conn.GUARD, b"None", b"10.0.0.2", b"4000", b"D", b"metadata", pointers]
    return [*frames, struct.pack("Q", 9), b"", b"0", size, rank, b"64"]


def announcement(room: int = 7, pages: tuple[int, ...] = (4, 5), needed: int = 1) -> list[bytes]:
    """A room's announcement with a delta frame."""
    frame = DeltaFrame(decode_prefix_len=0, num_pages=len(pages), is_dummy=False)
    frames = [conn.GUARD, str(room).encode(), b"10.0.0.2", b"4000", b"D"]
    frames += [np.array(pages, dtype=np.int32).tobytes(), b"0", str(needed).encode(), b""]
    return [*frames, encode_frame(frame)]


def test_a_room_is_ready_when_its_last_rank_announced_it() -> None:
    """Guards against rooms that start before every decode rank has listed its pages."""
    manager = Manager()
    reader = AnnouncementReader(manager)
    reader.handle(registration())
    reader.handle(announcement(room=7, needed=2))
    assert manager.statuses == {}
    reader.handle(announcement(room=8))
    assert manager.statuses == {8: KVPoll.WaitingForInput}
    assert manager.transfer_infos[8]["D"].delta.num_pages == 2


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ([], "does not start like"),
        ([b"GET / HTTP/1.1"], "does not start like"),
        (announcement()[:5], "at least 8 wanted"),
        (registration()[:11], "12 wanted"),
        (registration(kv_buffers=1), "registered 1 KV buffers, this prefill rank has 2"),
        (registration(tp=(2, 2)), "rank 2 of 2 cannot be"),
        (announcement(pages=(-1,)), "a destination page is negative"),
        (announcement(needed=0), "a count or an index is negative"),
    ],
)
def test_what_cannot_be_served_is_dropped_by_name(
    message: list[bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One stray or broken message must not end the thread that serves every decode server, nor
    leave half a room behind; the log must say whose it was and what is wrong."""
    manager = Manager()
    reader = AnnouncementReader(manager)
    reader.handle(registration())
    before = manager.state()
    with caplog.at_level(logging.ERROR, LOGGER):
        reader.handle(message)
    assert manager.state() == before
    assert complaint in caplog.text


def test_a_room_of_a_peer_that_never_registered_is_dropped() -> None:
    """Its base addresses are unknown, so its pages could be written nowhere."""
    manager = Manager()
    AnnouncementReader(manager).handle(announcement())
    assert manager.state() == ([], [], {})


def test_a_room_that_failed_before_it_was_announced_is_answered() -> None:
    """Prefill may abort a request before decode announces it; decode would wait for its timeout,
    and the announcement would stay in prefill's table for ever."""
    manager = Manager()
    reader = AnnouncementReader(manager)
    reader.handle(registration())
    manager.failed_rooms.add(7, "aborted")
    reader.handle(announcement(room=7))
    assert manager.told == [(7, "aborted")] and manager.transfer_infos == {}
    manager.failed_rooms.discard(7)  # a new request with that number
    reader.handle(announcement(room=7))
    assert list(manager.transfer_infos) == [7]


def test_failed_rooms_are_remembered_up_to_a_bound() -> None:
    """Guards against a table that grows with every failure of a server that runs for months."""
    rooms = FailedRooms(limit=3)
    for room in range(5):
        rooms.add(room, "gone")
    assert [rooms.reason(room) for room in range(5)] == [None, None, "gone", "gone", "gone"]


def test_a_noisy_peer_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """A port scanner must not fill the disk, and another peer's trouble must still be seen."""
    now = 0.0
    reader = AnnouncementReader(Manager(), clock=lambda: now)
    other = [b"x", b"7", b"10.0.0.3", b"1"]
    with caplog.at_level(logging.ERROR, LOGGER):
        for _ in range(1000):
            reader.handle([b"x", b"7", b"10.0.0.2", b"1"])
        reader.handle(other)
        assert len(caplog.records) == 2
        now = COMPLAINT_INTERVAL_S
        reader.handle(other)
        assert len(caplog.records) == 3


def test_a_hundred_thousand_broken_messages(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever bytes arrive, the reader survives, and the next good announcement is served."""
    caplog.set_level(logging.CRITICAL, LOGGER)
    rng = random.Random(0)
    manager = Manager()
    reader = AnnouncementReader(manager)
    reader.handle(registration())
    for _ in range(100_000):
        message = list(rng.choice((registration(), announcement(), announcement(9, (), 3))))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(message))
            how = rng.randrange(4)
            if how == 0:
                message[at] = rng.randbytes(rng.choice((0, 1, 3, 8, 40)))
            elif how == 1:
                message[at] = message[at][: rng.randrange(len(message[at]) + 1)]
            elif how == 2 and len(message) > 1:
                del message[at]
            else:
                message.insert(at, rng.randbytes(rng.randrange(12)))
        reader.handle(message)
    reader.handle(announcement(room=123456789))
    assert manager.statuses[123456789] == KVPoll.WaitingForInput
    for ranks in manager.transfer_infos.values():
        assert all(info.dst_kv_indices.size == 0 or info.dst_kv_indices.min() >= 0
                   for info in ranks.values())  # fmt: skip

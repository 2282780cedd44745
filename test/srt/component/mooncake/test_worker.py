"""The threads that send: what they wait for, and what they outlive, without an engine."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from component.transfer.bare import prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.mooncake.worker import (
    AnnouncedRooms,
    ChunkWorker,
    SettlingExecutor,
    serve_staging,
)
from sglang.srt.disaggregation.delta.prefill.room import Room


def chunk(room: Room) -> Any:
    """A chunk of ``room``, as far as it is looked at before anything is sent."""
    return SimpleNamespace(room=room.number, is_last_chunk=True, owner=room)


def test_announcements_as_stock_staging_reads_them() -> None:
    """Guards against SGLang's staging code missing the decode ranks of a room, or taking them out
    of the room table."""
    rooms = prefill("mooncake").rooms
    seen, info = AnnouncedRooms(rooms), object()
    assert 7 not in seen and seen.get(7, {}) == {}
    rooms.announce(7, "D", info, 1)
    seen.pop(7)
    assert 7 in seen and seen[7] == seen.get(7, {}) == {"D": info}


def test_all_layers_settle_before_a_chunk_is_done() -> None:
    """Guards against a room called drained while layers are still written: stock does not wait
    for those after the first that failed."""
    release, ended = threading.Event(), []
    executor = SettlingExecutor(ThreadPoolExecutor(2))
    executor.submit(lambda: 1 / 0)
    executor.submit(lambda: (release.wait(10), ended.append(1)))
    threading.Timer(0.05, release.set).start()
    executor.settle()
    assert ended == [1]


def of_buffers(count: int) -> Any:
    """A prefill rank with so many KV buffers of pages of 4 tokens, 2 heads of 8 bytes each."""
    manager = prefill("mooncake")
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=[2**32 * n for n in range(1, count + 1)], kv_item_lens=[64] * count,
        page_size=4, kv_head_num=2, engine_rank=0, prefill_start_layer=0,
    )  # fmt: skip
    return manager


class Submitted(SettlingExecutor):
    """Says when a chunk's layers are all submitted."""

    def __init__(self, count: int) -> None:
        super().__init__(ThreadPoolExecutor(1))
        self._left = count
        self.all = threading.Event()

    def submit(self, *call: Any) -> Any:
        future = super().submit(*call)
        self._left -= 1
        if not self._left:
            self.all.set()
        return future


def test_rows_are_made_where_they_are_sent() -> None:
    """Guards against the rows of all layers of a chunk as Python's numbers at once: a row a token a
    buffer, hundreds of megabytes where prefill and decode have different tensor parallel sizes."""
    buffers, tokens = 32, 2048
    manager, rows, held = of_buffers(buffers), [], []
    executor, pages = Submitted(buffers), np.arange(tokens // 4, dtype=np.int32)

    def transfer(session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        assert executor.all.wait(60)
        held.append(tracemalloc.get_traced_memory()[0])
        rows.append((sources[1] - sources[0], targets[1] - targets[0], set(lengths), len(lengths)))
        return 0

    manager.engine = SimpleNamespace(batch_transfer_sync=transfer)
    tracemalloc.start()
    try:
        status = manager.send_kvcache_slice(
            "D:1", pages, manager.kv_args.kv_data_ptrs, pages, 1, 2, 32, executor
        )
    finally:
        tracemalloc.stop()
    assert status == 0 and rows == [(16, 8, {8}, tokens)] * buffers
    assert max(held) < 200 * 4 * tokens, "about those of one buffer"


@pytest.mark.hazard("slow-peer")
def test_layers_for_a_dead_decode_rank_are_not_tried_one_by_one() -> None:
    """Guards against a dead decode rank of another tensor parallel size that holds up the others of
    its queue for a timeout of the engine a layer, instead of one."""
    manager = of_buffers(8)
    returned, tried = threading.Event(), []

    def transfer(session: str, *rows: Any) -> int:
        tried.append(session)
        if len(tried) > 1:
            returned.wait(10)
        return -1

    manager.engine = SimpleNamespace(batch_transfer_sync=transfer)
    executor, pages = SettlingExecutor(ThreadPoolExecutor(1)), np.array([0, 1], np.int32)
    status = manager.send_kvcache_slice(
        "D:1", pages, manager.kv_args.kv_data_ptrs, pages, 0, 2, 32, executor
    )
    returned.set()
    executor.settle()
    assert status == -1 and len(tried) <= 2, "one that failed, and one that had begun"


def test_a_worker_outlives_what_it_cannot_even_report() -> None:
    """Guards against a thread that ends, and with it every later transfer of its queue."""
    manager = prefill("mooncake")
    worker = ChunkWorker(manager, ThreadPoolExecutor(1))
    room, _ = manager.rooms.claim(7)
    manager.update_status(7, KVPoll.WaitingForInput)
    manager.rooms.destinations = lambda *_: 1 / 0
    worker.take(chunk(room))  # neither what it has to do nor whom to tell can be known
    assert manager.request_status == {7: KVPoll.Failed}
    assert not manager.rooms.is_under_way(7), "it was left busy"


def test_a_room_of_a_failed_transfer_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a room that stays busy for ever after the engine refused a write, against one
    that is called drained at once, and against a server that takes it for a leak meanwhile."""
    manager = prefill("mooncake")
    (room,) = open_rooms(manager, 7)
    assert manager.rooms.enter(room)
    manager.rooms.fail(7, Reason.TRANSPORT, "refused")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", "1000")
    manager.leave_later(7)
    manager.forget_status(7)
    assert room.is_over, "its request waits for nothing"
    manager.rooms.forget(room)
    manager._tick()
    assert manager.rooms.numbers() == [7] and not any(manager.open_rooms().values())
    monkeypatch.setenv("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", "0")
    manager._unsettled.clear()
    manager.leave_later(7)
    manager._tick()
    assert manager.rooms.numbers() == []


class Stop(BaseException):
    """Ends a thread that serves for ever."""


class Queue(FastQueue):
    """Ends the thread when it is empty."""

    def get(self) -> Any:
        if not self._buf:
            raise Stop
        return super().get()


def serve(manager: Any, rooms: list[int], worker: Any, executor: Any = None) -> None:
    """Let ``worker(queue)`` serve the chunks of ``rooms``, then end."""
    queue = Queue()
    for room in rooms:
        queue.put(chunk(manager.rooms.room(room)))
    with pytest.raises(Stop):
        serve_staging(
            manager, queue, executor or ThreadPoolExecutor(1), lambda gated, _: worker(gated)
        )


def open_rooms(manager: Any, *rooms: int) -> list[Any]:
    """Requests that are ready to be sent."""
    for room in rooms:
        manager.update_status(room, KVPoll.WaitingForInput)
    return [manager.rooms.claim(room)[0] for room in rooms]


def test_the_staging_worker_is_behind_the_gate() -> None:
    """Guards against rooms called drained while SGLang's own worker for staging buffers is at them,
    and against chunks that it sends for a room that was stopped."""
    manager = prefill("mooncake")
    open_rooms(manager, 1, 2, 3)
    manager.rooms.fail(2, Reason.ABORTED, "withdrawn")
    seen: list[tuple[int, bool]] = []

    def worker(queue: Any) -> None:
        while True:
            room = queue.get().room
            manager.rooms.fail(room, Reason.ABORTED, "later")
            seen.append((room, manager.rooms.is_under_way(room)))

    serve(manager, [1, 2, 3], worker)
    assert seen == [(1, True), (3, True)], "drained while it was at it"
    assert not any(manager.rooms.is_under_way(room) for room in (1, 3))


def test_a_chunk_that_decode_has_no_place_for_comes_again() -> None:
    """Guards against a room that is left busy, or dropped, when its chunk is put back."""
    manager = prefill("mooncake")
    open_rooms(manager, 1)
    served: list[int] = []

    def worker(queue: Any) -> None:
        queue.put(queue.get())
        while True:
            served.append(queue.get().room)

    serve(manager, [1], worker)
    assert served == [1] and not manager.rooms.is_under_way(1)


def test_the_staging_worker_starts_again() -> None:
    """SGLang's worker ends with an exception at the first unexpected thing: that may fail one room,
    not all that come after it. A failure that it only noted stops its room as well."""
    manager = prefill("mooncake")
    open_rooms(manager, 1, 2, 3)
    served: list[int] = []

    def worker(queue: Any) -> None:
        while True:
            room = queue.get().room
            served.append(room)
            if room == 1:
                raise RuntimeError("Transfer thread failed")
            if room == 2:
                manager.record_failure(room, "session failed")
                manager.update_status(room, KVPoll.Failed)

    serve(manager, [1, 2, 3], worker)
    assert served == [1, 2, 3]
    assert manager.rooms.stopped(1) == "room 1: Transfer thread failed"
    assert manager.rooms.stopped(2) == "session failed"
    assert manager.rooms.stopped(3) is None
    assert manager.request_status == {1: 0, 2: 0, 3: KVPoll.WaitingForInput}


@pytest.mark.hazard("siblings-write-on")
def test_a_transfer_that_fails_in_the_staging_worker() -> None:
    """Guards against a room called drained while other layers of its failed chunk are still
    written: SGLang's worker waits for none after the first that fails, and the engine's error says
    nothing of the others. Nor may the decode rank be refused for ever: it has to register again."""
    manager, info = prefill("mooncake"), SimpleNamespace(mooncake_session_id="D:1", is_ours=True)
    first, later = open_rooms(manager, 1, 2)
    for room in (1, 2):
        manager.rooms.announce(room, "D:1", info)
    manager.decode_kv_args_table["D:1"] = object()
    release, ended = threading.Event(), []
    told: list[int] = []
    manager.room_drained = lambda room, reason, infos: told.append(room)

    def worker(queue: Any, executor: Any) -> None:
        while True:
            room = queue.get().room
            if room == 1:
                executor.submit(lambda: (release.wait(10), ended.append(1)))
                threading.Timer(0.05, release.set).start()
            # As SGLang does, for a transfer that failed and for a decode rank to which one has.
            manager.failed_sessions.add("D:1")
            manager.record_failure(room, "failed")
            manager.update_status(room, KVPoll.Failed)

    queue = Queue()
    for room in (first, later):
        queue.put(chunk(room))
    with pytest.raises(Stop):
        serve_staging(manager, queue, ThreadPoolExecutor(1), worker)
    assert ended == [1], "left while a layer was still written"
    assert first.is_over and manager.rooms.is_under_way(1) and told == [2]
    assert later.is_over and not manager.rooms.is_under_way(2), "nothing of it was written"
    assert manager.decode_kv_args_table == {}

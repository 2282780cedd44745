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
from sglang.srt.disaggregation.delta.mooncake.worker import (
    ChunkWorker,
    SettlingExecutor,
)
from sglang.srt.disaggregation.delta.prefill.room import Room


def chunk(room: Room) -> Any:
    """A chunk of ``room``, as far as it is looked at before anything is sent."""
    return SimpleNamespace(room=room.number, is_last_chunk=True, owner=room)


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

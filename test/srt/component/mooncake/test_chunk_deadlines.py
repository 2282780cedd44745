"""Chunks that take too long, without an engine: which rooms fail, when, and who is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from component.transfer.bare import prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.mooncake.worker import (
    ChunkDeadlines,
    ChunkWorker,
)
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.pages import DeltaMismatch
from sglang.srt.disaggregation.utils import DisaggregationMode

SESSION = "10.0.0.2:7001"


class Rank:
    """A prefill rank whose queue nobody serves but the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.manager = prefill("mooncake")
        self.manager.chunk_deadlines = ChunkDeadlines(10.0, lambda: self.now)
        self.manager.disaggregation_mode = DisaggregationMode.PREFILL
        self.manager.transfer_queues = [FastQueue()]
        self.said: list[tuple[int, int]] = []
        self.manager.send_status = lambda info, status: self.said.append((info.room, int(status)))

    def announce(self, *rooms: int, ours: bool = True) -> None:
        """Requests that may be sent to one decode rank."""
        for room in rooms:
            info = SimpleNamespace(
                room=room, mooncake_session_id=SESSION, is_dummy=False, is_ours=ours,
                delta=object() if ours else None, delta_error=None, endpoint="10.0.0.2",
                dst_port=4000,
            )  # fmt: skip
            self.manager.rooms.claim(room)
            self.manager.update_status(room, KVPoll.WaitingForInput)
            self.manager.rooms.announce(room, SESSION, info)

    def send(self, room: int) -> None:
        self.manager.add_transfer_request(room, None, slice(0, 1), False)

    def take(self, seconds: float) -> None:
        """A worker takes the next chunk; while it is at it, so much time passes."""

        def send(info: Any, target: Any, chunk: Any) -> None:
            self.now += seconds
            self.manager._tick()

        self.manager.decode_kv_args_table.setdefault(SESSION, object())
        worker = ChunkWorker(self.manager, ThreadPoolExecutor(1))
        worker._send_pages = send  # type: ignore[method-assign]
        worker.take(self.manager.transfer_queues[0].get())

    def failed(self) -> dict[int, str]:
        return dict(self.manager.failure_records)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_chunk_without_destinations(rank: Rank) -> None:
    """Guards against a chunk that is dropped in silence: its request would hold its pages for ever,
    since no deadline runs for it."""
    rank.manager.rooms.claim(1)
    with pytest.raises(DeltaMismatch, match="room 1: no decode rank's pages are known"):
        rank.send(1)


@pytest.mark.hazard("slow-peer")
def test_from_the_queue_to_the_end(rank: Rank) -> None:
    """Guards against a deadline that begins when the worker gets to a chunk, or is another one's:
    each chunk has its own."""
    rank.announce(1, 2)
    rank.send(1)
    rank.now = 4.0
    rank.send(1)
    rank.send(2)
    rank.take(5.0)
    assert rank.failed() == {} and rank.manager.chunk_deadlines.rooms() == [1, 2]
    rank.now = 13.9
    rank.manager._tick()
    assert rank.failed() == {}
    before = STATS.failures[Reason.TIMEOUT]
    rank.now = 14.0
    rank.manager._tick()
    assert set(rank.failed()) == {1, 2} and STATS.failures[Reason.TIMEOUT] == before + 2
    for text in rank.failed().values():
        assert "still in its queue after 10 s" in text and SESSION in text
        assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in text
    rank.manager._tick()
    assert rank.said == [], "a patched decode rank is told by the gate, once"
    sent = [message.room for _, _, message in rank.manager.decode_ranks._sockets.sent]
    assert sent == [1, 2]


@pytest.mark.parametrize("ours", [True, False])
def test_in_a_call_of_the_engine(rank: Rank, ours: bool) -> None:
    """Guards against a decode server that waits for a call which does not return, against one that
    is told that nothing is written any more, and against two words for one failure."""
    rank.announce(1, 2, ours=ours)
    rank.send(1)
    rank.take(60.0)
    assert f"to decode rank {SESSION} had not ended after 10 s" in rank.failed()[1]
    assert rank.said == [(1, KVPoll.Failed)]
    sent = [message.room for _, _, message in rank.manager.decode_ranks._sockets.sent]
    assert sent == ([1] if ours else []), "when the call has returned"
    assert rank.manager.request_status[2] == KVPoll.WaitingForInput
    assert rank.manager.chunk_deadlines.rooms() == [] and not rank.manager.rooms.is_under_way(1)


def test_what_has_ended_otherwise(rank: Rank) -> None:
    """Guards against a success, an abort or a request that is gone becoming a timeout."""
    rank.announce(1, 2, 3)
    for room in (1, 2, 3):
        rank.send(room)
    rank.manager.advance(1, KVPoll.Success)
    rank.manager.rooms.fail(2, Reason.ABORTED, "aborted")
    rank.manager.forget_status(3)
    before = STATS.failures[Reason.TIMEOUT]
    rank.now = 10.0
    rank.manager._tick()
    assert rank.failed() == {2: "aborted"} and STATS.failures[Reason.TIMEOUT] == before
    assert rank.manager.chunk_deadlines.rooms() == [] and rank.said == []


@pytest.mark.hazard("room-number-reused")
def test_a_chunk_of_an_earlier_request_of_the_number(rank: Rank) -> None:
    """Guards against an aborted request's chunk, still in its queue when the number is used again,
    being sent for the later request: were it the last one, decode would take what is not there. Nor
    may it take the deadline of the later one's chunk away, or fail it with its own."""
    manager = rank.manager
    rank.announce(1)
    rank.send(1)
    room = manager.rooms.room(1)
    manager.rooms.fail(1, Reason.ABORTED, "withdrawn")
    assert room.is_over, "its request may go"
    manager.rooms.forget(room)
    manager.forget_status(1)
    rank.now = 9.0
    rank.announce(1)
    rank.send(1)
    rank.now = 10.0  # the earlier one is late
    manager._tick()
    assert rank.failed() == {} and rank.said == []
    early, late = (manager.transfer_queues[0]._buf[at] for at in (0, 1))
    rank.take(60.0)
    assert rank.now == 10.0, "nothing was sent"
    assert rank.failed() == {} and manager.chunk_deadlines.rooms() == [1]
    rank.take(0.0)
    assert manager.chunk_deadlines.rooms() == [] and not manager.rooms.is_under_way(1)
    assert early.owner is not late.owner


@pytest.mark.hazard("slow-peer")
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_nothing_is_begun_for_a_room_that_was_given_up(rank: Rank, seconds: float) -> None:
    """Guards against state and metadata that are written when a call of the engine returns at last,
    for a room that was stopped meanwhile: decode may have given its slot to another by then."""
    rank.announce(1)
    written: list[str] = []
    rank.manager.maybe_send_extra = lambda *_: written.append("state") or 0
    rank.manager.send_aux = lambda *_: written.append("metadata") or 0
    rank.manager.add_transfer_request(1, None, slice(0, 1), True, 0, [3])
    rank.manager.decode_kv_args_table[SESSION] = SimpleNamespace(
        dst_state_data_ptrs=[], dst_aux_ptrs=[]
    )
    rank.take(seconds)
    if seconds:
        assert written == [] and rank.said == [(1, KVPoll.Failed)]
        assert [message.room for _, _, message in rank.manager.decode_ranks._sockets.sent] == [1]
    else:
        assert written == ["state", "metadata"] and rank.said == [(1, KVPoll.Success)]

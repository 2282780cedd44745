"""Chunks that wait for a call of Mooncake's engine: a decode rank's transfers take turns."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from component.transfer.pair import until
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.mooncake.backend import (
    Callers,
    MooncakeBackend,
    MooncakePayload,
)
from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Chunk,
    TransferError,
    TransferState,
)
from sglang.srt.patchset.environment import QUARANTINE_TIMEOUT, QUEUES, THREADS
from unit.delta.transfer.ranks import MooncakeRank
from unit.delta.transfer.steps import ROOM, failure_of, pages, started


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeRank]:
    """A prefill rank over Mooncake with a write of room ``ROOM`` in flight."""
    rank = MooncakeRank(monkeypatch)
    sender = started(rank)
    sender.send(pages(5, 6))
    rank.tick(0.01)
    yield rank
    rank.finish()


def test_a_write_that_never_began_cannot_land(rank: MooncakeRank) -> None:
    """Guards against a room that waited behind a failed call, and whose decode rank is notified
    only after the time in which a broken write may still land."""
    queued = started(rank, 8)
    queued.send(pages(5, 6))
    rank.tick(0.01)
    assert len(rank.writes) == 1
    rank.settle("ERR")
    rank.tick(0.25)
    assert queued.poll() == KVPoll.Failed and rank.heard(8) == ["stopped"]
    assert "must register again" in str(failure_of(queued))
    assert rank.heard(ROOM) == ["failed"], "the failed call's writes may still land"


def test_a_process_that_was_suspended(rank: MooncakeRank) -> None:
    """Guards against a queued write that begins after a suspension, in which decode may have reused
    its pages, and before the ticking thread has noticed."""
    queued = started(rank, 8)
    queued.send(pages(5, 6))
    rank.tick(0.01)
    rank.clock.now += QUARANTINE_TIMEOUT.read()
    rank.settle("DONE")
    rank.pool.run()
    assert len(rank.writes) == 1 and queued.poll() == KVPoll.Failed
    assert "did not run for" in str(failure_of(queued))


def test_queued_chunks_are_not_described(
    rank: MooncakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against building the descriptors of all chunks behind a call that hangs: tens of
    megabytes for each long prompt."""
    described, describe = list[int](), descriptors.runs_of

    def counted(*arguments: Any) -> Any:
        described.append(len(rank.writes))
        return describe(*arguments)

    monkeypatch.setattr(descriptors, "runs_of", counted)
    for number in (8, 9, 10):
        started(rank, number).send(pages(5, 6))
    rank.tick(0.01)
    assert len(rank.writes) == 1 and not described
    rank.finish()
    assert described == [2, 4, 6], "each after the KV and metadata before it were written"


@pytest.mark.hazard("address-of-a-predecessor")
@pytest.mark.parametrize("when", ["announced", "waiting", "half", "late"])
def test_a_decode_rank_that_restarts_under_its_address(rank: MooncakeRank, when: str) -> None:
    """Guards against KV of the predecessor's room in pages of the restarted rank's requests: before
    the room has begun, while it waits or is written, or if its announcement comes late."""
    queued = rank.sender(8)
    if when != "late":
        rank.announce(8, [10, 11], slot=2)
        queued.init(2, 3)
    if when == "waiting":
        queued.send(pages(5, 6))
        rank.tick(0.01)
    elif when != "half":
        rank.settle("DONE")
        rank.settle("DONE")
    begun, new = len(rank.writes), rank.restart()
    if when == "late":
        rank.announce(8, [10, 11], slot=2)
        queued.init(2, 3)
    memory_before = new.snapshot()
    if when != "waiting":
        queued.send(pages(5, 6))
    rank.tick(0.01)
    if when in ("waiting", "half"):
        rank.writes[0].rows.clear()  # the engine writes to the old memory
    rank.finish()
    assert queued.poll() == KVPoll.Failed and rank.heard(8) == ["stopped"]
    assert "has restarted since" in str(failure_of(queued)) or when == "waiting"
    assert len(rank.writes) == begun, "not even metadata"
    assert all(map(np.array_equal, new.snapshot(), memory_before))


def test_a_decode_rank_that_registers_again(rank: MooncakeRank) -> None:
    """Guards against healthy rooms that fail: a decode rank registers at all ranks of a server when
    one of them has forgotten it."""
    queued = started(rank, 8)
    rank.register("decode")
    queued.send(pages(5, 6))
    rank.finish()
    assert queued.poll() == KVPoll.Success and rank.heard(8) == ["complete"]
    assert rank.heard(ROOM) == ["complete"]


# ---- the threads that call the engine ----


@pytest.mark.parametrize(
    ("cores", "queues", "threads", "calls"),
    [
        *((1, None, None, (1, 1)), (2, None, None, (2, 1)), (79, None, None, (4, 1))),
        *((128, None, None, (8, 2)), (192, None, None, (12, 3)), (999, None, None, (12, 3))),
        *((64, "3", "7", (7, 2)), (64, "1", "1000000", (64, 1000000))),
    ],
)
def test_calls_at_one_time(
    monkeypatch: pytest.MonkeyPatch, cores: int, queues: str | None, threads: str | None,
    calls: tuple[int, int],
) -> None:  # fmt: skip
    """Guards against defaults that differ from SGLang's: threads by the number of cores, in 4
    groups of which a decode rank uses one; and against more calls than the process has cores,
    because each call occupies one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    for name, value in ((QUEUES.name, queues), (THREADS.name, threads)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert MooncakeRank(monkeypatch).calls_at_once == calls


class Ranks:
    """The backend with its threads; every call of the engine waits until the test settles it."""

    def __init__(self, threads: int, at_once: int = 1, **options: Any) -> None:
        #: Decode rank and result of each call that was begun.
        self.begun: SimpleQueue[tuple[str, Future[int]]] = SimpleQueue()
        self.table: dict[str, Any] = {}
        self.calls: list[Any] = []
        self.backend = MooncakeBackend(
            self,
            lambda *_: [("KV", np.array([[1, 2, 3]], np.uint64))],
            lambda _: None,
            lambda room: False,
            self.table,
            Callers(threads, at_once, **options),
        )

    def batch_transfer_sync(self, session: str, *rows: list[int]) -> int:
        status: Future[int] = Future()
        self.begun.put((session, status))
        return status.result(60)

    def register(self, peer: str) -> None:
        self.backend.register(SimpleNamespace(mooncake_session_id=peer))

    def post(self, peer: str) -> Future[TransferState]:
        """A chunk to a decode rank."""
        to = SimpleNamespace(mooncake_session_id=peer, room=ROOM, is_ours=True)
        part = MooncakePayload(pages(5), slice(0, 1), None, None, {peer: to})
        (call,) = self.backend.post(Chunk(ROOM, (peer,), part, False, 0.0, 0.0), peer)
        self.calls.append(call)
        return call.future

    def next_begun(self) -> tuple[str, Future[int]]:
        """Poll all calls, as a transfer worker does, until the engine has begun another one."""

        def poll() -> bool:
            for call in self.calls:
                if not call.future.done():
                    self.backend.state(call)
            return not self.begun.empty()

        until(poll, "no call began")
        return self.begun.get()

    def settle(self, peer: str, status: int = 0) -> None:
        """Settle the next call, which must be to this decode rank."""
        session, result = self.begun.get(timeout=60)
        assert session == peer
        result.set_result(status)


def test_a_decode_rank_has_no_threads() -> None:
    """Guards against threads of every decode rank that ever registered: stock ranks do not report
    their end."""
    ranks, peers = Ranks(threads=2), [f"10.0.0.{number}:1" for number in range(100)]
    before = threading.active_count()
    for peer in peers:
        ranks.register(peer)
        done = ranks.post(peer)
        ranks.settle(peer)
        assert done.result(60) is TransferState.DONE
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("threads", "at_once", "registers_again"),
    [(2, 1, False), (2, 1, True), (2, 2, False), (1, 1, False)],
)
def test_a_decode_rank_that_hangs_leaves_threads_to_others(
    threads: int, at_once: int, registers_again: bool
) -> None:
    """Guards against other decode ranks that wait behind one whose calls hang, also if it uses more
    threads with each registration, if a queue has all threads, or as many as there are cores."""
    ranks = Ranks(threads=threads, at_once=at_once)
    for peer in ("hangs", "lives"):
        ranks.register(peer)
    stuck = [ranks.post("hangs") for _ in range(8)]
    _, hanging = ranks.begun.get(timeout=60)
    if registers_again:
        ranks.register("hangs")
        stuck.append(ranks.post("hangs"))
    for _ in range(3):
        done = ranks.post("lives")
        ranks.settle("lives")
        assert done.result(60) is TransferState.DONE
    assert not any(each.done() for each in stuck)
    hanging.set_result(0)
    for each in stuck[1:]:
        ranks.settle("hangs")
        assert each.result(60) is TransferState.DONE


@pytest.mark.hazard("slow-peer")
def test_decode_servers_that_hang_leave_threads_to_others() -> None:
    """Guards against healthy decode servers that wait for whole timeouts of the engine because more
    ranks hang than there are threads; and against threads that stay after the calls returned."""
    before, peers = threading.active_count(), [f"hangs-{number}" for number in range(5)]
    ranks = Ranks(threads=2, spare=4, hangs_s=0.05)
    for peer in (*peers, "lives"):
        ranks.register(peer)
    stuck, hanging = [ranks.post(peer) for peer in peers], list[Future[int]]()
    for _ in range(3):
        done = ranks.post("lives")
        while (begun := ranks.next_begun())[0] != "lives":
            hanging.append(begun[1])
        begun[1].set_result(0)
        assert done.result(60) is TransferState.DONE
    assert not any(each.done() for each in stuck)
    # A call whose thread was slow to run may begin after those to the rank that lives.
    hanging += [ranks.begun.get(timeout=60)[1] for _ in range(len(stuck) - len(hanging))]
    for call in hanging:
        call.set_result(0)
    assert [each.result(60) for each in stuck] == [TransferState.DONE] * 5
    until(lambda: threading.active_count() <= before + 2, "two threads stay")


@pytest.mark.hazard("slow-peer")
def test_a_system_without_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a healthy room that fails because no thread can be started in place of the one
    whose call takes long; and against a thread that is never started later."""
    ranks = Ranks(threads=1, spare=1, hangs_s=0.0)
    for peer in ("slow", "hangs", "lives"):
        ranks.register(peer)
    calls = [ranks.post(peer) for peer in ("slow", "hangs")]
    hanging = [ranks.begun.get(timeout=60)[1] for _ in calls]
    waits = ranks.post("lives")
    with monkeypatch.context() as patch:
        start = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        patch.setattr(threading.Thread, "start", start)
        assert ranks.backend.state(ranks.calls[0]) is TransferState.IN_PROGRESS and start.called
    session, result = ranks.next_begun()
    assert session == "lives"
    for each in (result, *hanging):
        each.set_result(0)
    assert [call.result(60) for call in (*calls, waits)] == [TransferState.DONE] * 3


def test_a_decode_rank_that_was_removed() -> None:
    """Guards against a transfer to a decode rank after it was removed."""
    ranks = Ranks(threads=1)
    ranks.register("decode")
    ranks.backend.forget("decode")
    assert ranks.table == {}
    with pytest.raises(TransferError, match="it must register again"):
        ranks.post("decode")


def test_a_late_failure_from_before_a_registration() -> None:
    """Guards against a decode rank that registers again after a failed call, and is then removed by
    another call that fails later: it believes that it is registered."""
    ranks = Ranks(threads=3, at_once=2)
    ranks.register("decode")
    first, second = ranks.post("decode"), ranks.post("decode")
    (_, early), (_, late) = (ranks.begun.get(timeout=60) for _ in range(2))
    early.set_result(-1)
    until(lambda: not ranks.table, "the failed rank must register again")
    ranks.register("decode")
    late.set_result(-1)
    assert isinstance(first.exception(60), TransferError)
    assert isinstance(second.exception(60), TransferError)
    assert "decode" in ranks.table
    done = ranks.post("decode")
    ranks.settle("decode")
    assert done.result(60) is TransferState.DONE

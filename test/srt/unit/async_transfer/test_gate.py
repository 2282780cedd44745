"""A worker on the real room gate of the delta layer: who may say that a room is quiet, and when."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.gate import RoomGate
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, State
from unit.async_transfer.fakes import Bench


class Prefill(Bench):
    """Attached as an integrator does: a failure here stops the gate, and the gate tells decode."""

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)
        #: Rooms of which decode was told that they are quiet, with the reason.
        self.told: list[tuple[int, str]] = []
        self.rooms = RoomGate(self._tell, clock=self.clock)
        self.worker._gate = self.rooms
        fail = self.diary.room_failed

        def failed(room: int, reason: Reason, text: str, error: BaseException | None) -> None:
            fail(room, reason, text, error)
            self.rooms.stop(room, text)

        self.diary.room_failed = failed  # type: ignore[method-assign]

    def _tell(self, room: int, reason: str, destinations: list[Any]) -> None:
        assert destinations == ["decode"] and not self.backend.open_handles(room)
        self.told.append((room, reason))

    def begin(self, room: int) -> None:
        """A request and its announcement are here."""
        self.rooms.open(room)
        self.rooms.announce(room, "decode", "decode")
        self.open(room)

    def withdraw(self, room: int) -> bool:
        """Decode gives it up: another thread stops the gate, and then cancels."""
        quiet = self.rooms.stop(room, "withdrawn")
        self.worker.cancel(room, Reason.ABORTED)
        return quiet

    def done(self, room: int) -> None:
        """The request is done with."""
        self.rooms.forget(room)
        self.worker.forget(room)


def test_delivered() -> None:
    """Guards against decode being told that a delivered room was stopped, or a room that stays in
    the gate."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True)
    prefill.run()
    prefill.settle()
    prefill.done(1)
    assert prefill.told == [] and prefill.rooms.rooms() == []


def test_withdrawn_while_under_way() -> None:
    """Guards against quiet being said by the thread that reads decode's message (radix x async x
    abort): only the worker sees handles settle."""
    prefill = Prefill(quota=2)
    prefill.begin(1)
    for _ in range(4):
        prefill.submit(1, "a", "b")
    prefill.run()
    assert not prefill.withdraw(1)
    for handle in list(prefill.backend.open_handles()):
        assert prefill.told == []
        handle.state = State.DONE
        prefill.run(0.1)
    assert prefill.told == [(1, "withdrawn")] and prefill.diary.of(1) == ["quiet"]
    prefill.done(1)
    prefill.run(500)
    assert prefill.told == [(1, "withdrawn")] and prefill.rooms.rooms() == []


def test_withdrawn_while_only_queued() -> None:
    """Guards against a room that waits behind others keeping decode's pages: it is quiet at once,
    and nothing of it is posted although the worker does not know yet."""
    prefill = Prefill(quota=1)
    prefill.begin(1)
    prefill.begin(2)
    prefill.submit(1, last=True)
    prefill.run()
    prefill.submit(2, last=True)
    assert prefill.rooms.stop(2, "withdrawn")
    assert prefill.told == [(2, "withdrawn")]
    prefill.settle()
    assert prefill.diary.of(2) == ["quiet"]
    assert {post[0] for post in prefill.backend.posts} == {1}


@pytest.mark.hazard("siblings-write-on")
def test_a_transfer_that_breaks() -> None:
    """Guards against decode being told of a failure while a sibling of the broken transfer still
    writes."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, handles=2)
    prefill.run()
    prefill.backend.handles[0].state = RuntimeError("broken")
    prefill.run(1.0)
    assert prefill.diary.of(1) == ["failed"] and prefill.told == []
    prefill.settle()
    assert prefill.told == []
    prefill.let_doubt_pass()
    assert [room for room, _ in prefill.told] == [1] and "broken" in prefill.told[0][1]


def test_an_overdue_transfer_of_a_request_that_is_gone() -> None:
    """Guards against a gate that is never left because its request did not wait."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, within=5.0)
    prefill.run(6)
    assert prefill.diary.of(1) == ["failed", "buried"]
    prefill.done(1)
    assert prefill.told == [] and prefill.rooms.rooms() == [1]
    prefill.run(600)
    prefill.settle()
    assert [room for room, _ in prefill.told] == [1] and prefill.rooms.rooms() == []
    assert prefill.backend.completed == [], "its pages are others' by now"
    prefill.done(1)
    prefill.check_empty()


def test_a_full_hit_leaves_the_gate() -> None:
    """Guards against a room that stays busy because nothing was there to settle."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True, handles=0)
    prefill.run()
    assert prefill.diary.of(1) == ["done 0", "quiet"]
    assert prefill.rooms.stop(1, "late")


def test_withdrawn_before_the_worker_sees_it_land() -> None:
    """Guards against a completion that leaves after decode was promised that the room is over: the
    gate is stopped on another thread, and the worker has not heard of it."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True)
    prefill.run()
    prefill.backend.settle()
    assert not prefill.rooms.stop(1, "withdrawn")
    prefill.run(0.1)
    assert prefill.backend.completed == [] and prefill.told == [(1, "withdrawn")]
    assert prefill.diary.of(1) == ["quiet"]


def test_withdrawn_while_it_is_being_completed() -> None:
    """Guards against a room that is both complete and stopped: decode would have its pages back
    and a completion after that."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True)
    prefill.run()
    complete = prefill.backend.complete

    def withdrawn_meanwhile(chunk: Chunk) -> None:
        assert not prefill.rooms.bar(1) and not prefill.rooms.stop(1, "withdrawn")
        complete(chunk)

    prefill.backend.complete = withdrawn_meanwhile  # type: ignore[method-assign]
    prefill.settle()
    assert prefill.diary.of(1) == ["done 0", "quiet"] and prefill.told == []
    prefill.done(1)
    assert prefill.rooms.rooms() == []
    prefill.check_empty()

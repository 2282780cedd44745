"""A worker on the real room table: who may say that a room is drained, and when."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.room import Room
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, State
from unit.delta.prefill.fakes import Bench, FakeRooms, Script


class Prefill(Bench):
    """Attached as the NIXL manager does it: what the table gives up is cancelled on the worker."""

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)
        #: Rooms of which decode was told that they are drained, with the reason.
        self.told: list[tuple[int, str]] = []
        self.table = RoomTable(self, clock=self.clock)
        self.worker._table = Both(self.table, self.rooms)

    def fail_known(self, room: int, text: str) -> bool:
        return True

    def room_delivered(self, room: int) -> None:
        pass

    def room_stopped(self, room: Room, kind: Reason) -> None:
        self.worker.cancel(room, kind)

    def room_drained(self, room: int, reason: str, announcements: list[Any]) -> None:
        assert announcements == ["decode"] and not self.backend.open_handles(room)
        self.told.append((room, reason))

    def begin(self, room: int) -> None:
        """A request and its announcement are here."""
        self.held[room], refused = self.table.claim(room)
        assert refused is None
        self.table.announce(room, "decode", "decode")
        self.worker.open(self.held[room])

    def withdraw(self, room: int) -> bool:
        """Decode gives it up; whether its request may go at once."""
        self.table.fail(room, Reason.ABORTED, "withdrawn")
        return self.held[room].is_over

    def done(self, room: int) -> None:
        """The request is done with."""
        self.table.forget(self.held[room])
        self.forget(room)

    def again(self, room: int) -> None:
        """Its request is done with, and another one has its number; the worker has heard of
        neither."""
        self.table.forget(self.held[room])
        self.held[room], refused = self.table.claim(room)
        assert refused is None
        self.table.announce(room, "decode", "decode")


class Both:
    """A worker's words go to the real table, which answers, and are written down."""

    def __init__(self, table: RoomTable, diary: FakeRooms) -> None:
        self._table, self._diary = table, diary

    def __getattr__(self, name: str) -> Any:
        asked, told = getattr(self._table, name, None), getattr(self._diary, name)

        def tell(*arguments: Any) -> Any:
            if name not in ("enter", "leave", "complete", "take_back"):
                told(*arguments)
            return asked(*arguments) if asked is not None else None

        return tell


def test_delivered() -> None:
    """Guards against decode being told that a delivered room was stopped, or a room that stays in
    the table."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True)
    prefill.run()
    prefill.settle()
    prefill.done(1)
    assert prefill.told == [] and prefill.table.numbers() == []


def test_withdrawn_while_under_way() -> None:
    """Guards against drained being said by the thread that reads decode's message (radix x async x
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
    assert prefill.told == [(1, "withdrawn")] and prefill.rooms.of(1) == ["drained"]
    prefill.done(1)
    prefill.run(500)
    assert prefill.told == [(1, "withdrawn")] and prefill.table.numbers() == []


def test_withdrawn_while_only_queued() -> None:
    """Guards against a room that waits behind others keeping decode's pages: it is drained at once,
    and nothing of it is posted although the worker does not know yet."""
    prefill = Prefill(quota=1)
    prefill.begin(1)
    prefill.begin(2)
    prefill.submit(1, last=True)
    prefill.run()
    prefill.submit(2, last=True)
    assert prefill.withdraw(2)
    assert prefill.told == [(2, "withdrawn")]
    prefill.settle()
    assert prefill.rooms.of(2) == ["drained"]
    assert {post[0] for post in prefill.backend.posts} == {1}


@pytest.mark.parametrize("peers", [("a",), ()])
def test_a_number_that_is_used_again_before_its_worker_knows(peers: tuple[str, ...]) -> None:
    """Guards against a chunk of an earlier request being posted for a later one of its number:
    decode was told that its pages are free, and gave them to others. The scheduler is done with the
    room, and begins it anew, within one step of the worker."""
    prefill = Prefill(quota=1)
    prefill.begin(1)
    prefill.begin(2)
    prefill.submit(1)
    prefill.run()
    if peers:
        prefill.submit(2, *peers, last=True)  # waits: its peer has no place for it
    state, cancel = prefill.backend.state, prefill.worker.cancel
    late: list[Any] = []
    prefill.worker.cancel = lambda *it: late.append(it)  # type: ignore[method-assign]

    def meanwhile() -> None:
        assert prefill.withdraw(2)
        prefill.again(2)

    if peers:

        def looked_at(handle: Any) -> State:
            if not late:
                meanwhile()
            return state(handle)

        prefill.backend.state = looked_at  # type: ignore[method-assign]
        prefill.settle(1)
    else:  # a chunk for nobody is complete when the worker comes to it
        meanwhile()
        prefill.worker.submit(Chunk(2, (), Script(), True, 1120.0, 1000.0))
    assert {post[0] for post in prefill.backend.posts} == {1}
    assert prefill.backend.completed == [] and not prefill.held[2].delivered
    for it in late:
        cancel(*it)
    assert not prefill.held[2].is_stopped


@pytest.mark.hazard("room-number-reused")
def test_a_deadline_of_an_earlier_request_of_the_number() -> None:
    """Guards against a request that fails because a chunk of an earlier one of its number was late:
    that one was aborted, and its worker has not heard of it."""
    prefill = Prefill(quota=1)
    prefill.begin(1)
    prefill.begin(2)
    prefill.submit(1)
    prefill.run()
    prefill.submit(2, within=5.0)  # waits: its peer has no place for it
    late: list[Any] = []
    cancel = prefill.worker.cancel
    prefill.worker.cancel = lambda *it: late.append(it)  # type: ignore[method-assign]
    old = prefill.held[2]
    assert prefill.withdraw(2)
    prefill.again(2)
    prefill.run(6.0)
    assert prefill.rooms.of(2)[0] == "failed", "its deadline passed"
    assert not prefill.held[2].is_stopped
    prefill.worker.cancel = cancel  # type: ignore[method-assign]
    for it in late:
        cancel(*it)
    prefill.worker.forget(old)
    prefill.worker.open(prefill.held[2])
    prefill.submit(2, last=True)
    prefill.settle()  # the first room's place is free
    prefill.settle()
    assert prefill.held[2].delivered


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize("command", ["cancel", "forget"])
def test_a_word_about_an_earlier_request_of_the_number(command: str) -> None:
    """Guards against a request whose chunks are dropped without a word, so that it hangs: the
    thread that failed an earlier one of its number is late with telling the worker."""
    prefill = Prefill()
    prefill.begin(1)
    old = prefill.held[1]
    late: list[Any] = []
    cancel = prefill.worker.cancel
    prefill.worker.cancel = lambda *it: late.append(it)  # type: ignore[method-assign]
    assert prefill.withdraw(1)
    prefill.done(1)
    prefill.begin(1)
    if command == "cancel":
        cancel(*late[0])
    else:
        prefill.worker.forget(old)
    prefill.submit(1, last=True)
    prefill.run()
    prefill.settle()
    assert prefill.held[1].delivered and prefill.rooms.of(1)[-1] == "drained"


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
    assert prefill.rooms.of(1) == ["failed"] and prefill.told == []
    prefill.settle()
    assert prefill.told == []
    prefill.let_doubt_pass()
    assert [room for room, _ in prefill.told] == [1] and "broken" in prefill.told[0][1]


def test_an_overdue_transfer_of_a_request_that_is_gone() -> None:
    """Guards against a room that is never left because its request did not wait."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, within=5.0)
    prefill.run(6)
    assert prefill.rooms.of(1) == ["failed", "overdue"]
    prefill.done(1)
    assert prefill.told == [] and prefill.table.numbers() == [1]
    prefill.run(600)
    prefill.settle()
    assert [room for room, _ in prefill.told] == [1] and prefill.table.numbers() == []
    assert prefill.backend.completed == [], "its pages are others' by now"
    prefill.done(1)
    prefill.check_empty()


def test_a_full_hit_is_not_under_way() -> None:
    """Guards against a room that stays busy because nothing was there to settle."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True, handles=0)
    prefill.run()
    assert prefill.rooms.of(1) == ["done 0", "drained"]
    assert not prefill.table.is_under_way(1) and not prefill.table.fail(1, Reason.ABORTED, "late")


def test_withdrawn_before_the_worker_sees_it_land() -> None:
    """Guards against a completion that leaves after decode was promised that the room is over: the
    room is stopped on another thread, and the worker has not heard of it."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True)
    prefill.run()
    prefill.backend.settle()
    assert not prefill.withdraw(1)
    prefill.run(0.1)
    assert prefill.backend.completed == [] and prefill.told == [(1, "withdrawn")]
    assert prefill.rooms.of(1) == ["drained"]


def test_withdrawn_while_it_is_being_completed() -> None:
    """Guards against a room that is both complete and stopped: decode would have its pages back
    and a completion after that."""
    prefill = Prefill()
    prefill.begin(1)
    prefill.submit(1, last=True)
    prefill.run()
    complete = prefill.backend.complete

    def withdrawn_meanwhile(chunk: Chunk) -> None:
        assert not prefill.table.fail(1, Reason.ABORTED, "withdrawn")
        complete(chunk)

    prefill.backend.complete = withdrawn_meanwhile  # type: ignore[method-assign]
    prefill.settle()
    assert prefill.rooms.of(1) == ["done 0", "drained"] and prefill.told == []
    prefill.done(1)
    assert prefill.table.numbers() == []
    prefill.check_empty()

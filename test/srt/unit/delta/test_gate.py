"""The gate of a prefill rank's rooms: in every order, and against a simple model."""

from __future__ import annotations

import threading
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from effort import tries
from sglang.srt.disaggregation.delta.prefill.gate import RoomGate
from unit.delta.fakes import Clock

Told = list[tuple[int, str, list[Any]]]


def gate(**options: Any) -> tuple[RoomGate, Told]:
    """A gate, and what it told so far."""
    told: Told = []
    return RoomGate(lambda *told_now: told.append(told_now), **options), told


def test_told_when_what_is_under_way_has_settled() -> None:
    """Guards against decode getting its pages back while a write to them is under way."""
    made, told = gate()
    made.announce(7, "D", "info")
    assert made.open(7) is None and made.enter(7)
    assert not made.stop(7, "aborted") and told == []
    assert not made.enter(7), "nothing more is posted"
    made.leave(7)
    assert told == [(7, "aborted", ["info"])]
    made.leave(7)
    assert made.stop(7, "again") and len(told) == 1, "told once"


@pytest.mark.hazard("abort-before-settled")
@pytest.mark.parametrize("order", list(permutations(("enter", "stop", "leave", "forget"))))
def test_every_order_ends_quiet_once(order: tuple[str, ...]) -> None:
    """Guards against an order in which a stopped room is never told, is told twice, is told while
    something is under way, or leaves an entry."""
    made, told = gate()
    made.open(7)
    made.announce(7, "D", "info")
    inside = known = False
    for step in order:
        if step == "enter":
            inside = made.enter(7)
        elif step == "stop":
            known = made.rooms() == [7]
            made.stop(7, "why")
        elif step == "leave":
            made.leave(7)
            inside = False
        else:
            made.forget(7)
        real = [entry for entry in told if entry[2]]
        assert len(real) <= 1 and not (inside and real)
    made.leave(7)
    made.forget(7)
    assert made.rooms() == []
    assert [entry for entry in told if entry[2]] == ([(7, "why", ["info"])] if known else [])


def test_the_first_reason_counts() -> None:
    """Guards against a later, more general reason that hides the cause."""
    made, told = gate()
    made.open(7)
    made.stop(7, "first")
    made.stop(7, "second")
    assert made.stopped(7) == "first" and told == [(7, "first", [])]


def test_withdrawn_before_its_request_came() -> None:
    """Decode may give a room up before prefill has its request. Guards against a request that then
    waits for an announcement which never comes, and against a second one that fails for it."""
    made, _ = gate()
    assert made.stop(7, "gone"), "quiet: nothing is here"
    assert made.open(7) == "gone"
    made.forget(7)
    assert made.open(7) is None


@pytest.mark.hazard("room-number-reused")
def test_a_room_that_failed_here_may_be_used_again() -> None:
    """Guards against a new request that fails because an earlier one had its room number."""
    made, _ = gate()
    made.open(7)
    made.stop(7, "mismatch")
    made.forget(7)
    assert made.announce(7, "D", "late") == "mismatch", "the old one's announcement is answered"
    assert made.open(7) is None and made.announce(7, "D", "new") is None and made.enter(7)


def test_an_announcement_after_the_end_is_answered_at_once() -> None:
    """Guards against a decode rank that waits for its timeout because prefill failed first."""
    made, _ = gate()
    made.open(7)
    made.stop(7, "aborted")
    assert made.announce(7, "D", "info") == "aborted"
    assert made.destinations(7) == []


def test_an_announcement_repeated_while_its_pages_are_written() -> None:
    """Guards against a decode rank that is told at once, for it says so a second time, that nothing
    is written to its pages, while the write is still under way."""
    made, told = gate()
    made.open(7)
    made.announce(7, "D", "info")
    made.enter(7)
    made.stop(7, "aborted")
    assert made.announce(7, "D", "info") is None and told == []
    assert made.announce(7, "E", "late rank") is None
    made.leave(7)
    assert told == [(7, "aborted", ["info", "late rank"])]


def test_forgotten_while_something_is_under_way() -> None:
    """Guards against an entry that goes, and a decode rank that is never told, when the scheduler
    is done with a request before its transfer is."""
    made, told = gate()
    made.open(7)
    made.announce(7, "D", "info")
    made.enter(7)
    made.forget(7)
    assert made.rooms() == [7]
    assert not made.stop(7, "withdrawn") and told == []
    made.leave(7)
    assert told == [(7, "withdrawn", ["info"])] and made.rooms() == []


def test_ended_rooms_are_remembered_up_to_a_bound() -> None:
    """Guards against a table that grows with every withdrawal of a server that runs for months."""
    made, _ = gate(remembered=3)
    for room in range(100):
        made.stop(room, f"reason {room}")
    assert len(made._ended) == 3
    assert made.open(96) is None
    assert [made.open(room) for room in (97, 98, 99)] == ["reason 97", "reason 98", "reason 99"]


def test_unclaimed_rooms_have_an_age() -> None:
    """Guards against announcements whose request never comes, which would stay for ever; and
    against one that is ended although its request is here."""
    clock = Clock()
    made, told = gate(clock=clock)
    made.announce(7, "D", "seven")
    clock.now += 5
    made.announce(8, "D", "eight")
    made.announce(9, "D", "nine")
    made.open(9)
    clock.now += 5
    assert sorted(made.unclaimed()) == [7, 8]
    assert made.unclaimed(10) == [7] and made.unclaimed(10.1) == []
    assert made.stop(7, "nobody came") and told == [(7, "nobody came", ["seven"])]
    assert sorted(made.rooms()) == [8, 9]


def test_rooms_of_a_peer() -> None:
    """Guards against a decode rank that vanished taking another one's rooms with it."""
    made, _ = gate()
    made.announce(7, "D", 1)
    made.announce(7, "E", 2)
    made.announce(8, "E", 3)
    made.open(9)
    assert made.rooms("D") == [7] and made.rooms("E") == [7, 8] and made.rooms() == [7, 8, 9]


@pytest.mark.hazard("source-given-away")
def test_complete_or_given_up() -> None:
    """Guards against a room that is both: decode would take one that failed here, or have its pages
    back and then a completion."""
    made, told = gate()
    for room in (7, 8, 9):
        made.open(room)
        made.announce(room, "D", "info")
        assert made.enter(room)
    assert made.complete(7)
    assert not made.bar(7) and not made.stop(7, "late"), "it is busy, and stays complete"
    made.leave(7)
    assert made.stop(7, "late") and made.stopped(7) is None and told == []
    assert not made.stop(8, "aborted") and not made.complete(8)
    assert made.bar(9) and not made.complete(9) and not made.enter(9)
    made.forget(7)
    assert 7 not in made.rooms()
    assert not made.complete(10), "nobody knows it"


def test_decode_could_not_be_told() -> None:
    """Guards against a room that can neither end well nor fail."""
    made, told = gate()
    made.open(7)
    made.announce(7, "D", "info")
    assert made.enter(7) and made.complete(7)
    made.take_back(7)
    assert made.bar(7) and not made.stop(7, "no note")
    made.leave(7)
    assert told == [(7, "no note", ["info"])]


@pytest.mark.parametrize("rounds", [tries(300)])
def test_threads_complete_or_give_up(rounds: int) -> None:
    """A worker completes while the reader's thread gives the room up, as ``PrefillRooms.fail``
    does. Guards against both, or neither, being the outcome."""
    for _ in range(rounds):
        made = RoomGate(lambda *_: None)
        made.open(7)
        made.enter(7)
        start = threading.Barrier(2)
        barred: list[bool] = []

        def give_up(
            made: RoomGate = made, start: threading.Barrier = start, barred: list[bool] = barred
        ) -> None:
            start.wait()
            barred.append(made.bar(7))

        thread = threading.Thread(target=give_up)
        thread.start()
        start.wait()
        completed = made.complete(7)
        thread.join()
        assert barred == [not completed]


@pytest.mark.parametrize(("stops", "rounds"), [(1, tries(300)), (3, tries(300))])
def test_threads(stops: int, rounds: int) -> None:
    """The scheduler enters and leaves while the reader thread stops. Guards against a room that is
    told while something is under way, not at all, or twice."""
    for _ in range(rounds):
        inside = threading.Event()
        told: list[bool] = []
        made = RoomGate(lambda *_, told=told, inside=inside: told.append(inside.is_set()))
        made.open(7)
        made.announce(7, "D", "info")
        start = threading.Barrier(stops + 1)

        def stop(made: RoomGate = made, start: threading.Barrier = start) -> None:
            start.wait()
            made.stop(7, "aborted")

        threads = [threading.Thread(target=stop) for _ in range(stops)]
        for thread in threads:
            thread.start()
        start.wait()
        while made.enter(7):
            inside.set()
            inside.clear()
            made.leave(7)
        for thread in threads:
            thread.join()
        assert told == [False] and not made.enter(7)


ROOMS, PEERS = st.integers(0, 2), st.sampled_from("DE")


class GateModel(RuleBasedStateMachine):
    """Any sequence of calls, beside a model that is too simple to be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.told = gate(remembered=100)
        #: room -> [destinations, has_sender, busy, forgotten, reason, completed]
        self.model: dict[int, list[Any]] = {}
        self.ended: dict[int, tuple[str, bool]] = {}
        self.due: Told = []

    @rule(room=ROOMS)
    def open(self, room: int) -> None:
        reason, had_sender = self.ended.pop(room, (None, False))
        self.model.setdefault(room, [{}, False, False, False, None, False])[1] = True
        assert self.gate.open(room) == (None if had_sender else reason)

    @rule(room=ROOMS, peer=PEERS)
    def announce(self, room: int, peer: str) -> None:
        known = self.model.get(room)
        if known is None and room in self.ended:
            expected = self.ended[room][0]
        else:
            known = self.model.setdefault(room, [{}, False, False, False, None, False])
            expected = known[4] if not known[2] else None
            if expected is None:
                known[0][peer] = (room, peer)
        assert self.gate.announce(room, peer, (room, peer)) == expected

    @rule(room=ROOMS)
    def enter(self, room: int) -> None:
        known = self.model.get(room)
        expected = known is not None and known[4] is None
        if expected:
            known[2] = True
        assert self.gate.enter(room) is expected

    @rule(room=ROOMS)
    def complete(self, room: int) -> None:
        known = self.model.get(room)
        expected = known is not None and known[4] is None
        if expected:
            known[5] = True
        assert self.gate.complete(room) is expected

    @rule(room=ROOMS)
    def take_back(self, room: int) -> None:
        if room in self.model:
            self.model[room][5] = False
        self.gate.take_back(room)

    @rule(room=ROOMS, reason=st.sampled_from("xyz"))
    def give_up(self, room: int, reason: str) -> None:
        """``PrefillRooms.fail``: barred, and then stopped."""
        known = self.model.get(room)
        assert self.gate.bar(room) is not (known is not None and known[5])
        self.stop(room, reason)

    @rule(room=ROOMS)
    def leave(self, room: int) -> None:
        known = self.model.get(room)
        if known is not None and known[2]:
            known[2] = False
            if known[4] is not None:
                self.due.append((room, known[4], list(known[0].values())))
            if known[3]:
                self.drop(room)
        self.gate.leave(room)

    @rule(room=ROOMS, reason=st.sampled_from("xyz"))
    def stop(self, room: int, reason: str) -> None:
        known = self.model.get(room)
        if known is None:
            self.ended.setdefault(room, (reason, False))
            self.due.append((room, reason, []))
            quiet = True
        elif known[4] is not None or known[5]:
            quiet = not known[2]
        else:
            known[4], quiet = reason, not known[2]
            if not known[1]:
                self.ended[room] = (reason, False)
                del self.model[room]
            if quiet:
                self.due.append((room, reason, list(known[0].values())))
        assert self.gate.stop(room, reason) is quiet

    @rule(room=ROOMS)
    def forget(self, room: int) -> None:
        known = self.model.get(room)
        if known is not None:
            if known[2]:
                known[3] = True
            else:
                self.drop(room)
        self.gate.forget(room)

    def drop(self, room: int) -> None:
        reason = self.model.pop(room)[4]
        if reason is not None:
            self.ended[room] = (reason, True)

    @invariant()
    def agrees(self) -> None:
        assert self.told == self.due
        assert sorted(self.gate.rooms()) == sorted(self.model)
        for room, (destinations, _, _, _, reason, _) in self.model.items():
            assert self.gate.destinations(room) == list(destinations.values())
            assert self.gate.stopped(room) == reason


TestGateModel = GateModel.TestCase
TestGateModel.settings = settings(max_examples=tries(200), stateful_step_count=40)


@pytest.mark.hazard("leaking-room-records")
def test_unknown_rooms_change_nothing() -> None:
    """Guards against an entry for a room that nobody announced and no request has."""
    made, told = gate()
    for room, call in product((7, -1, 10**400), (made.leave, made.forget, made.destinations)):
        assert not call(room)
    assert not made.enter(7) and made.stopped(7) is None
    assert told == [] and made.rooms() == []

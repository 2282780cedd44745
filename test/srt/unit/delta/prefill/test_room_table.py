"""The owner of a prefill rank's rooms: its picture, its steps, and what each side is told."""

from __future__ import annotations

import re
import threading
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from effort import tries
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.prefill.room import TRANSITIONS, Event, Room, State
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk
from unit.delta.fakes import Clock

PAGE = Path(__file__).parents[5] / "docs/design.md"
ERROR = ZeroDivisionError("the transport's")


class Scene:
    """A table, and what it told so far. SGLang's status of a room is in ``status``."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.told: list[tuple[int, str, list[Any]]] = []
        self.stopped: list[tuple[int, Reason]] = []
        self.delivered: list[tuple[int, bool]] = []
        self.status: dict[int, str] = {}
        self.table = RoomTable(self, self.clock, **options)

    def fail_known(self, room: int, text: str) -> bool:
        return self.status.setdefault(room, text) == text

    def room_delivered(self, room: int) -> None:
        self.delivered.append((room, self.table._rooms[room].delivered))

    def room_stopped(self, room: Room, kind: Reason) -> None:
        self.stopped.append((room.number, kind))

    def room_drained(self, room: int, reason: str, announcements: list[Any]) -> None:
        self.told.append((room, reason, announcements))

    def request(self, number: int = 7, *peers: str) -> Room:
        """A request of a room that ``peers`` announced."""
        for peer in peers:
            assert self.table.announce(number, peer, f"pages of {peer}")
        room, refused = self.table.claim(number)
        assert refused is None
        return room

    def fail(self, number: int = 7, text: str = "aborted") -> bool:
        return self.table.fail(number, Reason.ABORTED, text)

    def enter(self, number: int = 7) -> bool:
        return self.table.enter(self.table.room(number) or Room(number))

    def complete(self, number: int = 7) -> bool:
        return self.table.complete(self.table.room(number) or Room(number))

    def room_failed(self, number: int, *why: Any) -> None:
        room = self.table.room(number)
        self.table.room_failed(room or Room(number), *why)

    def last(self, number: int = 7) -> None:
        """The worker says that the room's last chunk is with all its peers."""
        self.table.chunk_done(Chunk(number, (), None, True, 0.0, 0.0))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_picture_is_the_table() -> None:
    """Guards against a picture of another machine than the one that runs."""
    found = re.findall(r"^ +(\S+) --> (\S+): (.+)$", PAGE.read_text(), re.MULTILINE)
    name = {State.ENDED: "[*]"}
    edges = {
        (name.get(before, before.value), name.get(after, after.value), event.value)
        for (before, event), after in TRANSITIONS.items()
    }
    assert set(found) == edges and len(found) == len(edges)


def test_every_state_can_be_reached_and_left() -> None:
    """Guards against a room that can neither end nor be waited for."""
    ways = [(before, after) for (before, _), after in TRANSITIONS.items()]
    for steps in (ways, [(after, before) for before, after in ways]):
        reached, frontier = {State.ENDED}, {State.ENDED}
        while frontier:
            frontier = {to for at, to in steps if at in frontier} - reached
            reached |= frontier
        assert reached == set(State)


@pytest.mark.parametrize(("before", "event"), list(product(State, Event)), ids=lambda it: it.value)
def test_a_step_that_is_not_in_the_table(scene: Scene, before: State, event: Event) -> None:
    """Guards against an event that changes a room in a state for which nobody thought of it."""
    room = scene.request()
    room.state = before
    assert scene.table._move(room, event) is ((before, event) in TRANSITIONS)
    assert room.state is TRANSITIONS.get((before, event), before)


# ---- the scheduler's view ----

#: What happens after a request came -> whether it is stopped, whether it is over, delivered.
LIVES = {
    "": (False, False, False),
    "enter": (False, False, False),
    "enter leave": (False, False, False),
    "enter complete": (False, False, False),
    "enter complete leave last": (False, False, True),
    "enter complete last leave": (False, False, True),
    "complete last": (False, False, True),
    "enter complete leave last fail": (False, False, True),
    "enter complete failed": (False, False, True),
    "fail": (True, True, False),
    "enter leave fail": (True, True, False),
    "enter fail": (True, False, False),
    "enter fail overdue": (True, True, False),
    "enter fail leave": (True, True, False),
    "enter fail overdue leave": (True, True, False),
    "enter failed": (True, False, False),
    "enter fail complete last": (True, False, False),
    "enter complete take_back failed": (True, False, False),
    "enter complete take_back failed leave": (True, True, False),
    "complete take_back failed": (True, True, False),
    "enter abandon": (True, True, False),
    "enter fail abandon abandon": (True, True, False),
    "abandon": (True, True, False),
    "enter complete leave last abandon": (False, False, True),
    "enter complete abandon": (False, False, True),
    "overdue": (False, False, False),
    "enter overdue leave": (False, False, False),
    "last": (False, False, False),
    "forget": (True, True, False),
    "enter fail forget": (True, True, False),
}


@pytest.mark.parametrize("life", LIVES)
def test_what_the_scheduler_sees(scene: Scene, life: str) -> None:
    """Guards against a request whose pages are freed while they are read, against one that is never
    let go, and against success before decode was told."""
    room = scene.request(7, "D")
    table = scene.table
    steps = {
        "enter": lambda: scene.enter(7),
        "leave": lambda: table.leave(7),
        "complete": lambda: scene.complete(7),
        "take_back": lambda: table.take_back(7),
        "last": scene.last,
        "fail": scene.fail,
        "failed": lambda: scene.room_failed(7, Reason.TRANSPORT, "broken", ERROR),
        "overdue": lambda: table.room_overdue(7),
        "abandon": lambda: table.abandon(7, Reason.INTERNAL, "stuck"),
        "forget": lambda: table.forget(room),
    }
    for step in life.split():
        steps[step]()
    assert (room.is_stopped, room.is_over, room.delivered) == LIVES[life]


@pytest.mark.hazard("abort-before-settled")
@pytest.mark.parametrize("order", list(permutations(("enter", "stop", "leave", "forget"))))
def test_every_order_ends_drained_once(scene: Scene, order: tuple[str, ...]) -> None:
    """Guards against an order in which a stopped room is never told, is told twice, is told while
    something is under way, or leaves an entry."""
    room, table = scene.request(7, "D"), scene.table
    inside = known = False
    for step in order:
        if step == "enter":
            inside = scene.enter(7)
        elif step == "stop":
            known = table.numbers() == [7]
            scene.fail()
        elif step == "leave":
            table.leave(7)
            inside = False
        else:
            table.forget(room)
        real = [entry for entry in scene.told if entry[2]]
        assert len(real) <= 1 and not (inside and real)
    table.leave(7)
    table.forget(room)
    assert table.numbers() == []
    real = [entry for entry in scene.told if entry[2]]
    assert real == ([(7, "aborted", ["pages of D"])] if known else [])


def test_decode_is_told_before_the_scheduler_sees_it(scene: Scene) -> None:
    """Guards against a status that is not there yet when the room says that it is delivered."""
    room = scene.request()
    assert scene.complete(7)
    scene.last()
    assert scene.delivered == [(7, False)] and room.delivered


# ---- numbers that come again ----


def test_withdrawn_before_its_request_came(scene: Scene) -> None:
    """Decode may give a room up before prefill has its request. Guards against a request that then
    waits for an announcement which never comes, and against a second one that fails for it."""
    scene.fail(text="gone")
    room, refused = scene.table.claim(7)
    assert refused == "gone"
    scene.table.forget(room)
    assert scene.table.claim(7)[1] is None


@pytest.mark.hazard("room-number-reused")
def test_a_room_that_failed_here_may_be_used_again(scene: Scene) -> None:
    """Guards against a new request that fails because an earlier one had its room number."""
    old = scene.request()
    scene.fail(text="mismatch")
    scene.table.forget(old)
    assert not scene.table.announce(7, "D", "late") and scene.told[-1] == (7, "mismatch", ["late"])
    new = scene.request()
    assert scene.table.announce(7, "D", "new") and scene.enter(7)
    for _ in range(2):
        scene.table.forget(old)
    assert scene.table.numbers() == [7] and new.state is State.SENDING and old.is_over


@pytest.mark.hazard("room-number-reused")
def test_a_failed_room_of_which_all_have_come_refuses_nobody(scene: Scene) -> None:
    """A client tries once more, with the same number. Guards against its announcement being refused
    for the first try's failure, and its request for that one's late withdrawal."""
    for needed in (2, 0):  # 0: nobody said how many there are, and one may be missing
        for peer in "DE":
            scene.table.announce(7, peer, f"pages of {peer}", needed)
        room, _ = scene.table.claim(7)
        scene.fail()
        scene.table.forget(room)
        scene.fail(text="withdrawn, late")
        assert scene.table.announce(7, "D", "again", needed) is bool(needed)
        again, refused = scene.table.claim(7)
        assert refused is None
        scene.table.forget(again)


def test_a_request_is_refused_however_late_it_comes(scene: Scene) -> None:
    """Decode gave it up. Guards against a request that waits for an announcement for ever."""
    scene.table.announce(7, "D", "pages of D", 1)
    scene.fail(text="gone")
    scene.clock.now += 3600
    scene.table.scheduler_time.turn()
    assert not scene.table.announce(7, "D", "again", 1), "its request may come first"
    assert scene.table.claim(7)[1] == "gone"


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize("before", ["", "enter", "enter leave", "enter complete"])
def test_two_requests_of_one_number(scene: Scene, before: str) -> None:
    """Clients choose numbers. Guards against a second request that ends the first one of its number
    with itself, or counts as delivered with it: it is refused, whatever the first has done so far
    (which differs between the ranks of a server), and counted once."""
    first = scene.request(7, "D")
    for step in before.split():
        getattr(scene.table if step == "leave" else scene, step)(7)
    failed = STATS.failures[Reason.ABORTED]
    second, refused = scene.table.claim(7)
    assert refused is not None and "still uses its number" in refused
    assert second is not first and second.is_stopped and second.is_over
    assert scene.table.fail(7, Reason.ABORTED, refused, meant=second)
    scene.table.forget(second)
    assert STATS.failures[Reason.ABORTED] == failed + 1
    assert scene.told == [] and not first.is_stopped
    if "complete" not in before:
        assert scene.complete(7)
    scene.last()
    assert first.delivered
    scene.table.leave(7)
    scene.table.forget(first)
    assert scene.table.numbers() == [] and scene.table.claim(7)[1] is None


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize("first", ["claim", "announce"])
@pytest.mark.parametrize("steps", ["enter complete", "enter complete leave last"])
def test_a_request_of_a_number_that_is_complete(scene: Scene, steps: str, first: str) -> None:
    """Guards against a request that counts as delivered with the one before, of which nothing was
    sent: it is refused, and so are its decode ranks, whichever comes first; neither is the next
    request of the number."""
    old = scene.request(7, "D")
    for step in steps.split():
        {
            "enter": lambda: scene.enter(7),
            "complete": lambda: scene.complete(7),
            "leave": lambda: scene.table.leave(7),
            "last": scene.last,
        }[step]()
    refused: list[Room] = []

    def claim() -> None:
        room, reason = scene.table.claim(7)
        assert reason is not None
        refused.append(room)

    def announce() -> None:
        assert not scene.table.announce(7, "D", "pages of the next")

    for step in (claim, announce) if first == "claim" else (announce, claim):
        step()
    (new,) = refused
    assert new is not old and new.is_stopped and new.is_over and not new.delivered
    assert [told for _, _, told in scene.told] == [["pages of the next"]]
    scene.last()
    scene.table.leave(7)
    assert old.delivered and not old.is_stopped
    scene.table.forget(new)
    assert scene.table.numbers() == [7]
    scene.table.forget(old)
    assert scene.table.claim(7)[1] is None and scene.table.announce(7, "D", "again")


# ---- decode ranks ----


def test_an_announcement_after_the_end_is_answered_at_once(scene: Scene) -> None:
    """Guards against a decode rank that waits for its timeout because prefill failed first."""
    scene.request()
    scene.fail()
    assert not scene.table.announce(7, "D", "late")
    assert scene.told[-1] == (7, "aborted", ["late"]) and scene.table.destinations(7) == []


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize(
    "steps", ["enter complete", "enter complete leave last", "enter complete last forget"]
)
def test_an_announcement_of_a_number_that_is_complete(scene: Scene, steps: str) -> None:
    """Guards against a request that waits for its bootstrap timeout, and a decode rank that waits
    for its own: its announcement was filed with the earlier request of its number, which decode has
    all of and which the scheduler has not let go."""
    old = scene.request(7, "D")
    does = {
        "enter": lambda: scene.enter(7),
        "complete": lambda: scene.complete(7),
        "leave": lambda: scene.table.leave(7),
        "last": scene.last,
        "forget": lambda: scene.table.forget(old),
    }
    for step in steps.split():
        does[step]()
    assert not scene.table.announce(7, "D", "pages of the next")
    ((number, reason, told),) = scene.told
    assert (number, told) == (7, ["pages of the next"]) and "has not ended on this" in reason
    scene.last()
    scene.table.leave(7)
    assert old.delivered
    scene.table.forget(old)
    new, refused = scene.table.claim(7)
    assert refused is None
    scene.table.forget(new)
    assert scene.table.announce(7, "D", "again") and scene.table.claim(7)[1] is None


def test_an_announcement_repeated_while_its_pages_are_written(scene: Scene) -> None:
    """Guards against a decode rank that is told at once, for it says so a second time, that nothing
    is written to its pages, while the write is still under way."""
    scene.request(7, "D")
    scene.enter(7)
    scene.fail()
    assert scene.table.announce(7, "D", "pages of D") and scene.told == []
    assert scene.table.announce(7, "E", "late rank")
    scene.table.leave(7)
    assert scene.told == [(7, "aborted", ["pages of D", "late rank"])]


def test_forgotten_while_something_is_under_way(scene: Scene) -> None:
    """Guards against an entry that goes, and a decode rank that is never told, when the scheduler
    is done with a request before its transfer is."""
    room = scene.request(7, "D")
    scene.enter(7)
    scene.table.forget(room)
    assert scene.table.numbers() == [7] and scene.table.claimed() == []
    scene.fail(text="withdrawn")
    assert scene.told == []
    scene.table.leave(7)
    assert scene.told == [(7, "withdrawn", ["pages of D"])] and scene.table.numbers() == []


def test_ended_rooms_are_remembered_up_to_a_bound() -> None:
    """Guards against a table that grows with every withdrawal of a server that runs for months."""
    scene = Scene(remembered=3)
    for number in range(100):
        scene.fail(number, f"reason {number}")
    assert len(scene.table._ended) == 3
    refusals = [scene.table.claim(number)[1] for number in (96, 97, 98, 99)]
    assert refusals == [None, "reason 97", "reason 98", "reason 99"]


def test_unclaimed_rooms_have_an_age(scene: Scene) -> None:
    """Guards against announcements whose request never comes, which would stay for ever; and
    against one that is ended although its request is here."""
    time = scene.table.scheduler_time

    def turns(seconds: int) -> None:
        for _ in range(seconds):
            scene.clock.now += 1
            time.turn()

    scene.table.announce(7, "D", "seven")
    turns(5)
    scene.table.announce(8, "D", "eight")
    scene.request(9, "D")
    turns(5)
    assert sorted(scene.table.unclaimed()) == [7, 8]
    assert scene.table.unclaimed(10) == [7] and scene.table.unclaimed(10.1) == []
    scene.fail(7, "nobody came")
    assert scene.told == [(7, "nobody came", ["seven"])]
    assert sorted(scene.table.numbers()) == [8, 9]


def test_rooms_of_a_peer(scene: Scene) -> None:
    """Guards against a decode rank that vanished taking another one's rooms with it."""
    scene.request(7, "D", "E")
    scene.request(8, "E")
    scene.request(9)
    numbers = scene.table.numbers
    assert numbers("D") == [7] and numbers("E") == [7, 8] and numbers() == [7, 8, 9]


@pytest.mark.hazard("leaking-room-records")
def test_unknown_rooms_change_nothing(scene: Scene) -> None:
    """Guards against an entry for a room that nobody announced and no request has."""
    table = scene.table
    for number in (7, -1, 10**400):
        table.leave(number)
        table.take_back(number)
        table.room_overdue(number)
        table.abandon(number, Reason.INTERNAL, "stuck")
        scene.last(number)
        assert table.destinations(number) == [] and table.stopped(number) is None
        assert not scene.enter(number) and not scene.complete(number)
    assert scene.told == [] and scene.status == {} and table.numbers() == []


# ---- complete or given up ----


@pytest.mark.hazard("source-given-away")
def test_complete_or_given_up(scene: Scene) -> None:
    """Guards against a room that is both: decode would take one that failed here, or have its pages
    back and then a completion."""
    rooms = [scene.request(number, "D") for number in (7, 8)]
    assert all(scene.enter(room.number) for room in rooms)
    assert scene.complete(7)
    assert not scene.fail(7, "late")
    scene.table.leave(7)
    assert not scene.fail(7, "later") and scene.table.stopped(7) is None and scene.told == []
    assert scene.fail(8) and not scene.complete(8) and not scene.enter(8)
    scene.table.forget(rooms[0])
    assert scene.table.numbers() == [8]


def test_threads_complete_or_give_up() -> None:
    """A worker completes while the reader's thread gives the room up. Guards against both, or
    neither, being the outcome."""
    for _ in range(tries(300)):
        scene = Scene()
        scene.request()
        scene.enter(7)
        start = threading.Barrier(2)
        failed: list[bool] = []

        def give_up(
            scene: Scene = scene, start: threading.Barrier = start, failed: list[bool] = failed
        ) -> None:
            start.wait()
            failed.append(scene.fail())

        thread = threading.Thread(target=give_up)
        thread.start()
        start.wait()
        completed = scene.complete(7)
        thread.join()
        assert failed == [not completed]


@pytest.mark.parametrize("stops", [1, 3])
def test_threads_post_and_give_up(stops: int) -> None:
    """A worker enters and leaves while others give the room up. Guards against a room that is told
    while something is under way, not at all, or twice; and against a poll that lets it go then."""
    for _ in range(tries(300)):
        scene = Scene()
        room = scene.request(7, "D")
        inside = threading.Event()
        told: list[bool] = []
        scene.room_drained = (  # type: ignore[method-assign]
            lambda *_, told=told, inside=inside: told.append(inside.is_set())
        )
        start = threading.Barrier(stops + 1)

        def stop(scene: Scene = scene, start: threading.Barrier = start) -> None:
            start.wait()
            scene.fail()

        threads = [threading.Thread(target=stop) for _ in range(stops)]
        for thread in threads:
            thread.start()
        start.wait()
        while scene.enter(7):
            inside.set()
            assert not room.is_over
            inside.clear()
            scene.table.leave(7)
        for thread in threads:
            thread.join()
        assert told == [False] and room.is_over and not scene.enter(7)


def test_the_scheduler_waits_for_no_lock(scene: Scene) -> None:
    """Guards against a poll that waits while another thread has the table: it asks of every
    request in every step."""
    room = scene.request()
    with scene.table._lock:
        assert not (room.is_stopped or room.is_over or room.delivered)

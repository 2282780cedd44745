"""The owner of a prefill rank's rooms: its picture, and what each order of steps comes to. Random
orders of all threads are in ``test_room_machine.py``; rooms with their writes and messages in
``unit/delta/transfer``."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from effort import tries
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.prefill.room import TRANSITIONS, Room, State
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk
from unit.delta.fakes import Clock

PAGE = Path(__file__).parents[5] / "docs/design.md"
ERROR = ZeroDivisionError("the transport's")
ROOM = 7


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


class Scene:
    """A table with one room, which writes down what was refused and who was told."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.table = RoomTable(self, self.clock, **options)
        self.room = Room(ROOM)
        #: SGLang knows a request of the room that has not failed.
        self.waits = False
        self.log: list[str] = []

    # ---- the table's listener ----

    def fail_known(self, room: int, text: str) -> bool:
        is_first, self.waits = self.waits, False
        return is_first

    def room_delivered(self, room: int) -> None:
        assert not self.room.delivered, "the scheduler sees it before decode was told"
        self.log.append("delivered")

    def room_stopped(self, room: Room, kind: Reason) -> None:
        """The workers drop its chunks."""

    def room_drained(self, room: int, reason: str, announcements: list[Any]) -> None:
        if announcements:
            self.log.append(f"told {''.join(announcements)}")

    # ---- steps ----

    def step(self, name: str) -> None:
        """``D``: decode rank D announces the room; ``D2``: as one of two."""
        if name[0].isupper():
            self.table.announce(ROOM, name[0], name[0], int(name[1:] or 0))
        else:
            getattr(self, name)()

    def claim(self) -> None:
        """A request comes, as ``DeltaSender`` takes it."""
        counted = sum(STATS.failures.values())
        self.waits = True
        room, refused = self.table.claim(ROOM)
        if refused is None:
            self.room = room
            return
        self.log.append("refused")
        assert self.table.fail(ROOM, Reason.ABORTED, refused, meant=room)
        assert room.is_stopped and room.is_over and not room.delivered
        self.table.forget(room)
        assert sum(STATS.failures.values()) == counted + 1

    def enter(self) -> None:
        if not self.table.enter(self.room):
            self.log.append("no write")

    def leave(self) -> None:
        self.table.leave(ROOM)

    def complete(self) -> None:
        if not self.table.complete(self.room):
            self.log.append("no completion")

    def take_back(self) -> None:
        self.table.take_back(ROOM)

    def last(self) -> None:
        """The worker says that the room's last chunk is with all its peers."""
        self.table.chunk_done(Chunk(ROOM, (), None, True, 0.0, 0.0))

    def fail(self) -> None:
        if not self.table.fail(ROOM, Reason.ABORTED, "aborted"):
            self.log.append("too late")

    def failed(self) -> None:
        """Its worker gives it up."""
        self.table.room_failed(self.room, Reason.TRANSPORT, "broken", ERROR)

    def overdue(self) -> None:
        self.table.room_overdue(ROOM)

    def abandon(self) -> None:
        self.table.abandon(ROOM, Reason.INTERNAL, "stuck")

    def forget(self) -> None:
        self.table.forget(self.room)

    def later(self, seconds: int = 60) -> None:
        """The scheduler takes requests for so long."""
        for _ in range(seconds):
            self.clock.now += 1
            self.table.scheduler_time.turn()

    @property
    def end(self) -> str:
        """What the scheduler sees of its request."""
        room = self.room
        if room.delivered:
            assert not room.is_stopped or room.state is State.ENDED
            return "delivered"
        return "over" if room.is_over else "stopped" if room.is_stopped else "open"


#: Steps -> what was refused and who was told, in order, and what the scheduler sees in the end.
ORDERS = {
    "D claim": "open",
    "D claim enter": "open",
    "D claim enter leave": "open",
    "D claim enter complete": "open",
    "D claim enter complete leave last": "delivered, delivered",
    "D claim enter complete last leave": "delivered, delivered",
    "D claim complete last": "delivered, delivered",
    "D claim enter complete leave last fail": "delivered, too late, delivered",
    "D claim enter complete failed": "delivered, delivered",
    "D claim fail": "told D, over",
    "D claim enter leave fail": "told D, over",
    "D claim enter fail": "stopped",
    "D claim enter fail overdue": "over",
    "D claim enter fail leave": "told D, over",
    "D claim enter fail overdue leave": "told D, over",
    "D claim enter failed": "stopped",
    "D claim enter fail complete last": "no completion, stopped",
    "D claim enter complete take_back failed": "stopped",
    "D claim enter complete take_back failed leave": "told D, over",
    "D claim complete take_back failed": "told D, over",
    "D claim enter abandon": "over",
    "D claim enter fail abandon abandon": "over",
    "D claim abandon": "told D, over",
    "D claim enter complete leave last abandon": "delivered, delivered",
    "D claim enter complete abandon": "delivered, delivered",
    "D claim overdue": "open",
    "D claim enter overdue leave": "open",
    "D claim last": "open",
    "D claim forget": "over",
    "D claim enter fail forget": "over",
    # Requests and decode ranks that come again, late, or under a number that is in use:
    "fail claim claim": "refused, open",
    "claim fail forget D claim D enter": "told D, open",
    "D2 E2 claim fail forget fail D2 E2 claim enter": "told DE, open",
    "D claim fail forget fail D claim": "told D, told D, open",
    "D1 fail later D1 claim": "told D, told D, refused, open",
    "claim fail forget later D claim": "open",
    "D claim claim complete last": "refused, delivered, delivered",
    "D claim enter claim complete last leave": "refused, delivered, delivered",
    "D claim enter leave claim complete last": "refused, delivered, delivered",
    "D claim enter complete claim last leave": "refused, delivered, delivered",
    "D claim enter fail claim leave": "refused, told D, over",
    "D claim fail claim forget claim": "told D, refused, open",
    "D claim enter complete leave last claim D forget claim D": "delivered, refused, told D, open",
    "D claim enter complete D claim last leave": "told D, refused, delivered, delivered",
    "D claim enter complete last forget D leave claim D enter": "delivered, told D, open",
    "claim fail D": "told D, over",
    "D claim enter fail D E leave": "told DE, over",
    "D1 claim E": "told E, open",
    "D1 claim D1": "told D, over",
    "D claim enter D leave": "told D, over",
    "D claim enter forget fail leave": "told D, over",
    "D claim enter forget D leave": "told D, over",
    "D claim enter fail overdue forget claim D leave claim D enter": "refused, told D, open",
    "D claim enter complete fail leave fail": "too late, too late, open",
    "D claim enter fail complete enter": "no completion, no write, stopped",
    "leave take_back overdue abandon last enter complete forget": "no write, no completion, open",
}


@pytest.mark.hazard(
    "source-given-away", "abort-before-settled", "room-number-reused", "leaking-room-records"
)
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_of_steps(order: str) -> None:
    """Guards against a request whose pages are freed while they are read, or that is never let go;
    against decode being told too early, twice or never; and against a request that ends another
    one of its number, or is delivered with it."""
    scene = Scene()
    for step in order.split():
        scene.step(step)
    assert ", ".join([*scene.log, scene.end]) == ORDERS[order]
    scene.leave()
    scene.forget()
    scene.fail()
    assert scene.table.numbers() == [], "an entry stays"


def test_ended_rooms_are_remembered_up_to_a_bound() -> None:
    """Guards against a table that grows with every withdrawal of a server that runs for months."""
    table = Scene(remembered=3).table
    for number in range(100):
        table.fail(number, Reason.ABORTED, f"reason {number}")
    refusals = [table.claim(number)[1] for number in (0, 96, 97, 98, 99)]
    assert refusals == [None, None, "reason 97", "reason 98", "reason 99"]


def test_several_rooms() -> None:
    """Guards against a decode rank that vanished taking another one's rooms with it, against
    announcements whose request never comes, and against one that is ended although it came."""
    scene = Scene()
    table = scene.table
    for number, peers in ((7, "D"), (8, "DE"), (9, "E")):
        for peer in peers:
            table.announce(number, peer, f"pages of {peer}")
    scene.later(20)
    table.announce(10, "E", "pages of E")
    room, _ = table.claim(9)
    assert table.numbers("D") == [7, 8] and table.peers() == {"D", "E"}
    assert table.destinations(8) == ["pages of D", "pages of E"] and table.destinations(11) == []
    assert table.unclaimed(20) == [7, 8] and table.unclaimed(21) == []
    assert table.unclaimed() == [7, 8, 10] and table.claimed() == [9]
    table.enter(room)
    table.forget(room)
    assert table.claimed() == table.lingering() == [] and table.is_under_way(9)
    table.fail(9, Reason.ABORTED, "withdrawn")
    assert table.lingering() == [9] and table.stopped(9) == "withdrawn"


@pytest.mark.parametrize("stops", [1, 3])
def test_threads(stops: int) -> None:
    """A worker writes and completes while others give the room up. Guards against both or neither
    being the outcome; and against a room that is told while something is under way, or twice."""
    for _ in range(tries(150)):
        scene, start = Scene(), threading.Barrier(stops + 1)
        for step in ("D", "claim", "enter"):
            scene.step(step)

        def stop(scene: Scene = scene, start: threading.Barrier = start) -> None:
            start.wait()
            scene.fail()

        threads = [threading.Thread(target=stop) for _ in range(stops)]
        for thread in threads:
            thread.start()
        start.wait()
        assert "told D" not in scene.log
        is_complete = scene.table.complete(scene.room)
        assert "told D" not in scene.log
        scene.leave()
        for thread in threads:
            thread.join()
        assert scene.log == (["too late"] * stops if is_complete else ["told D"])
        assert scene.room.is_over != is_complete


def test_the_scheduler_waits_for_no_lock() -> None:
    """Guards against a poll that waits while another thread has the table: it asks of every
    request in every step."""
    scene, seen = Scene(), []
    scene.step("claim")
    scene.fail_known = lambda *_: seen.append(scene.end)  # type: ignore[assignment,method-assign]
    scene.fail()  # calls it with the lock held
    assert seen == ["over"]

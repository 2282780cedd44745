"""The owner of a prefill rank's rooms: its picture, and the result of each order of steps. Random
orders of all threads are in ``test_state_machine.py``; rooms with their writes and messages in
``unit/delta/transfer``."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from effort import tries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.prefill.rooms import TRANSITIONS, UNDER_WAY, Room, RoomState
from unit.delta.prefill.rig import ERROR, ROOM, Side

PAGE = Path(__file__).parents[5] / "docs/design.md"


def test_the_picture_is_the_table() -> None:
    """Guards against a picture that differs from the state machine."""
    pictures = re.findall(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (picture,) = [each for each in pictures if "announced -->" in each]
    found = re.findall(r"^ +(\S+) --> (\S+): (.+)$", picture, re.MULTILINE)
    name = {RoomState.ENDED: "[*]"}
    edges = {
        (name.get(before, before.value), name.get(after, after.value), event.value)
        for (before, event), after in TRANSITIONS.items()
    }
    assert set(found) == edges and len(found) == len(edges)


def test_every_state_can_be_reached_and_left() -> None:
    """Guards against a state that no room can leave or reach."""
    ways = [(before, after) for (before, _), after in TRANSITIONS.items()]
    for steps in (ways, [(after, before) for before, after in ways]):
        reached, frontier = {RoomState.ENDED}, {RoomState.ENDED}
        while frontier:
            frontier = {to for at, to in steps if at in frontier} - reached
            reached |= frontier
        assert reached == set(RoomState)


class Scene(Side):
    """One room, with a log of refusals and messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []

    def play(self, order: str) -> str:
        """Run the steps of ``order``; return the log and the outcome. ``D``: decode rank D
        announces the room; ``D2``: as one of two; ``-D``: it withdraws the room."""
        for step in order.split():
            if step[0].isupper():
                self.announce(ROOM, step[0], int(step[1:] or 0))
            elif step[0] == "-":
                self.withdraw(step[1:])
            elif getattr(self, f"do_{step}")() is False:
                self.log.append(REFUSALS[step])
            self.log += [f"told {host}" for host, _, _ in self.told()]
        return ", ".join([*self.log, self.end()])

    # ---- steps: False if refused ----

    def do_status(self) -> None:
        """Set SGLang's status, as its sender does before it claims the room."""
        self.manager.update_status(ROOM, KVPoll.Bootstrapping)

    def do_claim(self) -> bool:
        counted = sum(STATS.by("kv_transfer_failed").values())
        refused = self.claim()
        counted += refused is not None
        assert sum(STATS.by("kv_transfer_failed").values()) == counted
        return refused is None

    def do_enter(self) -> bool:
        return self.enter()

    def do_complete(self) -> bool:
        return self.table.complete(self.room)

    def do_fail(self) -> bool:
        return self.fail()

    def do_failed(self) -> None:
        """Fail the room as its worker does."""
        self.table.room_failed(self.room, Reason.TRANSPORT, "broken", ERROR)

    @property
    def room(self) -> Room:
        """The current request's room, or one that has ended."""
        return self.requests.get(ROOM) or self.table.room(ROOM) or Room(ROOM)

    def do_leave(self) -> None:
        self.table.leave(self.room)

    def do_last(self) -> None:
        """Deliver the last chunk to all peers as a worker does."""
        self.table.deliver(self.room)

    def do_take_back(self) -> None:
        self.table.take_back(self.room)

    def do_overdue(self) -> None:
        self.table.room_overdue(self.room)

    def do_abandon(self) -> None:
        self.table.abandon(self.room, Reason.INTERNAL, "stuck")

    def do_forget(self) -> None:
        self.forget()

    def do_later(self) -> None:
        self.advance(60)

    def do_gone(self) -> None:
        """Drop the decode rank's registration."""
        del self.manager.decode_kv_args_table["D"]


REFUSALS = {
    "claim": "refused",
    "enter": "no write",
    "complete": "no completion",
    "fail": "too late",
}
#: Steps -> refusals and messages, in order, and the outcome that the scheduler sees.
ORDERS = {
    "D claim": "open",
    "D claim enter": "open",
    "D claim enter leave": "open",
    "D claim enter complete": "open",
    "D claim enter complete leave last": "delivered",
    "D claim enter complete last leave": "delivered",
    "D claim complete last": "delivered",
    "D claim enter complete leave last fail": "too late, delivered",
    "D claim enter complete failed": "delivered",
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
    "D claim enter complete leave last abandon": "delivered",
    "D claim enter complete abandon": "delivered",
    "D claim overdue": "open",
    "D claim enter overdue leave": "open",
    "D claim last": "open",
    "D claim forget": "over",
    "D claim enter fail forget": "over",
    # Requests and decode ranks that return, late, or under a number in use:
    "fail claim forget claim": "refused, open",
    "claim fail forget D claim D enter": "told D, open",
    "D2 E2 claim fail forget fail D2 E2 claim enter": "told D, told E, open",
    "D claim fail forget fail D claim": "told D, told D, open",
    "D1 claim fail forget D1 -D claim": "told D, told D, refused, over",
    "D1 fail later D1 claim": "told D, told D, refused, over",
    "claim fail forget later D claim": "told D, open",
    "D claim claim complete last": "refused, delivered",
    "D claim enter claim complete last leave": "refused, delivered",
    "D claim enter leave claim complete last": "refused, delivered",
    "D claim enter complete claim last leave": "refused, delivered",
    "D claim enter fail claim leave": "refused, told D, over",
    "D claim fail claim forget claim": "told D, refused, open",
    "D claim enter complete leave last claim D forget claim D": "refused, told D, open",
    "D claim enter complete D claim last leave": "told D, refused, delivered",
    "D claim enter complete last forget D leave claim D enter": "told D, open",
    "claim fail D": "told D, over",
    "D claim enter fail D E leave": "told D, told E, over",
    "D1 claim E": "told E, open",
    "D1 claim D1": "told D, over",
    "D claim enter D leave": "told D, over",
    "D claim enter forget fail leave": "told D, over",
    "D claim enter forget D leave": "told D, over",
    "D claim enter fail overdue forget claim D leave claim D enter": "refused, told D, open",
    "D claim enter complete fail leave fail": "too late, too late, open",
    "D claim enter fail complete enter": "no completion, no write, stopped",
    "leave take_back overdue abandon last enter complete forget": "no write, no completion, open",
    # Decode ranks that withdraw (``-D``): X is not registered, E is another request's.
    "-D claim": "told D, refused, over",
    "-D claim forget claim": "told D, refused, open",
    "D -D claim": "told D, refused, over",
    "D status -D claim": "told D, refused, over",
    "D claim -D": "told D, over",
    "D claim gone -D": "told D, over",
    "D claim -D -D -D": "told D, told D, told D, over",
    "D claim -D forget -D": "told D, told D, over",
    "D claim forget -D": "told D, over",
    "D claim enter -D -D": "stopped",
    "D claim enter complete -D": "open",
    "-X": "told X, open",
    "claim -X": "told X, open",
    "D -X claim": "told X, open",
    "D2 claim -X": "told X, open",
    "D1 claim -E": "told E, open",
    "D1 claim enter -E complete": "told E, open",
    "D1 claim enter complete -E last leave": "told E, delivered",
    "D2 claim -E": "told D, told E, over",
    "D2 E2 claim fail": "told D, told E, over",
}


@pytest.mark.hazard(
    "source-given-away", "abort-before-settled", "room-number-reused", "leaking-room-records"
)
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_of_steps(order: str) -> None:
    """Guards against a request whose pages are freed while they are read, or never released;
    against notifying decode too early, twice or never; and against a request that ends another one
    with its number, or is delivered with it."""
    scene = Scene()
    assert scene.play(order) == ORDERS[order]
    scene.play("leave forget fail")
    assert scene.table.all() == [], "an entry is left"


def test_ended_rooms_are_remembered_up_to_a_bound() -> None:
    """Guards against a table that grows with every withdrawal for months."""
    side = Side(remembered=3)
    for number in range(100):
        side.fail(number, text=f"reason {number}")
    refusals = [side.claim(number) for number in (0, 96, 97, 98, 99)]
    assert refusals == [None, None, "reason 97", "reason 98", "reason 99"]


def test_several_rooms() -> None:
    """Guards against a lost decode rank that takes another one's rooms with it, against
    announcements whose request never comes, and against ending one whose request came."""
    side = Side()
    table = side.table
    for number, peers in ((7, "D"), (8, "DE"), (9, "E")):
        for peer in peers:
            side.announce(number, peer, len(peers))
    side.ping("D")
    side.advance(119)
    side.announce(10, "E")
    assert side.claim(9) is None
    assert [len(room.announcements) for room in table.all()] == [1, 2, 1, 1]
    side.advance(1)
    assert [room.number for room in table.all()] == [9, 10], "7 and 8 waited too long"
    assert side.enter(9)
    room = side.requests[9]
    side.forget(9)
    assert room.state in UNDER_WAY and side.manager.open_rooms()["rooms"] == [9]
    side.fail(9)
    assert room.state in UNDER_WAY and side.manager.open_rooms()["rooms"] == []


@pytest.mark.parametrize("stops", [1, 3])
def test_threads(stops: int) -> None:
    """A worker writes and completes while others fail the room. Guards against both or neither
    outcome; and against a message while a write is in flight, or a second message."""
    for _ in range(tries(150)):
        scene, start = Scene(), threading.Barrier(stops + 1)
        scene.play("D claim enter")
        failed: list[bool] = []

        def stop(
            scene: Scene = scene, start: threading.Barrier = start, failed: list[bool] = failed
        ) -> None:
            start.wait()
            failed.append(scene.fail())

        threads = [threading.Thread(target=stop) for _ in range(stops)]
        for thread in threads:
            thread.start()
        start.wait()
        is_complete = scene.do_complete()
        assert scene.told() == []
        scene.do_leave()
        for thread in threads:
            thread.join()
        assert failed == [not is_complete] * stops and scene.requests[ROOM].is_over != is_complete
        assert len(scene.told()) == (not is_complete)


def test_the_scheduler_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a poll that waits while another thread holds the table's lock: the scheduler
    polls every request in every step."""
    scene, seen = Scene(), []
    scene.claim()
    monkeypatch.setattr(scene.manager.statuses, "fail_known", lambda *_: seen.append(scene.end()))
    scene.fail()  # calls it with the lock held
    assert seen == ["over"]

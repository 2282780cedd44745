"""The room table walked from four points of view at once: scheduler, worker, reader, decode ranks.

Each rule is one step of one of them. Between the steps of the others' operations, and inside the
table's own calls to its listener, any other one may come: ``meanwhile`` puts it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from effort import tries
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.decode_ranks import DecodeRanks
from sglang.srt.disaggregation.delta.prefill.room import TRANSITIONS, Event, Room, State
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk
from unit.delta.fakes import Clock, Sockets, announcement

#: The decode ranks that announce each room.
PEERS = {1: ("D",), 2: ("D", "E")}
NUMBERS = st.sampled_from(list(PEERS))
CLAIM_S = 30.0


@dataclass(eq=False)
class Request:
    """A request on the prefill scheduler, and what the world does to its pages."""

    number: int
    room: Room
    #: Writes from its pages that were posted and have not landed.
    writes: int = 0
    #: The worker has no more to do for it.
    is_over_on_worker: bool = False
    #: The worker is between ``complete`` and the end of telling decode.
    is_telling: bool = False
    #: The scheduler has given its pages to others.
    is_freed: bool = False


@dataclass(eq=False)
class Listing:
    """Pages that a decode rank listed for a room; it wants to hear one of two things."""

    number: int
    peer: str
    info: Any = None
    heard: list[str] = field(default_factory=list)
    #: Requests whose writes may go to these pages.
    writers: list[Request] = field(default_factory=list)


class Rank:
    """One prefill rank: a real table, real handling of messages, and a model of memory."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.decode_kv_args_table: dict[str, Any] = {
            peer: SimpleNamespace(endpoint=f"{peer} itself", dst_port=4000)
            for peers in PEERS.values()
            for peer in peers
        }
        self.writer_id = 0
        self.status: dict[int, str | None] = {}
        self.table = RoomTable(self, self.clock)
        self.ranks = DecodeRanks(self, self.table, self.clock)
        self.sockets = Sockets()
        self.ranks._sockets = self.ranks._strangers = self.sockets  # type: ignore[assignment]
        self.requests: dict[int, Request] = {}
        #: Those that are gone and of which something is under way.
        self.gone: list[Request] = []
        #: Of all requests that are gone.
        self.past: list[Room] = []
        self.listings: list[Listing] = []
        self.steps: list[tuple[State, Event, State]] = []
        self.interruptions: list[Callable[[], object]] = []
        move = self.table._move

        def watched(room: Room, event: Event) -> bool:
            before, moved = room.state, move(room, event)
            if moved:
                self.steps.append((before, event, room.state))
            assert moved or room.state is before
            return moved

        self.table._move = watched  # type: ignore[method-assign]

    # ---- the table's listener ----

    def fail_known(self, room: int, text: str) -> bool:
        if room not in self.status or self.status[room] is not None:
            return False
        self.status[room] = text
        return True

    def room_delivered(self, room: int) -> None:
        self.interrupted()

    def room_stopped(self, room: Room, kind: Reason) -> None:
        self.interrupted()
        request = self.requests.get(room.number)
        if request is not None and request.room is room:
            request.is_over_on_worker = True

    def room_drained(self, room: int, reason: str, announcements: list[Any]) -> None:
        for listing in self.listings:
            if any(listing.info is info for info in announcements):
                assert listing.heard == [], f"told twice, or after {listing.heard}"
                for request in listing.writers:
                    assert not request.writes, "told while a write to its pages is under way"
                listing.heard.append("stopped")
        self.interrupted()
        self.ranks.tell(room, reason, announcements)

    def interrupted(self) -> None:
        """Other threads run here."""
        while self.interruptions:
            self.interruptions.pop()()

    # ---- the scheduler ----

    def request(self, number: int) -> None:
        first = self.requests.get(number)
        if first is not None:
            if self.table.room(number) is first.room:
                self.second(number)
            return
        self.status[number] = None
        room, refused = self.table.claim(number)
        self.requests[number] = Request(number, room)
        if refused is not None:
            self.table.fail(number, Reason.ABORTED, refused, meant=room)
        for listing in self.listings:
            if listing.number == number and not listing.heard:
                listing.writers.append(self.requests[number])

    def second(self, number: int) -> None:
        """Another request of a number whose request is here: refused, and nobody sees a change."""
        room = self.table.room(number)
        assert room is not None
        before = room.state, room.reason, dict(room.announcements)
        refused, reason = self.table.claim(number)
        assert reason is not None and refused is not room and refused.is_over
        self.table.fail(number, Reason.ABORTED, reason, meant=refused)
        self.table.forget(refused)
        assert (room.state, room.reason, dict(room.announcements)) == before

    def poll(self, number: int) -> None:
        """As the NIXL sender does; a request that has ended gives its pages to others."""
        request = self.requests.get(number)
        if request is None:
            return
        room = request.room
        if room.delivered or (room.is_stopped and room.is_over):
            if not room.delivered:
                is_wanted = room.state not in (State.OVERDUE, State.LINGERING)
                assert not (request.writes and is_wanted), "its pages are read"
                assert room.reason is not None
            self.let_go(request)

    def let_go(self, request: Request) -> None:
        request.is_freed = True
        request.is_over_on_worker = True
        del self.requests[request.number]
        if request.writes or request.is_telling:
            self.gone.append(request)
        self.past.append(request.room)
        self.table.forget(request.room)
        self.status.pop(request.number, None)

    def abort(self, number: int) -> None:
        if number in self.requests:
            self.table.fail(number, Reason.ABORTED, "aborted")

    # ---- the worker ----

    def under_way(self, number: int) -> bool:
        """Over all lives of the number: what the worker counts."""
        lives = [*self.gone, *self.requests.values()]
        return any(life.writes or life.is_telling for life in lives if life.number == number)

    def is_ready(self, number: int) -> bool:
        """Whether a request is here, its worker is not done with it, and all its decode ranks have
        announced it."""
        request = self.requests.get(number)
        if request is None or request.is_over_on_worker or request.is_telling:
            return False
        listed = {it.peer for it in self.listings if request in it.writers and not it.heard}
        return listed == set(PEERS[number])

    def post(self, number: int) -> bool:
        if not self.is_ready(number):
            return False
        request = self.requests[number]
        if not self.table.enter(request.room):
            request.is_over_on_worker = True
            return False
        assert not request.is_freed and request.room.state is State.SENDING
        request.writes += 1
        return True

    def land(self, request: Request) -> None:
        """A write lands, and the worker leaves the room if it was the last one."""
        if not request.writes:
            return
        request.writes -= 1
        if not self.under_way(request.number):
            self.table.leave(request.number)

    def complete(self, number: int, is_told: bool) -> None:
        """All of a room has landed: the worker tells decode, or cannot."""
        if not self.is_ready(number):
            return
        request = self.requests[number]
        was_entered, request.writes = bool(request.writes), 0
        request.is_over_on_worker = True
        if self.table.complete(request.room):
            request.is_telling = True
            assert not request.is_freed, "the note reads the metadata slot"
            self.interrupted()
            if is_told:
                for listing in self.listings:
                    if request in listing.writers:
                        assert listing.heard == [], f"complete after {listing.heard}"
                        listing.heard.append("complete")
            else:
                self.table.take_back(number)
                self.table.room_failed(request.room, Reason.TRANSPORT, "no note", ValueError())
            request.is_telling = False
        if was_entered and not self.under_way(number):
            self.table.leave(number)
        if is_told:
            self.table.chunk_done(Chunk(number, (), None, True, 0.0, 0.0))

    def late(self) -> None:
        """A worker comes to a chunk, and to the deadline of one, whose request is gone; its number
        may be another's by now."""
        for room in self.past:
            holder = self.table.room(room.number)
            before = None if holder is None else (holder.state, holder.reason)
            assert not self.table.enter(room) and not self.table.complete(room)
            if holder is not room:
                self.table.room_failed(room, Reason.TIMEOUT, "late", None)
                assert holder is None or (holder.state, holder.reason) == before

    def overdue(self, number: int) -> None:
        request = self.requests.get(number)
        if request is not None and request.writes and not request.is_over_on_worker:
            self.table.room_failed(request.room, Reason.TIMEOUT, "late", None)
            request.is_over_on_worker = True
            self.table.room_overdue(number)

    # ---- decode ranks, through the reader ----

    def announce(self, number: int, peer: str) -> None:
        request = self.requests.get(number)
        if peer not in PEERS[number]:
            return
        if any(it.number == number and it.peer == peer and not it.heard for it in self.listings):
            return  # decode refuses a number whose pages it still holds
        listing = Listing(number, peer, announcement(number, host=peer))
        if request is not None and not request.room.is_complete:
            listing.writers.append(request)
        self.listings.append(listing)
        self.table.announce(number, peer, listing.info, len(PEERS[number]))

    def withdraw(self, number: int, peer: str) -> None:
        room = self.table.room(number)
        if room and room.is_announced and peer not in room.announcements:
            before = room.state, room.reason
            self.ranks.take(wire.Withdraw(number, peer, "a stranger", 4000, "bored"))
            assert (room.state, room.reason) == before
            self.sockets.take()  # it is told at once: nothing is written for it
            return
        self.ranks.take(wire.Withdraw(number, peer, f"{peer} itself", 4000, "bored"))
        for host, _, message in self.sockets.take():
            if host == f"{peer} itself" and isinstance(message, wire.Stopped):
                assert not self.under_way(message.room), "told while something is under way"

    # ---- time ----

    def wait(self, seconds: int, *, is_stalled: bool = False) -> None:
        """``is_stalled``: the scheduler does one long thing, and the reader's thread runs on."""
        for _ in range(seconds):
            self.clock.now += 1.0
            if not is_stalled:
                self.table.scheduler_time.turn()
            self.table.tick()


class Threads(RuleBasedStateMachine):
    """Steps of all four, in any order."""

    #: What decode ranks heard of rooms whose request came, over all examples.
    ends: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.rank = Rank()

    def actions(self, name: str, number: int, peer: str) -> Callable[[], object]:
        rank = self.rank
        lives = [life for life in (*rank.gone, *rank.requests.values()) if life.number == number]
        chosen: dict[str, Callable[[], object]] = {
            "request": lambda: rank.request(number),
            "poll": lambda: rank.poll(number),
            "abort": lambda: rank.abort(number),
            "post": lambda: rank.post(number),
            "land": lambda: [rank.land(life) for life in lives],
            "announce": lambda: rank.announce(number, peer),
            "withdraw": lambda: rank.withdraw(number, peer),
            "overdue": lambda: rank.overdue(number),
        }
        return chosen[name]

    OTHERS = st.sampled_from(("request", "poll", "abort", "announce", "withdraw"))
    #: Rooms that live long enough to be served.
    ALL = st.sampled_from(
        ("abort", "withdraw", *("request", "poll", "post", "land", "announce", "overdue") * 2)
    )

    @rule(
        number=NUMBERS, peer=st.sampled_from("DE"), is_early=st.booleans(), writes=st.integers(0, 2)
    )
    def begin(self, number: int, peer: str, is_early: bool, writes: int) -> None:
        """A request and its announcements, whichever comes first, and writes."""
        if is_early:
            self.rank.request(number)
        for each in (peer, *PEERS[number]):
            self.rank.announce(number, each)
        self.rank.request(number)
        for _ in range(writes):
            self.rank.post(number)

    @rule(name=ALL, number=NUMBERS, peer=st.sampled_from("DE"))
    def one_step(self, name: str, number: int, peer: str) -> None:
        self.actions(name, number, peer)()

    @rule(number=NUMBERS, is_told=st.booleans())
    def complete(self, number: int, is_told: bool) -> None:
        self.rank.complete(number, is_told)

    @rule(name=OTHERS, number=NUMBERS, peer=st.sampled_from("DE"))
    def meanwhile(self, name: str, number: int, peer: str) -> None:
        """This happens inside the table's next call to its listener, on another thread."""
        self.rank.interruptions.append(self.actions(name, number, peer))

    @rule()
    def late(self) -> None:
        self.rank.late()

    @rule(seconds=st.sampled_from((1, 1, 1, 29, 31)), is_stalled=st.booleans())
    def wait(self, seconds: int, is_stalled: bool) -> None:
        self.rank.wait(seconds, is_stalled=is_stalled)

    @precondition(lambda self: len(self.rank.gone) > 0)
    @rule()
    def old_writes_land(self) -> None:
        for life in list(self.rank.gone):
            while life.writes:
                self.rank.land(life)
            self.rank.gone.remove(life)

    @invariant()
    def every_step_is_in_the_table(self) -> None:
        for before, event, after in self.rank.steps:
            assert TRANSITIONS[before, event] is after
        self.rank.steps.clear()

    @invariant()
    def complete_or_given_up(self) -> None:
        for request in self.rank.requests.values():
            room = request.room
            assert not (room.delivered and room.reason is not None)

    @invariant()
    def the_table_knows_what_is_under_way(self) -> None:
        for number in PEERS:
            if any(life.writes for life in self.rank.requests.values() if life.number == number):
                assert self.rank.table.is_under_way(number)

    def teardown(self) -> None:
        """When everything has landed, ended and aged, nothing is left and nobody waits."""
        rank = self.rank
        rank.interrupted()
        for _ in range(3):
            for life in (*rank.gone, *rank.requests.values()):
                while life.writes:
                    rank.land(life)
            for number in PEERS:
                rank.abort(number)
                rank.poll(number)
            rank.wait(int(CLAIM_S) + 1)
        assert rank.requests == {} and rank.table.numbers() == []
        assert [it for it in rank.listings if len(it.heard) != 1] == []
        self.ends.update(it.heard[0] for it in rank.listings if it.writers)
        assert all(status is None for status in rank.status.values())


@pytest.mark.hazard("room-number-reused", "late-word-revives-room")
@pytest.mark.fuzz
def test_threads() -> None:
    """Guards against a room that is complete and given up, pages that are given away while they
    are read, decode ranks that are told too early, twice or never; and against steps of which few
    get that far."""
    Threads.ends.clear()
    run_state_machine_as_test(
        Threads,
        settings=settings(max_examples=tries(100), stateful_step_count=40, deadline=None),
    )
    assert min(Threads.ends["complete"], Threads.ends["stopped"]) > tries(100) / 6, Threads.ends

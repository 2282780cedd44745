"""Random lives of rooms on one prefill rank: scheduler, worker, reader and decode ranks in any
order, against a model that knows only the requests and decode's messages.

Commands for the worker run at its next step. While a worker is in a call of its transport, and
while a decode rank is notified, any other thread may run: ``meanwhile`` schedules it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
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
from sglang.srt.disaggregation.delta.prefill.rooms import COMPLETE, Room, RoomState
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, TransferState
from unit.delta.fakes import Sockets
from unit.delta.prefill.rig import Bench, Handle

#: The decode ranks that announce each room.
PEERS = {1: ("D",), 2: ("D", "E"), 3: ("E",), 4: ("S",), 5: ("E", "S")}
STALLED = "S"
NUMBERS = st.sampled_from(list(PEERS))
#: Rarely True, so that rooms live long enough to be served.
RARELY = st.sampled_from([True, *[False] * 7])
WINDOW, QUOTA = 4, 2


@dataclass(eq=False)
class Life:
    """A request on the scheduler."""

    number: int
    room: Room
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def has_last(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].is_last


@dataclass(eq=False)
class Listing:
    """Pages that a decode rank listed for a room; it expects exactly one message."""

    number: int
    peer: str
    #: Requests that may write to these pages.
    writers: list[Life] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)


class Told(Sockets):
    """Sockets of listings, each with its own host."""

    def __init__(self, lives: Lives) -> None:
        super().__init__()
        self._lives = lives

    def send(self, host: str, port: int, message: Any) -> None:
        super().send(host, port, message)
        listing = self._lives.listings.get(host)
        if isinstance(message, wire.Stopped) and listing is not None:
            self._lives.hear(listing, "stopped")
        self._lives.interrupted()


class Lives(RuleBasedStateMachine):
    """Rooms whose numbers are used again."""

    #: Over all examples: messages to decode ranks about requests that came, and the requests' ends.
    ends: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(Told(self), window=WINDOW, quota=QUOTA)
        self.transport = self.bench.transport
        self.transport.meanwhile = self.interrupted
        self.lives: dict[int, Life] = {}
        #: All requests so far.
        self.all: list[Life] = []
        self.listings: dict[str, Listing] = {}
        self.interruptions: list[Callable[[], object]] = []
        self.complete = self.transport.complete
        self.transport.complete = self.completed  # type: ignore[method-assign]

    def interrupted(self) -> None:
        """Run the other threads' actions."""
        while self.interruptions:
            self.interruptions.pop()()

    def handles(self, life: Life) -> list[Handle]:
        return [it for it in self.transport.handles if it.chunk in life.chunks]

    # ---- messages to decode ----

    def check(self, holds: bool, complaint: str) -> None:
        """Record a complaint: the worker's thread swallows errors."""
        if not holds:
            self.transport.misuse.append(complaint)

    def hear(self, listing: Listing, word: str) -> None:
        self.check(listing.heard == [], f"{word} after {listing.heard}")
        listing.heard.append(word)
        for life in listing.writers:
            is_over = all(it.over for it in self.handles(life))
            self.check(is_over, f"room {life.number}: {word} while it is written")

    def completed(self, chunk: Chunk) -> None:
        (life,) = [life for life in self.all if chunk in life.chunks]
        self.complete(chunk)
        wanted = {(it, peer) for it in life.chunks for peer in it.peers}
        self.check(life.has_last and wanted <= {*self.transport.posts}, "a chunk was not posted")
        is_done = all(it.state is TransferState.DONE for it in self.handles(life))
        self.check(is_done and life.room.reason is None, "a write has not arrived")
        self.check(self.lives.get(life.number) is life, "the note reads its metadata slot")
        for listing in self.listings.values():
            if life in listing.writers:
                self.hear(listing, "complete")

    # ---- the scheduler ----

    def request(self, number: int) -> None:
        table, first = self.bench.table, self.lives.get(number)
        held = table.room(number)
        before = held and (held.state, held.reason, dict(held.announcements))
        if first is not None:
            refused = table.claim(number)
            assert refused.reason is not None and refused is not first.room and refused.is_over
            table.forget(refused)
            assert held and (held.state, held.reason, dict(held.announcements)) == before
            return
        reason = self.bench.take(number)
        if (
            number not in self.bench.requests
            or table.room(number) is not self.bench.requests[number]
        ):
            assert reason is not None
            return
        life = self.lives[number] = Life(number, self.bench.requests[number])
        self.all.append(life)
        for listing in self.listings.values():
            if listing.number == number and not listing.heard:
                listing.writers.append(life)

    def poll(self, number: int) -> None:
        """End a finished request, so that its pages are reused."""
        life = self.lives.get(number)
        end = "open" if life is None else self.bench.end(number)
        if life is None or end not in ("delivered", "over"):
            return
        if end == "over":
            assert life.room.reason is not None
            is_late = life.room.state is RoomState.OVERDUE
            now = self.bench.clock.now
            for handle in self.handles(life):
                assert handle.over or (is_late and handle.chunk.deadline <= now), (
                    "its pages are read"
                )
        self.ends[end] += 1
        self.bench.forget(number)
        del self.lives[number], self.bench.requests[number]

    def abort(self, number: int) -> None:
        if number in self.lives:
            self.bench.fail(number)

    @rule(
        number=NUMBERS, last=st.booleans(), handles=st.integers(0, 3),
        fault=st.sampled_from(["", "", "", "", "error", "complete_error"]),
        within=st.sampled_from([2.0, 120.0, 120.0]),
    )  # fmt: skip
    def chunk(self, number: int, last: bool, handles: int, fault: str, within: float) -> None:
        """Send a chunk as the scheduler does, which may know less than the table."""
        life = self.lives.get(number)
        if life is not None and life.room.is_announced and not life.has_last:
            script = {fault: RuntimeError(fault)} if fault else {}
            sent = self.bench.submit(number, last=last, within=within, handles=handles, **script)
            life.chunks.append(sent)

    # ---- decode ranks ----

    def announce(self, number: int, peer: str) -> None:
        mine = [it for it in self.listings.values() if (it.number, it.peer) == (number, peer)]
        if peer not in PEERS[number] or any(not it.heard for it in mine):
            return  # decode refuses a number while it holds its pages
        listing, host = Listing(number, peer), f"{peer} {len(self.listings)}"
        life = self.lives.get(number)
        room = Room(number) if life is None else life.room
        if life and room.state not in COMPLETE and peer not in room.announcements:
            listing.writers.append(life)
        self.listings[host] = listing
        self.bench.announce(number, peer, len(PEERS[number]), host=host)

    def withdraw(self, number: int, peer: str) -> None:
        self.bench.withdraw(peer, number)

    # ---- rules: possible events ----

    def action(self, name: str, number: int, peer: str) -> Callable[[], object]:
        whole: dict[str, Callable[[], object]] = {
            "request": lambda: self.request(number),
            "poll": lambda: self.poll(number),
            "abort": lambda: self.abort(number),
            "announce": lambda: self.announce(number, peer),
            "withdraw": lambda: self.withdraw(number, peer),
        }
        return whole[name]

    NAMES = st.sampled_from(("request", "poll", "poll", "announce", "abort", "withdraw"))

    @rule(number=NUMBERS, is_early=st.booleans())
    def begin(self, number: int, is_early: bool) -> None:
        """Begin a request with its announcements, in either order."""
        self.poll(number)
        if is_early:
            self.request(number)
        for peer in PEERS[number]:
            self.announce(number, peer)
        if number not in self.lives:
            self.request(number)

    @rule(number=NUMBERS)
    def serve(self, number: int) -> None:
        """Serve a whole room at once, unless it is blocked."""
        self.begin(number, is_early=False)
        self.chunk(number, last=True, handles=1, fault="", within=120.0)
        self.bench.run()
        for handle in self._open():
            handle.state = TransferState.DONE
        self.bench.run(0.05)

    @rule(name=NAMES, number=NUMBERS, peer=st.sampled_from("DES"), really=RARELY)
    def one(self, name: str, number: int, peer: str, really: bool) -> None:
        if really or name in ("poll", "announce"):
            self.action(name, number, peer)()

    @rule(name=NAMES, number=NUMBERS, peer=st.sampled_from("DES"), really=RARELY)
    def meanwhile(self, name: str, number: int, peer: str, really: bool) -> None:
        if really or name == "poll":
            self.interruptions.append(self.action(name, number, peer))

    def _open(self) -> list[Handle]:
        return [it for it in self.transport.under_way() if it.peer != STALLED]

    @precondition(lambda self: self._open())
    @rule(
        data=st.data(),
        state=st.sampled_from([*[TransferState.DONE] * 6, TransferState.ERROR, RuntimeError("x")]),
    )
    def settle(self, data: st.DataObject, state: TransferState | Exception) -> None:
        data.draw(st.sampled_from(self._open())).state = state

    @precondition(lambda self: self._open())
    @rule()
    def settle_all(self) -> None:
        for handle in self._open():
            handle.state = TransferState.DONE

    @rule()
    def one_step(self) -> None:
        self.bench.step()

    @rule(seconds=st.sampled_from([0.0, 0.001, *[0.05] * 6, 3.0, 61.0]))
    def run_for(self, seconds: float) -> None:
        """Run with the reader's clock ticking. Afterwards no chunk waits for a healthy peer without
        transfers in flight, however many transfers to others are stuck."""
        self.bench.run(seconds)
        busy = {it.peer for it in self.transport.handles if not it.releases}
        posted = set(self.transport.posts)
        for life in self.lives.values():
            for chunk in life.chunks if not life.room.is_stopped else ():
                for peer in chunk.peers:
                    assert (chunk, peer) in posted or peer in busy

    # ---- invariants ----

    @invariant()
    def nobody_is_misused(self) -> None:
        assert self.transport.misuse == []

    @invariant()
    def bounds(self) -> None:
        """Check the limits of transfers that are not late. A peer without a transfer may exceed the
        window by one."""
        under_way = {
            (it.chunk, it.peer)
            for it in self.transport.under_way()
            if not it.releases and it.chunk.deadline > self.bench.clock.now
        }
        a_peer = Counter(peer for _, peer in under_way)
        assert all(count <= QUOTA for count in a_peer.values())
        assert len(under_way) <= WINDOW + list(a_peer.values()).count(1)

    @invariant()
    def order_within_rooms(self) -> None:
        for life in self.lives.values():
            for peer in PEERS[life.number]:
                at = [life.chunks.index(c) for c, to in self.transport.posts
                      if c in life.chunks and to == peer]  # fmt: skip
                assert at == list(range(len(at)))

    @invariant()
    def complete_or_given_up(self) -> None:
        for life in self.lives.values():
            notes = sum(chunk in life.chunks for chunk in self.transport.completed)
            assert notes <= 1 and not (notes and life.room.reason)
            assert not life.room.delivered or notes

    def teardown(self) -> None:
        """Check that no entry is left, and no decode rank waits, once all settled and every room
        ended."""
        bench = self.bench
        self.interrupted()
        for _ in range(200):
            bench.let_doubt_pass()
            if not self.transport.under_way() and not bench.worker.tables()["waiting"]:
                break
            bench.settle()
        for life in self.lives.values():
            if life.has_last:
                assert bench.end(life.number) in ("delivered", "over"), "it never ends"
        for number in PEERS:
            self.abort(number)
            bench.run(1.0)
            self.poll(number)
        assert self.lives == {}
        bench.advance(121)  # rooms whose request never comes
        bench.check_empty()
        assert bench.run() is None
        assert [it for it in self.listings.values() if len(it.heard) != 1] == []
        self.ends.update(it.heard[0] for it in self.listings.values() if it.writers)


@pytest.mark.hazard(
    "chunks-overtake", "writers-confused", "source-given-away", "siblings-write-on", "slow-peer",
    "room-number-reused", "late-word-revives-room",
)  # fmt: skip
@pytest.mark.fuzz
def test_lives() -> None:
    """Guards against a room that is complete and given up, pages that are reused while they are
    read, decode ranks that are notified too early, twice or never, a room that waits for ever or
    for a stalled peer of another room, chunks out of order, and leftovers; and against lives with
    too few events."""
    Lives.ends.clear()
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=tries(60),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    for what in ("delivered", "over", "complete", "stopped"):
        assert Lives.ends[what] >= tries(60) / 6, Lives.ends

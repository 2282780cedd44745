"""Many concurrent rooms with random faults: no misplaced byte, no early end, no leftovers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from effort import tries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.nixl.manager import parse
from sglang.srt.disaggregation.delta.prefill.rooms import RoomState
from unit.delta.nixl.fakes import nixlRemoteDisconnectError
from unit.delta.nixl.prefill_rank import TRANSFER_TIMEOUT_S, PrefillRank
from unit.delta.nixl.sides import PAGE
from unit.delta.transfer.steps import failure_of

PEERS = ("a", "b", "c")


@dataclass(eq=False)
class Room:
    """One request, and its pages on either side."""

    number: int
    sender: Any
    source: list[int]
    #: Pages on each announcing decode rank, by name.
    target: dict[str, list[int]]
    prefix: int
    announced: list[str] = field(default_factory=list)
    sent: int = 0


class Life:
    """A prefill rank under load. Pages are reused as soon as SGLang would reuse them."""

    def __init__(self, rank: PrefillRank, seed: int) -> None:
        self.rank = rank
        self.random = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.rooms: list[Room] = []
        #: Rooms whose request has ended here, but whose pages decode holds until it is notified.
        self.held: dict[int, Room] = {}
        self.told: set[int] = set()
        self.free = list(range(40))
        self.free_there = {name: list(range(60)) for name in PEERS}
        self.made = 0
        self.ends: Counter[str] = Counter()

    # ---- events ----

    def new(self) -> None:
        """Add a request with filled source pages."""
        ranks = self.random.sample(PEERS, self.random.choice((1, 1, 2)))
        count = self.random.choice((0, 1, 2, 3, 5))
        prefix = self.random.randint(0 if count else 1, 2)
        if len(self.rooms) >= 12 or len(self.free) < count:
            return
        if any(len(self.free_there[name]) < count for name in ranks):
            return
        self.made += 1
        source = self.take(self.free, count)
        for _, buffer in self.rank.side.kv:
            buffer[source] = self.bytes.integers(0, 256, (count, buffer.shape[1]), np.uint8)
        target = {name: self.take(self.free_there[name], count) for name in ranks}
        sender = self.rank.sender(self.made)
        self.rooms.append(Room(self.made, sender, source, target, prefix))

    def take(self, free: list[int], count: int) -> list[int]:
        self.random.shuffle(free)
        taken = free[:count]
        del free[:count]
        return sorted(taken) if self.random.random() < 0.5 else taken

    def announce(self, room: Room) -> None:
        left = [name for name in room.target if name not in room.announced]
        if not left or left[0] not in self.rank.manager.decode_kv_args_table:
            return
        room.announced.append(left[0])
        self.rank.announce(
            room.number, room.target[left[0]], slot=1, peer=left[0], prefix=room.prefix * PAGE,
            of=len(room.target), in_note=room.number % 2 == 0,
        )  # fmt: skip

    def send(self, room: Room) -> None:
        """Send the next chunk as the scheduler does."""
        if room.sender.has_sent or room.sender.poll() != KVPoll.WaitingForInput:
            return
        if not hasattr(room.sender, "num_kv_indices"):
            room.sender.init(room.prefix + len(room.source), 3)
        left = len(room.source) - room.sent
        count = self.random.randint(1, left) if left else 0
        pages = room.source[room.sent : room.sent + count]
        room.sent += count
        room.sender.send(np.array(pages, np.int32))

    def settle(self) -> None:
        """Settle one transfer, mostly with success."""
        under_way = self.rank.agent.under_way()
        if under_way:
            state = self.random.choice(["DONE"] * 20 + ["ERR", RuntimeError("broken")])
            self.rank.agent.settle(self.random.choice(under_way), state)

    def fault(self) -> None:
        """Inject a fault."""
        agent, name = self.rank.agent, self.random.choice(PEERS)
        kind = self.random.choice(("lose", "forget", "call", "overdue"))
        if kind == "lose":
            agent.disconnect(name)
        elif kind == "forget":
            self.rank.manager.peers.forget(name)
        elif kind == "overdue":
            self.rank.tick(TRANSFER_TIMEOUT_S)
        else:
            call = self.random.choice(
                ("transfer", "initialize_xfer", "make_prepped_xfer", "send_notif",
                 "prep_xfer_dlist", "release_xfer_handle", "get_xfer_descs")
            )  # fmt: skip
            agent.script[call].append(
                self.random.choice((RuntimeError(call), nixlRemoteDisconnectError(call)))
            )

    def step(self) -> None:
        """Do one random step, and check all rooms."""
        room = self.random.choice(self.rooms) if self.rooms else None
        what = self.random.random()
        if what < 0.2 or room is None:
            self.new()
        elif what < 0.35:
            self.announce(room)
        elif what < 0.55:
            self.send(room)
        elif what < 0.7:
            self.rank.tick(self.random.choice((0.0, 0.001, 0.25)))
        elif what < 0.95:
            self.settle()
        elif what < 0.96:
            room.sender.abort()
        elif what < 0.97:
            self.rank.withdraw(room.number, next(iter(room.target)))
        elif what < 0.98:
            self.fault()
        else:
            for name in PEERS:  # an unknown decode rank is notified, and registers
                self.rank.register(name)
        self.look()

    # ---- checks ----

    def look(self) -> None:
        """Poll as the scheduler does; release the pages of ended rooms."""
        for room in list(self.rooms):
            state = room.sender.poll()
            assert state == room.sender.poll()
            if state == KVPoll.Success:
                self.end(room)
                room.sender.clear()
                self.ends["success"] += 1
            elif state == KVPoll.Failed:
                under_way = self.rank.agent.under_way(room=room.number)
                is_overdue = room.sender._room.state is RoomState.OVERDUE
                assert not under_way or is_overdue, f"room {room.number} ended early"
                self.ends["overdue" if under_way else "failed"] += 1
                assert self.notes(room.number) <= len(room.target) - 1, (
                    "decode would continue the request"
                )
                self.rooms.remove(room)
                self.free += room.source
                self.held[room.number] = room
                assert str(failure_of(room.sender))
        self.told |= {message.room for message in self.rank.sockets.stopped}
        self.rank.sockets.stopped.clear()
        for number, room in list(self.held.items()):
            if number in self.told or not room.announced:
                self.release(number)

    def notes(self, number: int) -> int:
        """Return the number of decode ranks that were notified that this room is complete."""
        return sum(
            any(parse(note).room == number for note in self.rank.agent.notes[name])
            for name in PEERS
        )

    def release(self, number: int) -> None:
        """Release decode's pages: it was notified that no more is written, or no write ever
        began."""
        for name, pages in self.held.pop(number).target.items():
            self.free_there[name] += pages

    def end(self, room: Room) -> None:
        """Check that every decode rank has all bytes and notes."""
        self.rooms.remove(room)
        assert not self.rank.agent.under_way(room=room.number)
        for name, pages in room.target.items():
            notes = [note for note in map(parse, self.rank.agent.notes[name])
                     if note.room == room.number]  # fmt: skip
            wanted = ["done"] if room.number % 2 == 0 else ["kv", "aux"]
            assert [note.kind for note in notes] == wanted
            if notes[0].kind == "done":
                ours = [bytes(buffer[3]) for _, buffer in self.rank.side.metadata]
                assert list(notes[0].metadata) == ours
            for (_, source), (_, theirs) in zip(
                self.rank.side.kv, self.rank.decode[name].kv, strict=True
            ):
                assert np.array_equal(theirs[pages], source[room.source])
            self.free_there[name] += pages
        self.free += room.source


@pytest.mark.hazard("source-given-away")
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(tries(5)))
def test_two_hundred_rooms(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Guards against faults of concurrent rooms only: pages reused while they are read or written,
    rooms that wait for each other, lost causes, and leftover entries."""
    rank = PrefillRank(monkeypatch, PEERS, queues=2, window=4, quota=2)
    life = Life(rank, seed)
    while life.made < 200:
        life.step()
    for script in rank.agent.script.values():
        script.clear()
    for _ in range(100):
        for name in PEERS:
            rank.register(name)
        for room in list(life.rooms):
            life.announce(room)
            life.send(room)
        rank.finish()
        life.look()
    assert life.rooms == [] and life.held == {}, "rooms never end"
    rank.check()
    assert sum(life.ends.values()) == 200 and life.ends["success"] > 60, life.ends
    assert life.ends["failed"] > 10, life.ends
    assert sorted(life.free) == list(range(40))
    assert all(sorted(free) == list(range(60)) for free in life.free_there.values())

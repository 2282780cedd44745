"""A scripted backend and room table that check what they are told, a worker on them, a clock."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import AsyncTransferStats
from sglang.srt.disaggregation.delta.prefill.room import Room
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, Settings, State
from sglang.srt.disaggregation.delta.prefill.transfer_worker import Worker
from unit.delta.fakes import Clock


@dataclass(frozen=True)
class Script:
    """The payload of a test's chunk: what the backend does with it."""

    #: Its place in the room, for the order.
    index: int = 0
    #: Handles that a post gives.
    handles: int = 1
    #: Raised after them.
    error: Exception | None = None
    #: Raised when its peers are told that the room is complete.
    complete_error: Exception | None = None


@dataclass(eq=False)
class Handle:
    """One transfer, which the test settles; ``state`` may also be an exception to raise."""

    room: int
    peer: str
    index: int
    state: State | Exception = State.IN_PROGRESS
    looks: int = 0
    releases: int = 0

    @property
    def over(self) -> bool:
        """Whether it has settled."""
        return self.state is not State.IN_PROGRESS


@dataclass
class ScriptedBackend:
    """Posts what the payload's ``Script`` says; refuses releases that are early or repeated."""

    handles: list[Handle] = field(default_factory=list)
    #: (room, index, peer), in order.
    posts: list[tuple[int, int, str]] = field(default_factory=list)
    #: Rooms whose peers were told that they are complete, in order.
    completed: list[int] = field(default_factory=list)
    #: Complaints about how it is used; they must be asserted empty, since workers swallow errors.
    misuse: list[str] = field(default_factory=list)
    #: By room, the thread that serves it.
    threads: dict[int, int] = field(default_factory=dict)

    def post(self, chunk: Chunk, peer: str) -> Iterator[Handle]:
        script: Script = chunk.payload
        self._check_thread(chunk.room)
        self.posts.append((chunk.room, script.index, peer))
        for _ in range(script.handles):
            handle = Handle(chunk.room, peer, script.index)
            self.handles.append(handle)
            yield handle
        if script.error is not None:
            raise script.error

    def complete(self, chunk: Chunk) -> None:
        script: Script = chunk.payload
        self._check_thread(chunk.room)
        if not chunk.is_last:
            self.misuse.append(f"room {chunk.room} is complete before its last chunk")
        if script.complete_error is not None:
            raise script.complete_error
        self.completed.append(chunk.room)

    def _check_thread(self, room: int) -> None:
        if self.threads.setdefault(room, threading.get_ident()) != threading.get_ident():
            self.misuse.append(f"room {room} is served by two threads")

    def state(self, handle: Handle) -> State:
        handle.looks += 1
        if handle.releases:
            self.misuse.append("looked at after its release")
        if isinstance(handle.state, Exception):
            raise handle.state
        return handle.state

    def release(self, handle: Handle) -> None:
        handle.releases += 1
        if handle.releases > 1 or not handle.over:
            self.misuse.append(f"release {handle.releases} in state {handle.state}")

    # ---- for tests ----

    def open_handles(self, room: int | None = None, peer: str | None = None) -> list[Handle]:
        """Handles that are under way."""
        return [
            handle
            for handle in self.handles
            if not handle.over and room in (None, handle.room) and peer in (None, handle.peer)
        ]

    def settle(self, room: int | None = None, state: State | Exception = State.DONE) -> None:
        """Everything under way (of ``room``) settles."""
        for handle in self.open_handles(room):
            handle.state = state

    @property
    def looks(self) -> int:
        """Questions about handles so far."""
        return sum(handle.looks for handle in self.handles)

    @property
    def released(self) -> int:
        """Handles released so far."""
        return sum(handle.releases for handle in self.handles)


@dataclass
class FakeRooms:
    """A room table that knows no states: it counts what is under way by number, from ``enter`` to
    ``leave``, and writes down what it is told."""

    stopped: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    misuse: list[str] = field(default_factory=list)
    backend: ScriptedBackend | None = None
    entries: list[tuple[Any, ...]] = field(default_factory=list)

    def enter(self, room: Room) -> bool:
        if room.number in self.stopped:
            return False
        self.busy.add(room.number)
        return True

    def complete(self, room: Room) -> bool:
        if room.number in self.stopped:
            return False
        self.completed.add(room.number)
        return True

    def take_back(self, room: int) -> None:
        self.completed.remove(room)

    def leave(self, room: int) -> None:
        if room not in self.busy:
            self.misuse.append(f"room {room} is left without having been entered")
        if self.backend is not None and self.backend.open_handles(room):
            self.misuse.append(f"room {room} is left while something is under way")
        self.busy.discard(room)

    def chunk_done(self, chunk: Chunk) -> None:
        self.entries.append(("done", chunk.room, chunk.payload.index))

    def room_failed(
        self, room: Room, reason: Reason, text: str, error: BaseException | None
    ) -> None:
        self.entries.append(("failed", room.number, reason, text, error))

    def room_overdue(self, room: int) -> None:
        self.entries.append(("overdue", room))

    def drained(self, room: int) -> None:
        """``WatchedWorker`` has nothing more to do for ``room``."""
        self.entries.append(("drained", room))

    def of(self, room: int) -> list[Any]:
        """What was told of ``room``: names of entries, with the index for chunks."""
        return [
            f"done {entry[2]}" if entry[0] == "done" else entry[0]
            for entry in self.entries
            if entry[1] == room
        ]

    def failure(self, room: int) -> tuple[Reason, str]:
        """The only failure of ``room``."""
        (entry,) = [entry for entry in self.entries if entry[:2] == ("failed", room)]
        return entry[2], entry[3]


class WatchedWorker(Worker):
    """Says when a room has ended on it and nothing of it is under way."""

    def __init__(self, backend: Any, rooms: Any, *arguments: Any) -> None:
        super().__init__(backend, rooms, *arguments)
        self._drained: set[Any] = set()

    def _say_if_overdue(self, room: Any) -> None:
        super()._say_if_overdue(room)
        if room.ended and not room.posted and not room.forgotten and room not in self._drained:
            self._drained.add(room)
            self._table.drained(room.number)  # type: ignore[attr-defined]


class Bench:
    """One worker with everything around it, and rooms whose chunks are numbered."""

    def __init__(self, **settings: int) -> None:
        self.clock = Clock()
        self.backend = ScriptedBackend()
        self.rooms = FakeRooms(backend=self.backend)
        self.stats = AsyncTransferStats(clock=self.clock)
        self.worker = WatchedWorker(
            self.backend, self.rooms, Settings(**settings), self.stats, 0, self.clock
        )
        self._indices: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        #: By number, the last that was opened.
        self.held: dict[int, Room] = {}

    def open(self, *numbers: int) -> None:
        """Requests begin."""
        for number in numbers:
            self.held[number] = Room(number)
            self.worker.open(self.held[number])

    def cancel(self, number: int, reason: Reason = Reason.ABORTED) -> None:
        """The room table has given the room up."""
        self.worker.cancel(self.held.get(number) or Room(number), reason)

    def forget(self, number: int) -> None:
        """The request of the room is done with."""
        self.worker.forget(self.held.get(number) or Room(number))

    def submit(
        self, room: int, *peers: str, last: bool = False, within: float = 120.0,
        to_nobody: bool = False, **script: Any,
    ) -> Chunk:  # fmt: skip
        """The next chunk of ``room``, for ``peers`` (one, "a", if none are named)."""
        chunk = Chunk(
            room,
            () if to_nobody else peers or ("a",),
            Script(index=next(self._indices[room]), **script),
            last,
            self.clock.now + within,
            self.clock.now,
        )
        self.worker.submit(chunk)
        return chunk

    def run(self, seconds: float = 0.0) -> float | None:
        """Step as a thread would for so long; then the pause that the last step asked for."""
        until = self.clock.now + seconds
        steps = 0
        while True:
            wait = self.worker.step(self.clock.now)
            steps += 1
            assert steps < 200_000, "the worker spins"
            if wait == 0.0:
                continue
            if wait is None or self.clock.now + wait > until:
                self.clock.now = until
                return wait
            self.clock.now += wait

    def settle(self, room: int | None = None, state: State | Exception = State.DONE) -> None:
        """Everything under way settles, and the worker has the time to notice."""
        self.backend.settle(room, state)
        self.run(0.5)

    def let_doubt_pass(self) -> None:
        """What the transport broke off counts as over."""
        self.run(Settings.doubt_s)

    def check(self) -> None:
        """Nobody was misused."""
        assert self.backend.misuse == [] and self.rooms.misuse == []

    def check_empty(self) -> None:
        """Nothing is left, and every handle was released once."""
        self.check()
        assert not any(self.worker.tables().values()), self.worker.tables()
        assert self.rooms.busy == set()
        assert Counter(handle.releases for handle in self.backend.handles) == Counter(
            {1: len(self.backend.handles)} if self.backend.handles else {}
        )

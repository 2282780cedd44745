"""A prefill rank without a transfer library: its room table, its decode ranks and SGLang's status
of each room (``Side``), and one worker over a scripted transport (``Bench``). Sockets record, and
the test advances the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from component.transfer import bare
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import TransferGauges
from sglang.srt.disaggregation.delta.prefill.decode_ranks import DecodeRanks
from sglang.srt.disaggregation.delta.prefill.rooms import Room, RoomState, RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Chunk,
    TransferSettings,
    TransferState,
)
from sglang.srt.disaggregation.delta.prefill.transfer_worker import Worker
from unit.delta.fakes import Clock, Sockets, announcement

ROOM, PORT = 7, 4000
ERROR = ZeroDivisionError("the transport's")


class Side:
    """A rank with the registered decode ranks D and E; each listens at a host of its own name."""

    def __init__(self, sockets: Any = None, **options: Any) -> None:
        self.clock, self.manager = Clock(), bare.prefill("nixl", attn_tp_rank=3)
        #: ``wire.PeerSockets`` as argument: real sockets.
        self.sockets = sockets or Sockets()
        self.table = RoomTable(self.manager.statuses, self.clock, **options)
        self.manager.rooms = self.table
        with pytest.MonkeyPatch.context() as patch:
            if sockets is not wire.PeerSockets:
                patch.setattr(wire, "PeerSockets", lambda clock: self.sockets)
            known, writer = self.manager.decode_kv_args_table, self.manager.rank.writer_id
            self.ranks = self.manager.decode_ranks = DecodeRanks(
                self.table, known, writer, self.clock
            )
        self.table.on_drained = self.ranks.tell
        #: The current request by room number.
        self.requests: dict[int, Room] = {}
        for peer in "DE":
            self.register(peer)

    def register(self, peer: str, host: str = "") -> None:
        registered = SimpleNamespace(endpoint=host or peer, dst_port=PORT)
        self.manager.decode_kv_args_table[peer] = registered

    def announce(self, room: int = ROOM, peer: str = "D", of: int = 1, **fields: Any) -> bool:
        """Announce a room as a decode rank does; ``of``: number of announcing ranks."""
        return self.table.announce(room, peer, announcement(room, **{"host": peer} | fields), of)

    def claim(self, room: int = ROOM) -> str | None:
        """Add a request as ``DeltaSender`` does; return the reason for its refusal, or None."""
        self.manager.update_status(room, KVPoll.Bootstrapping)
        claimed = self.table.claim(room)
        if claimed.reason is not None:
            assert claimed.is_stopped and claimed.is_over and not claimed.delivered
        first = self.requests.get(room)
        if first is None or self.table.room(room) is not first:
            self.requests[room] = claimed
        else:
            self.table.forget(claimed)
        return claimed.reason

    def withdraw(self, peer: str = "D", room: int = ROOM, **fields: Any) -> None:
        """Withdraw a room as a decode rank does."""
        fields = {"host": peer, "port": PORT, "reason": "bored"} | fields
        self.ranks.take(wire.Withdraw(room, peer, **fields))

    def ping(self, peer: str = "D", **fields: float) -> None:
        """Take a decode rank's ping."""
        self.ranks.take(wire.Ping("a:1", peer, peer, PORT, **fields))

    def enter(self, room: int = ROOM) -> bool:
        """True if a worker may post a write."""
        return self.table.enter(self.requests.get(room) or Room(room))

    def fail(self, room: int = ROOM, kind: Reason = Reason.ABORTED, text: str = "aborted") -> bool:
        found = self.table.room(room)
        if found is None:
            self.table.withdraw(room, text)
        return found is None or self.table.fail(found, kind, text)

    def forget(self, room: int = ROOM) -> None:
        """End a room's request."""
        if room in self.requests:
            self.table.forget(self.requests[room])

    def status(self, room: int = ROOM) -> KVPoll | None:
        return self.manager.request_status.get(room)

    def end(self, number: int = ROOM) -> str:
        """Return the outcome of the request as the scheduler sees it."""
        room = self.requests.get(number) or Room(number)
        if room.delivered:
            assert not room.is_stopped or room.state is RoomState.ENDED
            assert self.status(number) in (KVPoll.Success, None)
            return "delivered"
        return "over" if room.is_over else "stopped" if room.is_stopped else "open"

    def told(self) -> list[tuple[str, int, str]]:
        """Return host, room and reason of each `Stopped` message since the last call."""
        stopped = [sent for sent in self.sockets.take() if isinstance(sent[2], wire.Stopped)]
        assert {(port, it.writer) for _, port, it in stopped} <= {(PORT, 3)}
        return [(host, it.room, it.reason) for host, _, it in stopped]

    def advance(self, seconds: float) -> list[str]:
        """Advance the clock, with regular ticks of the reader; return the decode ranks to drop."""
        silent: list[str] = []
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(self.clock.now + 1, end)
            silent += self.ranks.tick()
        return silent


@dataclass(frozen=True)
class Script:
    """The payload of a test's chunk: the transport's behaviour with it."""

    #: Number of handles that a post returns.
    handles: int = 1
    #: Raised after the handles.
    error: Exception | None = None
    #: Raised when the peers are notified that the room is complete.
    complete_error: Exception | None = None


@dataclass(eq=False)
class Handle:
    """One transfer, which the test settles; ``state`` may also be an exception to raise."""

    chunk: Chunk
    peer: str
    state: TransferState | Exception = TransferState.IN_PROGRESS
    looks: int = 0
    releases: int = 0

    @property
    def over(self) -> bool:
        """True if the transfer has settled."""
        return self.state is not TransferState.IN_PROGRESS


@dataclass
class Transport:
    """Posts as the payload's ``Script`` says; refuses releases that are early or repeated."""

    handles: list[Handle] = field(default_factory=list)
    #: Chunks with their peers, in order.
    posts: list[tuple[Chunk, str]] = field(default_factory=list)
    #: Last chunks of rooms whose peers were notified of completion, in order.
    completed: list[Chunk] = field(default_factory=list)
    #: Misuse, which tests must assert to be empty because workers swallow errors.
    misuse: list[str] = field(default_factory=list)
    #: Called while a worker is in a call, in place of other threads.
    meanwhile: Callable[[], None] = lambda: None

    def post(self, chunk: Chunk, peer: str) -> Iterator[Handle]:
        self.posts.append((chunk, peer))
        for _ in range(chunk.payload.handles):
            self.meanwhile()
            handle = Handle(chunk, peer)
            self.handles.append(handle)
            yield handle
        if chunk.payload.error is not None:
            raise chunk.payload.error

    def complete(self, chunk: Chunk) -> None:
        if not chunk.is_last:
            self.misuse.append(f"room {chunk.room} is complete before its last chunk")
        if chunk.payload.complete_error is not None:
            raise chunk.payload.complete_error
        self.completed.append(chunk)
        self.meanwhile()

    def state(self, handle: Handle) -> TransferState:
        handle.looks += 1
        if handle.releases:
            self.misuse.append("checked after its release")
        if isinstance(handle.state, Exception):
            raise handle.state
        return handle.state

    def release(self, handle: Handle) -> None:
        handle.releases += 1
        if handle.releases > 1 or not handle.over:
            self.misuse.append(f"release {handle.releases} in state {handle.state}")

    def under_way(self, room: int | None = None, peer: str | None = None) -> list[Handle]:
        return [
            it
            for it in self.handles
            if not it.over and room in (None, it.chunk.room) and peer in (None, it.peer)
        ]

    def settle(
        self, room: int | None = None, state: TransferState | Exception = TransferState.DONE
    ) -> None:
        """Settle all transfers in flight (of ``room``)."""
        for handle in self.under_way(room):
            handle.state = state

    @property
    def looks(self) -> int:
        """Number of state checks of handles."""
        return sum(handle.looks for handle in self.handles)

    @property
    def released(self) -> int:
        """Number of released handles."""
        return sum(handle.releases for handle in self.handles)


class Bench(Side):
    """A rank with one worker. Other threads' commands wait until the worker's next step."""

    def __init__(self, sockets: Any = None, **settings: int) -> None:
        super().__init__(sockets)
        self.transport = Transport()
        self.gauges = TransferGauges()
        self.worker = Worker(
            self.transport, self.table, TransferSettings(**settings), self.gauges, 0, self.clock
        )
        self._commands: deque[Callable[[], None]] = deque()
        self.table.on_stopped = lambda room, kind: self._commands.append(
            lambda: self.worker.cancel(room)
        )

    def open(self, *numbers: int, peers: str | list[str] = "D") -> None:
        """Begin requests that their decode ranks have announced."""
        for number in numbers:
            for peer in peers:
                self.announce(number, peer, len(peers))
            self.take(number)

    def take(self, number: int) -> str | None:
        """Begin a request; return the reason for its refusal, or None."""
        refused = self.claim(number)
        if refused is None:
            room = self.requests[number]
            self._commands.append(lambda: self.worker.open(room))
        return refused

    def submit(
        self, number: int, *, last: bool = False, within: float = 120.0, **script: Any
    ) -> Chunk:
        """Submit the next chunk of a room, for all its decode ranks."""
        peers = tuple(self.requests[number].announcements)
        now = self.clock.now
        chunk = Chunk(number, peers, Script(**script), last, now + within, now)
        self._commands.append(lambda: self.worker.submit(chunk))
        return chunk

    def forget(self, room: int = ROOM) -> None:
        gone = self.requests[room]
        self._commands.append(lambda: self.worker.forget(gone))
        super().forget(room)

    def step(self) -> float | None:
        """Run one step of the worker's thread; return the pause that it requests."""
        while self._commands:
            self._commands.popleft()()
        return self.worker.step(self.clock.now)

    def run(self, seconds: float = 0.0) -> float | None:
        """Step as a thread would for ``seconds``; return the pause that the last step requests."""
        until = self.clock.now + seconds
        for _ in range(200_000):
            wait = self.step()
            if wait == 0.0 or self._commands:
                continue
            if wait is None or self.clock.now + wait > until:
                self.advance(until - self.clock.now)
                return wait
            self.advance(wait)
        raise AssertionError("the worker spins")

    def settle(
        self, room: int | None = None, state: TransferState | Exception = TransferState.DONE
    ) -> None:
        """Settle all transfers in flight, and give the worker time to notice."""
        self.transport.settle(room, state)
        self.run(0.5)

    def let_doubt_pass(self) -> None:
        """Wait until broken transfers count as over."""
        self.run(TransferSettings.doubt_s)

    def check_empty(self) -> None:
        """Assert that no entry is left after all requests, and that every handle was released
        once."""
        self.run(1.0)
        assert self.transport.misuse == []
        assert not any(self.worker.tables().values()), self.worker.tables()
        assert self.table.all() == []
        assert {handle.releases for handle in self.transport.handles} <= {1}

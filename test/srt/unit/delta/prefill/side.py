"""A prefill rank without a transfer library: its room table, its decode ranks and SGLang's status
of each room, with sockets that record and a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.decode_ranks import DecodeRanks
from sglang.srt.disaggregation.delta.prefill.room import Room
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk
from unit.delta.fakes import Clock, Manager, Sockets, announcement

ROOM, PORT = 7, 4000
ERROR = ZeroDivisionError("the transport's")


class Side:
    """Decode ranks D and E are registered; each listens at a host of its own name."""

    def __init__(self, **options: Any) -> None:
        self.clock, self.manager = Clock(), Manager()
        self.manager.attn_tp_rank = 3
        self.table = self.manager.rooms = RoomTable(self.manager, self.clock, **options)
        self.ranks = self.manager.decode_ranks = DecodeRanks(self.manager, self.table, self.clock)
        self.sockets = Sockets()
        self.ranks._sockets = self.ranks._strangers = self.sockets  # type: ignore[assignment]
        self.requests: dict[int, Room] = {}
        for peer in "DE":
            self.register(peer)

    def register(self, peer: str, host: str = "") -> None:
        registered = SimpleNamespace(endpoint=host or peer, dst_port=PORT)
        self.manager.decode_kv_args_table[peer] = registered

    def announce(self, room: int = ROOM, peer: str = "D", of: int = 1, **fields: Any) -> bool:
        """A decode rank announces a room; ``of``: how many will."""
        return self.table.announce(room, peer, announcement(room, **{"host": peer} | fields), of)

    def claim(self, room: int = ROOM) -> str | None:
        """A request comes, as ``DeltaSender`` takes it; why it was refused."""
        self.manager.update_status(room, KVPoll.Bootstrapping)
        claimed, refused = self.table.claim(room)
        if refused is not None:
            assert self.table.fail(room, Reason.ABORTED, refused, meant=claimed)
            assert claimed.is_stopped and claimed.is_over and not claimed.delivered
        if refused is None or self.table.room(room) is claimed:
            self.requests[room] = claimed
        return refused

    def withdraw(self, peer: str = "D", room: int = ROOM, **fields: Any) -> None:
        """A decode rank gives a room up."""
        fields = {"host": peer, "port": PORT, "reason": "bored"} | fields
        self.ranks.take(wire.Withdraw(room, peer, **fields))

    def ping(self, peer: str = "D") -> None:
        """A sign of life."""
        self.ranks.take(wire.Ping("a:1", peer, peer, PORT))

    def enter(self, room: int = ROOM) -> bool:
        """Whether a worker may post a write."""
        return self.table.enter(self.requests.get(room) or Room(room))

    def complete(self, room: int = ROOM) -> bool:
        """Whether a worker may tell decode that all has landed."""
        return self.table.complete(self.requests.get(room) or Room(room))

    def last(self, room: int = ROOM) -> None:
        """A worker says that the room's last chunk is with all its peers."""
        self.table.chunk_done(Chunk(room, (), None, True, 0.0, 0.0))

    def fail(self, room: int = ROOM, kind: Reason = Reason.ABORTED, text: str = "aborted") -> bool:
        return self.table.fail(room, kind, text)

    def forget(self, room: int = ROOM) -> None:
        """The request of a room is done with."""
        if room in self.requests:
            self.table.forget(self.requests[room])
            self.manager.forget_status(room)

    def status(self, room: int = ROOM) -> KVPoll | None:
        return self.manager.request_status.get(room)

    def told(self) -> list[tuple[str, int, str]]:
        """Which hosts were told of which room, and why, since the last look."""
        stopped = [sent for sent in self.sockets.take() if isinstance(sent[2], wire.Stopped)]
        assert {(port, it.writer) for _, port, it in stopped} <= {(PORT, 3)}
        return [(host, it.room, it.reason) for host, _, it in stopped]

    def advance(self, seconds: float, *, turns: bool = True) -> list[str]:
        """Time passes, with the reader's clock ticking as it should, and the scheduler's turns with
        it unless it is busy with one thing; the decode ranks to drop."""
        silent: list[str] = []
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(self.clock.now + 1, end)
            if turns:
                self.table.scheduler_time.turn()
            silent += self.ranks.tick()
        return silent

"""A prefill rank of each backend as its scheduler and its decode rank see it: real senders and
messages, and a transfer library that copies between numpy arrays when the test settles a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition
from typing import Any

import pytest

from component.transfer import bare
from component.transfer.messages import MOONCAKE
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.mooncake import conn as mooncake
from sglang.srt.disaggregation.delta.nixl.manager import parse
from sglang.srt.disaggregation.mooncake import conn
from unit.delta.fakes import Clock
from unit.delta.nixl.prefill_rank import ADDRESS, DOUBT_S, PrefillRank, without_threads
from unit.delta.nixl.sides import Side


class NixlRank(PrefillRank):
    """Over NIXL: a chunk's writes are in flight at the same time."""

    peer = "decode"
    #: Decode's messages about a failed or late write: one, when no byte can land any more.
    messages_of_a_late_write = ["stopped"]

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self._heard: dict[int, list[str]] = {}

    def heard(self, room: int) -> list[str]:
        """Return the messages to the decode rank about a room since it was announced, in order."""
        heard = self._heard.setdefault(room, [])
        notes = [parse(note) for note in self.agent.notes["decode"]]
        if any(note.room == room and note.kind in ("aux", "done") for note in notes):
            heard.append("complete")
            self.agent.notes["decode"] = []
        for message in [stopped for stopped in self.sockets.stopped if stopped.room == room]:
            heard.append("stopped")
            self.sockets.stopped.remove(message)
        return heard

    @property
    def writes(self) -> list[Any]:
        """All writes that were begun, each with a ``state``."""
        return self.agent.handles

    def under_way(self) -> list[Any]:
        return self.agent.under_way()

    def lose(self) -> None:
        """Make the library report that the decode rank disconnected."""
        self.agent.disconnect("decode")

    def forget(self) -> None:
        """Forget the decode rank, as after too long a silence."""
        self.manager.forget_peer(self.peer)

    def clear(self, sender: Any) -> None:
        """End the request and forget its writes."""
        sender.clear()
        self.check()
        self.agent.handles.clear()
        self._heard.clear()

    def close(self) -> None:
        """Do nothing: no thread was started."""


@dataclass(eq=False)
class Call:
    """One call of Mooncake's engine."""

    room: int
    rows: list[tuple[int, int, int]]
    #: None while the call is in flight.
    state: str | Exception | None = None


class Engine:
    """Mooncake's engine: a call returns when the test settles it."""

    def __init__(self, source: Side, target: Side) -> None:
        self._source, self.target = source.memory, target.memory
        self.calls: list[Call] = []
        self.room = 0
        self.changed = Condition()

    def batch_transfer_sync(self, session: str, *rows: list[int]) -> int:
        call = Call(self.room, list(zip(*rows, strict=True)))
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: call.state is not None, 60)
        if isinstance(call.state, Exception):
            raise call.state
        if call.state != "DONE":
            return -1
        for source, target, length in call.rows:
            self.target.at(target, length)[:] = self._source.at(source, length)
        return 0


class Callers(ThreadPoolExecutor):
    """The only thread that calls the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(1)
        self._engine, self._open = engine, set[Future[Any]]()

    def submit(self, line: Any, send: Any, part: Any, to: Any, *arguments: Any) -> Future[Any]:
        def call() -> Any:
            self._engine.room = to.room
            return send(part, to, *arguments)

        future = super().submit(call)
        self._open.add(future)
        future.add_done_callback(self._done)
        return future

    def replace_if_hanging(self, future: Future[Any]) -> None:
        """Do nothing: no call hangs here."""

    def _done(self, future: Future[Any]) -> None:
        with self._engine.changed:
            self._open.discard(future)
            self._engine.changed.notify_all()

    @property
    def is_idle(self) -> bool:
        return not self._open


class Sockets(bare.Sockets):
    """Records messages to decode: room complete, room failed (SGLang's message), or stopped."""

    def __init__(self, is_written: Callable[[int], bool]) -> None:
        super().__init__()
        self._is_written = is_written
        self.heard: dict[int, list[str]] = {}
        self.misuse: list[str] = []

    def send(self, host: str, port: int, message: Any) -> None:
        if isinstance(message, wire.Stopped):
            self._hear(message.room, "stopped")

    def send_frames(self, host: str, port: int, frames: list[bytes]) -> None:
        room, status, _ = map(int, frames)
        self._hear(room, "complete" if status == KVPoll.Success else "failed")

    def _hear(self, room: int, message: str) -> None:
        self.heard.setdefault(room, []).append(message)
        if message != "failed" and self._is_written(room):
            self.misuse.append(f"{message} while room {room} is written")


class MooncakeRank:
    """Over Mooncake: one call of the engine is in flight at a time, on the rank's thread."""

    messages_of_a_late_write = ["failed", "stopped"]
    peer = MOONCAKE.peer

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.side, decode_side = Side(2**40, 40), Side(2**41, 60)
        self.decode = {"decode": decode_side}
        self.engine = Engine(self.side, decode_side)
        without_threads(patch, self.clock)
        self._callers = Callers(self.engine)

        def callers(threads: int, at_once: int, spare: int) -> Callers:
            self.calls_at_once = threads, at_once
            return self._callers

        patch.setattr(mooncake, "Callers", callers)
        self.sockets = Sockets(lambda room: any(call.room == room for call in self.under_way()))
        for side in (self.side, decode_side):
            side.args.__dict__.update(state_data_ptrs=[], state_item_lens=[], state_type="none")
        self.manager: Any = bare.prefill(
            "mooncake",
            self.sockets,
            engine=self.engine,
            kv_args=self.side.args,
            enable_custom_mem_pool=False,
        )
        # The test's thread is the reader's thread.
        self.manager.start_reader = lambda take, tick: self.__dict__.update(_take=take)
        self.manager.start_prefill_thread()
        self.pool = self.manager.transfers
        self.register("decode")

    def register(self, name: str, port: bytes = b"4000") -> None:
        args = self.decode[name].args
        message = MOONCAKE.registration(
            item=args.kv_item_lens[0], kv=args.kv_data_ptrs, aux=args.aux_data_ptrs
        )
        message[2] = port
        self._take(message)

    def restart(self) -> Side:
        """Restart the decode server: its engine keeps the address, everything else is new. Return
        its memory, after it has registered."""
        new = self.decode["decode"] = Side(2**42, 60)
        self.engine.target = new.memory
        self.register("decode", port=b"4999")
        return new

    def sender(self, room: int) -> Any:
        return conn.MooncakeKVSender(self.manager, ADDRESS, room, [0], 0)

    def announce(self, room: int, pages: Sequence[int], slot: int = 0, prefix: int = 0) -> None:
        self._take(
            MOONCAKE.announcement(
                room, tuple(pages), slot=str(slot).encode(), decode_prefix_len=prefix
            )
        )

    def withdraw(self, room: int) -> None:
        message = wire.Withdraw(room, MOONCAKE.peer, "10.0.0.2", 4000, "no reason")
        self.manager.decode_ranks.take(message)

    def forget(self) -> None:
        self.manager.forget_peer(self.peer)

    lose = forget  # the engine reports a lost rank only by refusing calls

    def tick(self, seconds: float) -> None:
        self.clock.now += seconds
        self.manager.rooms.tick()  # otherwise the time would count as a suspension
        self.pool.run()
        self._wait()

    def _wait(self) -> None:
        """Wait until the threads are in a call of the engine, or idle."""
        with self.engine.changed:
            assert self.engine.changed.wait_for(
                lambda: self.under_way() or self._callers.is_idle, 60
            )

    @property
    def writes(self) -> list[Call]:
        return self.engine.calls

    def under_way(self) -> list[Call]:
        return [call for call in self.engine.calls if call.state is None]

    def settle(self, state: str | Exception = "DONE") -> None:
        with self.engine.changed:
            for call in self.under_way():
                call.state = state
            self.engine.changed.notify_all()
        self._wait()

    def finish(self) -> None:
        for _ in range(20):
            self.tick(0.25)
            self.settle()
        self.tick(DOUBT_S)

    def heard(self, room: int) -> list[str]:
        return self.sockets.heard.setdefault(room, [])

    def check(self) -> None:
        self.tick(DOUBT_S)
        tables = {**self.manager.open_rooms(), **self.pool.tables()}
        leftovers = {name: rooms for name, rooms in tables.items() if rooms}
        assert leftovers == {} and self.manager.rooms.all() == []
        assert self.sockets.misuse == []

    def clear(self, sender: Any) -> None:
        sender.clear()
        self.check()
        self.engine.calls.clear()
        self.sockets.heard.clear()

    def close(self) -> None:
        """Settle all writes, so that no thread stays."""
        while self.under_way():
            self.settle()
        self._callers.shutdown()


RANKS = {"nixl": NixlRank, "mooncake": MooncakeRank}

"""A whole prefill rank without an engine: SGLang's manager and senders as patched, the transfer
pool with its workers stepped by the test, and an agent of numpy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from component.transfer import bare
from sglang.srt.disaggregation.delta import manager, wire
from sglang.srt.disaggregation.delta.nixl import backend as backend_module
from sglang.srt.disaggregation.delta.prefill import scheduler
from sglang.srt.disaggregation.delta.prefill.rooms import RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferSettings
from sglang.srt.disaggregation.delta.prefill.transfer_pool import TransferPool
from sglang.srt.disaggregation.nixl import conn
from unit.delta.fakes import Clock
from unit.delta.nixl.fakes import FakeAgent
from unit.delta.nixl.sides import FROM, Side

ADDRESS = "10.0.0.1:8998"
TRANSFER_TIMEOUT_S = 10.0
#: Time until a broken transfer counts as over; shorter than a chunk's timeout, so that waiting for
#: the former does not end the latter.
DOUBT_S = 5.0


class Steps(TransferPool):
    """A pool whose threads are not started: the test runs their loops."""

    def start(self) -> None:
        pass

    def run(self) -> None:
        """Run all work that is due now."""
        for each in self._threads:
            each._obey(0.0)
            while each._step() == 0.0:
                each._obey(0.0)
            each._obey(0.0)

    def tables(self) -> dict[str, int]:
        """Return the sizes of all workers' tables, summed."""
        found: dict[str, int] = {}
        for each in self._threads:
            for name, size in each._worker.tables().items():
                found[name] = found.get(name, 0) + size
        return found


class Sockets:
    """Records messages to decode ranks; reports one that is told too early that no more is
    written."""

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.stopped: list[wire.Stopped] = []
        self.misuse: list[str] = []

    def send(self, host: str, port: int, message: Any) -> None:
        if isinstance(message, wire.Stopped):
            self.stopped.append(message)
            if self.agent.under_way(room=message.room):
                self.misuse.append(f"{message} while a write is in flight")


def without_threads(patch: pytest.MonkeyPatch, clock: Clock, **limits: int) -> None:
    """Make later managers have a pool whose threads are not started."""
    patch.setenv("SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT", str(TRANSFER_TIMEOUT_S))
    patch.setattr(manager, "TransferPool", functools.partial(Steps, clock=clock))
    patch.setattr(manager, "RoomTable", functools.partial(RoomTable, clock=clock))
    settings = TransferSettings(doubt_s=DOUBT_S, **limits)
    patch.setattr(manager, "TransferSettings", SimpleNamespace(read=lambda: settings))
    patch.setattr(manager.atexit, "register", lambda *_: None)
    patch.setattr(scheduler, "time", SimpleNamespace(monotonic=clock))


class PrefillRank:
    """One prefill rank and the decode ranks ``peers``, which share one layout."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        peers: Sequence[str] = ("decode",),
        prefill_side: Side | None = None,
        decode_side: Side | None = None,
        stages: int = 1,
        **limits: int,
    ) -> None:
        self.clock = Clock()
        self.side = prefill_side or Side(2**40, 40)
        self.decode = {
            name: decode_side or Side(2**41 + 2**30 * n, 60) for n, name in enumerate(peers)
        }
        memories = {name: side.memory for name, side in self.decode.items()}
        self.agent = FakeAgent({"": self.side.memory, **memories})
        without_threads(patch, self.clock, **limits)
        self.sockets = Sockets(self.agent)
        self.manager: Any = bare.prefill(
            "nixl",
            self.sockets,
            agent=self.agent,
            kv_args=self.side.args,
            is_mla_backend=self.side.is_mla,
            attn_tp_size=self.side.size,
            attn_tp_rank=self.side.rank,
            pp_size=stages,
        )
        patch.setattr(
            backend_module, "read_memory", lambda *where: self.side.memory.at(*where).tobytes()
        )
        self.manager.start_transfers()
        self.pool: Steps = self.manager.transfers
        self._label_handles(self.pool.backend)
        #: Takes a message of a decode rank.
        self.take = self.manager.announcements().take
        for name in peers:
            self.register(name)

    def _label_handles(self, backend: Any) -> None:
        """Label the agent's handles with their room before they are posted."""
        post = backend.post

        def labelled(chunk: Any, peer: str) -> Iterator[Any]:
            for posted in post(chunk, peer):
                posted.handle.room = chunk.room
                yield posted

        backend.post = labelled

    def register(self, name: str, **own: Any) -> None:
        """Register a decode rank with its pools; ``own``: as in ``Side.registration``."""
        self.take(self.decode[name].registration(name, **own))

    def sender(self, room: int) -> Any:
        """Return the sender of a request of ``room`` that reaches this rank."""
        return conn.NixlKVSender(self.manager, ADDRESS, room, [0], 0)

    def announce(
        self, room: int, pages: Sequence[int], slot: int = 0, peer: str = "decode", prefix: int = 0,
        of: int = 1, in_note: bool = False, state: Sequence[int] = (), is_stock: bool = False,
        prompt_tokens: int = 0,
    ) -> None:  # fmt: skip
        """Announce a decode rank's pages, and those of ``state``; ``of``: number of announcing
        ranks; ``in_note``: the rank accepts metadata in a note; ``prompt_tokens``: 0 if not
        stated."""
        listed, states = (np.array(each, np.int32).tobytes() for each in (pages, state))
        texts = [str(number).encode() for number in (room, slot, of)]
        frames = [conn.GUARD, texts[0], *FROM, peer.encode(), listed, *texts[1:], states]
        frame = wire.DeltaFrame(
            decode_prefix_len=prefix,
            num_pages=len(pages),
            is_dummy=False,
            pool_pages=self.decode[peer].slots,
            metadata_slots=5,
            takes_metadata=in_note,
            prompt_tokens=prompt_tokens,
        )
        self.take(frames if is_stock else [*frames, wire.encode_frame(frame)])

    def withdraw(self, room: int, peer: str = "decode") -> None:
        """Withdraw the room as decode does."""
        self.manager.decode_ranks.take(wire.Withdraw(room, peer, "10.0.0.2", 4000, "no reason"))

    def tick(self, seconds: float) -> None:
        """Advance the clock, and let the workers do the due work."""
        self.clock.now += seconds
        self.manager.rooms.tick()  # otherwise the time would count as a suspension
        self.pool.run()

    def settle(self, state: str | Exception = "DONE", room: int | None = None) -> None:
        """Settle all transfers in flight; the workers notice at their next check."""
        for handle in self.agent.under_way(room=room):
            self.agent.settle(handle, state)

    def finish(self) -> None:
        """Post and settle all transfers, including broken ones."""
        for _ in range(100):
            self.tick(0.25)
            if not self.agent.under_way():
                self.tick(0.25)
                self.tick(DOUBT_S)
                if not self.agent.under_way():
                    return
            self.settle()
        raise AssertionError("transfers never end")

    def leftovers(self) -> dict[str, Any]:
        """Return the entries that no room may leave behind."""
        tables = {**self.manager.open_rooms(), **self.pool.tables()}
        tables["users"] = sum(map(self._users, list(self.manager.decode_kv_args_table)))
        return {name: rooms for name, rooms in tables.items() if rooms}

    def _users(self, name: str) -> int:
        """Return the number of transfers that hold a decode rank."""
        peer = self.manager.peers.hold(name)
        self.manager.peers.release(peer)
        return int(peer.users)

    def check(self) -> None:
        """Assert that no entry is left once broken transfers are over, and that there was no
        misuse."""
        self.tick(DOUBT_S)
        assert self.leftovers() == {}, self.leftovers()
        self.agent.check()
        assert self.sockets.misuse == []

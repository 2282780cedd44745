"""The arm ``bare`` over Mooncake: one synchronous batch write a room, lists made beforehand.

The engine's write blocks until it is done, so that each room is given to a small pool of threads;
SGLang has four queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from benchmark.kv_transfer.bare_nixl import rows
from benchmark.kv_transfer.patterns import Pages, RoomPlan, merged
from benchmark.kv_transfer.pool import Pool
from benchmark.kv_transfer.probe import Probe
from benchmark.kv_transfer.records import Peer, Setup

_HOST = "127.0.0.1"
_THREADS = 4


def _make_engine(pool: Pool) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    # MC_FORCE_TCP, which the process is started with, overrides the protocol.
    if engine.initialize(_HOST, "P2PHANDSHAKE", "rdma", "") != 0:
        raise RuntimeError("Mooncake's engine does not start")
    lengths = [buffer.nbytes for buffer in pool.buffers]
    if engine.batch_register_memory(pool.bases, lengths) != 0:
        raise RuntimeError("Mooncake's engine does not register the pool")
    return engine


class Prefill:
    """Writes what was prepared."""

    def __init__(self, setup: Setup, pool: Pool, probe: Probe) -> None:
        self._pool = pool
        self._engine = _make_engine(pool)
        self._threads = ThreadPoolExecutor(_THREADS)
        self._peers: Sequence[Peer] = ()
        # SGLang's name for the call, which the probe knows.
        self.batch_transfer_sync = self._engine.batch_transfer_sync_write
        probe.watch_mooncake(self, pool.holds)

    def connect(self, peers: Sequence[Peer]) -> None:
        """Remember their sessions."""
        self._peers = peers

    def sender(self, plan: RoomPlan) -> Sender:
        """A room, prepared."""
        peer, pool = self._peers[plan.peer], self._pool
        sources, destinations, lengths = merged(plan.source, plan.destination)
        from_ = rows(pool.bases, pool.item_len, sources, lengths)
        to = rows(peer.bases, pool.item_len, destinations, lengths)
        columns = (from_[:, 0].tolist(), to[:, 0].tolist(), from_[:, 1].tolist())
        return Sender(self, (peer.name, *columns))

    def write(self, arguments: tuple[Any, ...]) -> Future[int]:
        """Start one write."""
        return self._threads.submit(self.batch_transfer_sync, *arguments)

    def step(self) -> None:
        """Nothing."""


class Sender:
    """One prepared write."""

    error = ""

    def __init__(self, prefill: Prefill, arguments: tuple[Any, ...]) -> None:
        self._prefill, self._arguments = prefill, arguments
        self._future: Future[int] | None = None

    def ready(self) -> bool:
        """It is when it was made."""
        return True

    def start(self) -> None:
        """Nothing."""

    def send(self, pages: Pages) -> None:
        """Hand the whole room to a thread, whatever its chunks are."""
        if self._future is not None:
            return
        self._future = self._prefill.write(self._arguments)

    def poll(self) -> str | None:
        """``done``, ``failed``, or None while it is under way."""
        if self._future is None or not self._future.done():
            return None
        return "done" if self._future.result() == 0 else "failed"

    def close(self, outcome: str) -> None:
        """Nothing."""


class Decode:
    """Memory to write to; Mooncake does not tell it of arrivals."""

    def __init__(self, setup: Setup, pool: Pool) -> None:
        self._pool = pool
        self._engine = _make_engine(pool)

    def describe(self, pid: int) -> Peer:
        """Its session, and where its buffers are."""
        name = f"{_HOST}:{self._engine.get_rpc_port()}"
        return Peer(name, pid, bases=tuple(self._pool.bases))

    def announce(self, plan: RoomPlan) -> None:
        """Nothing: prefill has the plan."""

    def poll(self, room: int) -> str | None:
        """Unknown; not waited for."""
        return "unknown"

    def forget(self, room: int) -> None:
        """Nothing."""

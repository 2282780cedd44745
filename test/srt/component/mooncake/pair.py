"""The pair over two real Mooncake engines, with its workers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from component.transfer import pair
from component.transfer.bare import without_engine
from component.transfer.pair import Hold
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.delta.mooncake.worker import ChunkDeadlines
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)


class Side(pair.Side):
    """One server with an engine."""

    def __init__(self, mode: Any) -> None:
        manager = without_engine(
            conn.MooncakeKVManager,
            engine=MooncakeTransferEngine("127.0.0.1"),
            enable_custom_mem_pool=False,
            prefill_response_tracker=defaultdict(set),
        )
        super().__init__(manager, mode)


class Pair(pair.Pair):
    """Prefill and decode, connected by Mooncake."""

    ends = (conn, "Mooncake")
    prefill_ends_first = False

    def side(self, name: str, mode: Any) -> Any:
        return Side(mode)

    def start(self) -> None:
        sender, queue = self.prefill.manager, FastQueue()
        sender.transfer_queues = [queue]
        sender.start_prefill_thread()
        self.worker = threading.Thread(
            target=sender.transfer_worker, args=(queue, ThreadPoolExecutor(1)), daemon=True
        )
        self.worker.start()
        self.decode.manager.start_decode_thread()

    @property
    def peer(self) -> str:
        name: str = self.decode.manager.peer_name
        return name

    @contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        manager = self.prefill.manager
        kept, manager.chunk_deadlines = manager.chunk_deadlines, ChunkDeadlines(seconds)
        yield
        assert manager.chunk_deadlines.rooms() == []
        manager.chunk_deadlines = kept

    @contextmanager
    def engine(self, transfer: Callable[..., int]) -> Iterator[None]:
        """``transfer(real, *arguments)`` stands in for the engine's batch transfer."""
        engine = self.prefill.manager.engine
        real = engine.batch_transfer_sync
        engine.batch_transfer_sync = lambda *arguments: transfer(real, *arguments)
        try:
            yield
        finally:
            del engine.batch_transfer_sync

    @contextmanager
    def held_up(self) -> Iterator[Hold]:
        hold = Hold()

        def transfer(real: Callable[..., int], *arguments: Any) -> int:
            hold.block()
            return real(*arguments)

        with self.engine(transfer):
            try:
                yield hold
            finally:
                hold.release()

    @contextmanager
    def breaking(self) -> Iterator[None]:
        with self.engine(lambda *arguments: 1 // 0):
            yield

"""The pair over two real Mooncake engines, with its workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from component.transfer import pair
from component.transfer.bare import without_engine
from component.transfer.pair import Hold
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
    threads = "start_prefill_thread", "start_decode_thread"
    tells_at_once = True
    word_of_a_broken_write = "prefill could not deliver it"

    def side(self, name: str, mode: Any) -> Any:
        return Side(mode)

    def close(self) -> None:
        self.prefill.manager.transfers.stop(1.0)

    @property
    def peer(self) -> str:
        name: str = self.decode.manager.peer_name
        return name

    @contextmanager
    def engine(self, transfer: Callable[..., int]) -> Iterator[None]:
        """Replace the engine's batch transfer by ``transfer(real, *arguments)``."""
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

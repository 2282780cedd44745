"""What every scenario uses: one pair, the engine with something in its way, reasons of failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from component.mooncake.pair import LIMIT_S, Pair
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import STATS
from sglang.srt.disaggregation.mooncake.conn import KVTransferError

PAIR = Pair()
PREFILL, DECODE = PAIR.prefill.manager, PAIR.decode.manager
ROOMS = PREFILL.rooms
DONE = (KVPoll.Success, KVPoll.Success)
LOST = (KVPoll.Failed, KVPoll.Failed)
PAGE_BYTES = sum(PREFILL.kv_args.kv_item_lens)


def sent() -> int:
    """KV bytes sent so far."""
    return STATS.totals["kv_transfer_sent_bytes"]


def reason(endpoint) -> str:
    """Why a room failed, as the scheduler asks for it."""
    try:
        endpoint.failure_exception()
    except KVTransferError as error:
        return error.failure_reason
    raise AssertionError("no failure")


@contextmanager
def engine(transfer) -> Iterator[None]:
    """``transfer(real, *arguments)`` stands in for the engine's batch transfer."""
    real = PREFILL.engine.batch_transfer_sync
    PREFILL.engine.batch_transfer_sync = lambda *arguments: transfer(real, *arguments)
    try:
        yield
    finally:
        del PREFILL.engine.batch_transfer_sync


class Brake:
    """Holds the worker in its first write; the others go through."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, real, *arguments) -> int:
        self.reached.set()
        assert self.go_on.wait(LIMIT_S)
        return real(*arguments)

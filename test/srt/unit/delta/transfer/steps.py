"""Steps that the tests of a room share: its start, failure and arrival."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.base.conn import KVPoll

ROOM = 7
BROKEN = ZeroDivisionError("the transport's")


def pages(*numbers: int) -> np.ndarray:
    """Return page numbers as the scheduler passes them."""
    return np.array(numbers, np.int32)


def started(rank: Any, room: int = ROOM, count: int = 2) -> Any:
    """Return the sender of a room of ``count`` pages, from page 10 on decode, that may send."""
    sender = rank.sender(room)
    rank.announce(room, range(10, 10 + count), slot=2)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(count, 3)
    return sender


def failure_of(sender: Any) -> Exception:
    """Return the error of a failed room, as the scheduler queries it; this also releases the
    room."""
    with pytest.raises(Exception) as caught:
        sender.failure_exception()
    return caught.value


def arrived(rank: Any, memory_before: list[Any], *targets: int) -> bool:
    """True if decode's memory changed at these pages only, to prefill's pages from 5 on."""
    for (_, source), (_, target), before in zip(
        rank.side.kv, rank.decode["decode"].kv, memory_before, strict=False
    ):
        for page in targets:
            before[page] = source[page - 5]
        if not np.array_equal(before, target):
            return False
    return True

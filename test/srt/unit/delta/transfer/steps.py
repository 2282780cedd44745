"""What the tests of a room have in common: how it starts, fails and arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.base.conn import KVPoll

ROOM = 7
BROKEN = ZeroDivisionError("the transport's")


def pages(*numbers: int) -> np.ndarray:
    """As the scheduler gives them."""
    return np.array(numbers, np.int32)


def started(rank: Any, room: int = ROOM, count: int = 2) -> Any:
    """A room of ``count`` pages, 10 and those after it on decode, that may send."""
    sender = rank.sender(room)
    rank.announce(room, range(10, 10 + count), slot=2)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(count, 3)
    return sender


def failure_of(sender: Any) -> Exception:
    """Why a room failed, as the scheduler asks for it; which also lets it go."""
    with pytest.raises(Exception) as caught:
        sender.failure_exception()
    return caught.value


def arrived(rank: Any, was: list[Any], *targets: int) -> bool:
    """Whether decode's memory changed at these pages only; there it has prefill's pages 5 and 6."""
    for (_, source), (_, target), before in zip(
        rank.side.kv, rank.decode["decode"].kv, was, strict=False
    ):
        for at in targets:
            before[at] = source[at - 5]
        if not np.array_equal(before, target):
            return False
    return True

"""A room fails on one thread while the scheduler polls it on another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from unit.delta.nixl.prefill_rank import PrefillRank, failure_of

ROOM = 7


def polls_while_failing(rank: PrefillRank, sender: Any) -> list[Any]:
    """Decode gives the room up; what the scheduler sees in the middle of that, and afterwards."""
    fail, polls = rank.manager.fail_known, []

    def fail_and_poll(room: int, text: str) -> bool:
        was_known = fail(room, text)
        polls.append(sender.poll())
        return bool(was_known)

    rank.manager.fail_known = fail_and_poll
    rank.withdraw(ROOM)
    polls.append(sender.poll())
    return polls


@pytest.mark.hazard("source-given-away")
def test_a_chunk_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against pages that are freed while they are read, because the room's status said that
    it failed before its ticket did."""
    rank = PrefillRank(monkeypatch)
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [10, 11])
    sender.init(2, 3)
    sender.send(np.array([5], np.int32))
    rank.pool.run()
    assert rank.agent.under_way(room=ROOM)
    assert polls_while_failing(rank, sender) == [KVPoll.Transferring] * 2
    rank.finish()
    assert sender.poll() == KVPoll.Failed
    assert "decode cancelled it" in str(failure_of(sender))
    rank.check()


def test_nothing_sent_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a bootstrap queue that takes a room which is just failing for a ready one."""
    rank = PrefillRank(monkeypatch)
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [10, 11])
    assert polls_while_failing(rank, sender) == [KVPoll.Failed] * 2
    assert "decode cancelled it" in str(failure_of(sender))
    rank.check()

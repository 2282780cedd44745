"""What waits for a call of Mooncake's engine: a decode rank's transfers take turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.patchset.environment import QUARANTINE_TIMEOUT
from unit.delta.transfer.ranks import MooncakeRank
from unit.delta.transfer.steps import ROOM, failure_of, pages, started


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeRank]:
    """A prefill rank over Mooncake with a write of room ``ROOM`` under way."""
    rank = MooncakeRank(monkeypatch)
    sender = started(rank)
    sender.send(pages(5, 6))
    rank.tick(0.01)
    yield rank
    rank.finish()


def test_what_never_began_may_not_land(rank: MooncakeRank) -> None:
    """Guards against a room that waited behind a call that failed, and whose decode rank is told
    only after the time for which a broken write may still land."""
    other = started(rank, 8)
    other.send(pages(5, 6))
    rank.tick(0.01)
    assert len(rank.writes) == 1
    rank.settle("ERR")
    rank.tick(0.25)
    assert other.poll() == KVPoll.Failed and rank.heard(8) == ["stopped"]
    assert "must register again" in str(failure_of(other))
    assert rank.heard(ROOM) == ["failed"], "what the failed call began may still land"


def test_a_process_that_stood_still(rank: MooncakeRank) -> None:
    """Guards against a write that waited, and is begun after a pause in which decode may have given
    its pages to others: before the thread that ticks has looked."""
    other = started(rank, 8)
    other.send(pages(5, 6))
    rank.tick(0.01)
    rank.clock.now += QUARANTINE_TIMEOUT.read()
    rank.settle("DONE")
    rank.pool.run()
    assert len(rank.writes) == 1 and other.poll() == KVPoll.Failed
    assert "did not run for" in str(failure_of(other))

"""From rounds to numbers: percentiles and shares, on inputs whose answer is known."""

from __future__ import annotations

import pytest

from benchmark.kv_transfer import summary
from benchmark.kv_transfer.records import RoomTimes, Round


def room(number: int, total: float, outcome: str = "done", peer: int = 0) -> RoomTimes:
    """A room that took ``total`` seconds, and decode a tenth more to see it."""
    ended = 100.0 + total
    arrived = 100.0 + total * 1.1 if outcome == "done" else 0.0
    return RoomTimes(
        number, peer, 100.0, ended, sends=[total / 10], outcome=outcome, arrived=arrived
    )


def test_numbers_of_known_rounds() -> None:
    """Failed rooms counted as fast ones, or rates over the wrong time."""
    rounds = [
        Round([room(1, 1.0), room(2, 3.0)], 4.0, 1.0, 10**9, 0.5),
        Round([room(3, 2.0), room(4, 0.001, "failed")], 1.0, 2.0, 10**9, 0.5),
    ]
    found = summary.summarize(rounds)
    assert (found.rooms, found.failed) == (4, 1)
    assert found.total.p50 == 2.0
    assert found.total.p99 == pytest.approx(2.98)
    assert found.arrival.p50 == pytest.approx(2.2)
    assert found.gb_per_s == pytest.approx(2 / 5)
    assert found.cpu_s_per_gb == pytest.approx(1.5)
    assert found.peer_cpu_s_per_gb == pytest.approx(0.5)
    assert found.cores == pytest.approx(4 / 5)
    assert found.room_bytes == pytest.approx(2e9 / 3)

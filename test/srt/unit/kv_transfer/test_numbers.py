"""From rounds to numbers: percentiles, shares, constants; on inputs whose answer is known."""

from __future__ import annotations

import pytest

from benchmark.kv_transfer import choice, summary
from benchmark.kv_transfer.choice import Chunk, Cost
from benchmark.kv_transfer.records import RoomTimes, Round, Transfer


def room(number: int, total: float, outcome: str = "done", peer: int = 0) -> RoomTimes:
    """A room that took ``total`` seconds, and decode a tenth more to see it."""
    ended = 100.0 + total
    arrived = 100.0 + total * 1.1 if outcome == "done" else 0.0
    return RoomTimes(
        number, peer, 100.0, ended, sends=[total / 10], outcome=outcome, arrived=arrived
    )


def kv(build: float | None, wire: float | None = 2.0) -> Transfer:
    """A transfer of 7 descriptors."""
    return Transfer(1, False, 7, 0.1, build, 1.0, wire)


def test_numbers_of_known_rounds() -> None:
    """Failed rooms counted as fast ones, metadata counted as KV, or rates over the wrong time."""
    rounds = [
        Round([room(1, 1.0), room(2, 3.0)], [kv(0.5), kv(1.5)], 4.0, 1.0, 10**9, 0.5),
        Round(
            [room(3, 2.0), room(4, 0.001, "failed")],
            [kv(1.0), Transfer(3, True, 10, 9.0, 9.0, 9.0, 9.0)],
            1.0,
            2.0,
            10**9,
            0.5,
        ),
    ]
    found = summary.summarize(rounds)
    assert (found.rooms, found.failed) == (4, 1)
    assert (found.total.p50, found.build.p50, found.post.p99) == (2.0, 1.0, 1.0)
    assert found.total.p99 == pytest.approx(2.98)
    assert found.arrival.p50 == pytest.approx(2.2)
    assert found.descriptors == 7
    assert found.gb_per_s == pytest.approx(2 / 5)
    assert found.cpu_s_per_gb == pytest.approx(1.5)
    assert found.peer_cpu_s_per_gb == pytest.approx(0.5)
    assert found.cores == pytest.approx(4 / 5)
    assert found.room_bytes == pytest.approx(2e9 / 3)


def costs(ranges_each: float, shared: float) -> choice.Table:
    """Builds that follow the model exactly: 50 + a n, and 10 + 0.01 pages + c runs."""
    table = {}
    for buffers in (8, 64):
        for pages in (16, 64, 256):
            for run in (1, 4, 16):
                chunk = Chunk(buffers, pages, run)
                by_ranges = 50 + ranges_each * chunk.entries("ranges")
                by_lists = 10 + 0.01 * buffers * pages + shared * chunk.entries("ranges")
                table["ranges", chunk] = Cost(by_ranges, 1.0)
                table["prepared", chunk] = Cost(by_lists, 1.0)
    return table


def test_constants_are_found_again() -> None:
    """A fit that gives other constants than the costs were made of."""
    table = costs(ranges_each=0.3, shared=0.1)
    found = choice.fit(table)
    assert found.ranges_fixed == pytest.approx(50) and found.ranges_each == pytest.approx(0.2)
    assert found.prepared_fixed == pytest.approx(10)
    assert found.prepared_each == pytest.approx(0.01)
    right, of, dearer = choice.judge(found, table)
    assert (right, of, dearer) == (18, 18, 0.0)


def test_a_bad_choice_is_seen() -> None:
    """A judge that praises any constants."""
    always_ranges = choice.Constants(0.0, 0.0, 1e9, 0.0)
    right, of, dearer = choice.judge(always_ranges, costs(ranges_each=0.3, shared=0.1))
    assert right < of and dearer > 0.1

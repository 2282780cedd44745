"""From rounds to numbers: percentiles, shares, constants; on inputs whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path
from threading import Event, Thread

import pytest

from benchmark.kv_transfer import choice, runs, summary, threads
from benchmark.kv_transfer.choice import Chunk, Cost
from benchmark.kv_transfer.records import RoomTimes, Round, ThreadUse, Transfer
from benchmark.kv_transfer.turns import Turn, TurnClock, Work


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


def test_a_stage_that_an_arm_cannot_tell_is_no_number() -> None:
    """Zeros for stages that were not measured."""
    found = summary.summarize([Round([room(1, 1.0)], [kv(None, None)], 1.0, 1.0, 10**9)])
    assert math.isnan(found.build.p50) and math.isnan(found.wire.p99)
    assert runs.p50_p99(found.build, 1e-3) == "-"


def test_nothing_arrived() -> None:
    """A division by zero where every room failed."""
    found = summary.summarize([Round([room(1, 1.0, "failed")], [], 1.0, 1.0, 0)])
    assert found.failed == 1 and math.isnan(found.total.p50) and math.isnan(found.gb_per_s)


def test_rooms_of_some_peers() -> None:
    """The stopped peer's rooms among those of the others."""
    rounds = [Round([room(1, 1.0), room(2, 9.0, peer=3), room(3, 8.0, "failed")], [], 1, 1, 1)]
    assert summary.totals(rounds, peers=[0, 1, 2]) == [1.0]
    assert [times.room for times in summary.of_peer(rounds, 3)] == [2]


def test_thread_groups() -> None:
    """NIXL's own threads charged to the workers, or the other way round."""
    uses = [
        ThreadUse("kv-transfer-0", 0.5),
        ThreadUse("Thread-5 (transfer_worker)", 0.25),
        ThreadUse("native python", 2.0),
        ThreadUse("x", 1.0),
    ]
    assert summary.thread_groups(uses, 10.0) == pytest.approx(
        {
            "workers": 0.075,
            "other Python threads": 0.1,
            "native threads": 0.2,
        }
    )


def test_threads_are_told_by_name() -> None:
    """A worker's time charged to nobody: Python's own name is what groups go by."""
    over = Event()
    thread = Thread(target=over.wait, name="kv-transfer-7")
    thread.start()
    try:
        uses = {use.name: use.cpu_s for use in threads.use_over(0.01)}
    finally:
        over.set()
        thread.join()
    assert {"MainThread", "kv-transfer-7"} <= set(uses) and uses["kv-transfer-7"] == 0


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


def test_gaps_of_known_turns() -> None:
    """Waiting for a core taken for waiting for a lock, or a largest gap that is a percentile."""
    found = summary.summarize_turns(
        [Turn(1.0, 0.5, 0.1)] * 98 + [Turn(9.0, 0.5, 8.0), Turn(5, 1, 0)]
    )
    assert (found.turns, found.p50, found.largest) == (100, 1.0, 9.0)
    assert (found.on_core_largest, found.most_blocked) == (5.0, 4.0)
    assert found.p99 < 9.0 and found.cpu_p50 == 0.5


def test_turns_of_this_thread() -> None:
    """Turns that leave out a part of the time, or another thread's clocks."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count how long a thread waits for a core")
    work, clock = Work(1e-3), TurnClock()
    for _ in range(3):
        work()
        clock.turn()
    Work(0)()
    assert len(clock.turns) == 3
    for turn in clock.turns:
        assert 0 < turn.cpu <= turn.took + 1e-4 and turn.ready >= 0

"""Settings, sharding, pauses and deadlines: the small parts that the worker is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.prefill.send_queue import (
    SHORTEST_S,
    Deadlines,
    next_poll,
)
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Settings
from sglang.srt.disaggregation.delta.prefill.transfer_pool import worker_of
from sglang.srt.patchset.environment import QUEUES, THREADS


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """The settings of a machine with so many cores, and these variables."""

    def settings(cpus: int | None, queues: str | None, threads: str | None) -> Settings:
        for name, value in ((QUEUES.name, queues), (THREADS.name, threads)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        return Settings.read(cpus)

    return settings


@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 4), (2, 4), (64, 4), (79, 4), (80, 5), (128, 8), (192, 12), (999, 12)]
)
def test_settings(read: Callable[..., Settings], cpus: int, threads: int) -> None:
    """Guards against a default that is not SGLang's, and against variables that are not read."""
    made = read(cpus, None, None)
    assert (made.queues, made.threads, made.workers) == (4, threads, 4 * (threads // 4))
    made = read(cpus, "3", "7")
    assert (made.queues, made.threads, made.threads_per_queue, made.workers) == (3, 7, 2, 6)


@pytest.mark.hazard("wrong-counts")
@pytest.mark.parametrize(
    ("queues", "threads", "named"),
    [
        ("0", None, QUEUES.name),
        ("-1", None, QUEUES.name),
        ("four", None, QUEUES.name),
        ("1000000", "1000000", QUEUES.name),
        ("4", "0", THREADS.name),
        ("4", "", THREADS.name),
        ("4", "3", THREADS.name),
        ("4", "100000", THREADS.name),
        ("8", None, THREADS.name),
    ],
)
def test_wrong_settings(
    read: Callable[..., Settings], queues: str, threads: str | None, named: str
) -> None:
    """Guards against a wrong count that is taken for another, or fails without its name."""
    with pytest.raises(ValueError, match=named):
        read(2, queues, threads)


@pytest.mark.parametrize("name", ["queues", "threads", "window", "quota", "overdue"])
def test_nothing_may_be_zero(name: str) -> None:
    """Guards against a worker that may post nothing, and so waits for ever."""
    with pytest.raises(ValueError, match=name):
        Settings(**{name: 0})


@pytest.mark.hazard("chunks-overtake")
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64, 2**32, 2**40])
@pytest.mark.parametrize("workers", [1, 3, 4, 12])
def test_rooms_spread_over_workers(stride: int, workers: int) -> None:
    """Guards against rooms of one remainder (data parallel attention) that all go to one worker,
    and against two answers for one room."""
    rooms = [3 + stride * index for index in range(2000)]
    shares = Counter(worker_of(room, workers) for room in rooms)
    assert set(shares) == set(range(workers))
    assert max(shares.values()) <= 1.25 * len(rooms) / workers
    assert all(worker_of(room, workers) == worker_of(room, workers) for room in rooms)
    assert worker_of(2**63 + 5, workers) < workers


@given(now=st.floats(0, 1e7), age=st.floats(0, 1e3), is_overdue=st.booleans())
def test_pauses(now: float, age: float, is_overdue: bool) -> None:
    """Guards against a pause of nothing (spinning), or one that is too long for its transfer: it
    ends in the middle of a pause, on average, so that looking late adds a thirtieth of its time,
    and less than a millisecond to one that takes up to 10 s."""
    pause = next_poll(now, age, is_overdue) - now
    assert pause > 0
    if not is_overdue:
        longest = 1.6e-3 if age < 10 else 25.6e-3
        assert pause <= 1.01 * min(max(SHORTEST_S, age / 16), longest)
    assert pause <= 0.21


@given(age=st.floats(0, 2), other=st.floats(0, 2), now=st.floats(0, 1e6))
def test_pauses_meet(age: float, other: float, now: float) -> None:
    """Guards against a wake-up of its own for every transfer: whoever has the longer pause is
    looked at when one with the shorter pause is."""
    short, long = sorted((next_poll(now, age), next_poll(now, other)))
    for _ in range(2000):
        if short >= long - SHORTEST_S / 100:
            break
        short = next_poll(short, min(age, other))
    assert short == pytest.approx(long, abs=SHORTEST_S / 100)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pass"]), st.integers(0, 30))))
def test_deadlines_against_a_list(steps: list[tuple[str, int]]) -> None:
    """Guards against items that are due early, late, twice, or after they were discarded."""
    deadlines: Deadlines[object] = Deadlines()
    model: dict[object, float] = {}
    for what, number in steps:
        if what == "add":
            item = object()
            deadlines.add(float(number), item)
            model[item] = float(number)
        elif what == "discard" and model:
            item = list(model)[number % len(model)]
            deadlines.discard(item)
            deadlines.discard(item)
            del model[item]
        elif what == "pass":
            due = deadlines.passed(float(number))
            assert [model[item] for item in due] == sorted(t for t in model.values() if t <= number)
            model = {item: at for item, at in model.items() if item not in due}
        assert len(deadlines) == len(model)
        assert deadlines.next_at() == min(model.values(), default=None)


def test_discarded_deadlines_leave_nothing() -> None:
    """Guards against entries of delivered chunks that lie in the heap until their deadline."""
    deadlines: Deadlines[object] = Deadlines()
    for number in range(10_000):
        item = object()
        deadlines.add(120.0 + number, item)
        deadlines.discard(item)
    assert len(deadlines) == 0 and len(deadlines._heap) <= 100

"""Times in a unit that is off by a thousand: when it is noticed, and when not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest

from benchmark.traces.generate import CONVERSATION, Shape, generate
from benchmark.traces.record import Record
from benchmark.traces.units import UnitCheck


def seen(records: Iterable[Record]) -> UnitCheck:
    check = UnitCheck()
    for _ in check.watch(records):
        pass
    return check


def times(scale: float, shape: Shape, requests: int = 400) -> Iterator[Record]:
    for record in generate(requests, 3, shape):
        yield msgspec.structs.replace(record, timestamp=record.timestamp * scale)


def test_milliseconds_say_nothing() -> None:
    """Guards against a warning for every trace, which nobody would read."""
    for shape in (CONVERSATION, Shape()):
        assert seen(times(1, shape)).told("trace") == []


@pytest.mark.parametrize("shape", [CONVERSATION, Shape()])
def test_seconds_that_are_read_as_milliseconds(shape: Shape) -> None:
    """Guards against an hour that is replayed in four seconds, without a word."""
    (said,) = seen(times(1e-3, shape)).told("my.jsonl")
    assert said.startswith("my.jsonl: 400 requests within ")
    assert said.endswith("seem to be s (`timestamp` is in ms)")


def test_requests_without_sessions_are_judged_by_their_rate() -> None:
    """Guards against a check that needs sessions; Mooncake's conversations arrive at 3.3/s."""
    assert seen(Record(i * 0.3, 9, 9, (0,)) for i in range(100)).fits() == "s"
    assert seen(Record(i * 300, 9, 9, (0,)) for i in range(100)).fits() is None


@pytest.mark.parametrize(("scale", "unit"), [(1e3, "us"), (1e6, "ns")])
def test_units_that_are_too_short(scale: float, unit: str) -> None:
    """Guards against a study of a trace that lasts for months: an hour read a thousand times too
    long."""
    assert seen(Record(i * 3e5 * scale, 9, 9, (0,)) for i in range(100)).fits() == unit

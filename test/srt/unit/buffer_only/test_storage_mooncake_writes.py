"""Writes to Mooncake: the first one of a server, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.buffer_only import storage_mooncake


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(storage_mooncake, "time", clock)
    return clock


def store(clock: Clock, well_at: float) -> Any:
    """A store whose writes are kept from a moment on."""

    class Stock:
        def warmup(self) -> None:
            assert clock.now >= well_at

    made: type = type("MooncakeStore", (storage_mooncake.MooncakeParts, Stock), {})
    return made()


def test_memory_of_a_killed_server_is_waited_for(clock: Clock) -> None:
    """Guards against a server that cannot be started again for ten seconds after it was killed: the
    master does not know of that yet, and may put the first write where the server was."""
    store(clock, well_at=10.0).warmup()
    assert 10.0 <= clock.now < 12.0


def test_a_store_that_keeps_nothing_is_an_error(clock: Clock) -> None:
    """Guards against a server that waits forever for a store that does not work."""
    with pytest.raises(AssertionError):
        store(clock, well_at=1e9).warmup()
    assert clock.now < 2 * storage_mooncake.WARMUP_S


def test_refused_writes_are_told_with_their_codes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A full store, a lost master and a key that another writer left half-written all look alike in
    the counters; the codes tell them apart. And a store that refuses everything must not fill the
    log."""
    answers = [0, -200, -600, -200]

    class Stock:
        enable_storage_metrics = False

        def _put_batch_zero_copy_impl(self, keys: list[str], *memory: list[int]) -> list[int]:
            return answers[: len(keys)]

    made: type = type("MooncakeStore", (storage_mooncake.MooncakeParts, Stock), {})
    one = made()
    clock.now = 1.0
    view = torch.zeros(1, dtype=torch.uint8)
    assert one.put_values(["a"], [view]) == [True] and not caplog.messages
    assert one.put_values(list("abcd"), [view] * 4) == [True, False, False, False]
    assert one.put_values(list("abcd"), [view] * 4)[1] is False
    (line,) = caplog.messages
    assert "3 of 4" in line and "[-600, -200]" in line
    clock.now += storage_mooncake.LOG_EVERY_S
    one.put_values(list("ab"), [view] * 2)
    assert len(caplog.messages) == 2

"""The first write of a server that starts on Mooncake."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.mem_cache.store_parts.stores import mooncake


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(mooncake, "time", clock)
    return clock


def store(clock: Clock, well_at: float) -> Any:
    """A store whose writes are kept from a moment on."""

    class Stock:
        def warmup(self) -> None:
            assert clock.now >= well_at

    made: type = type("MooncakeStore", (mooncake.MooncakeParts, Stock), {})
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
    assert clock.now < 2 * mooncake.WARMUP_S

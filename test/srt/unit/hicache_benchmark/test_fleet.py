"""What a fleet asks of its servers, with servers that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness.models import TINY_ARITH
from benchmark.hicache_buffer_only import fleet as module
from benchmark.hicache_buffer_only.compare import BUFFER_ONLY, Load, configurations
from benchmark.hicache_buffer_only.fleet import HOST_TOKENS, STAGE_IN_USE, WorkersAndStore
from benchmark.hicache_buffer_only.master import CAPACITY


@pytest.fixture
def fleet(tmp_path: Path) -> WorkersAndStore:
    """Not started."""
    return WorkersAndStore(configurations(TINY_ARITH, Load())[BUFFER_ONLY], tmp_path)


def report(
    monkeypatch: pytest.MonkeyPatch, fleet: WorkersAndStore, host: list[float], store: float
) -> None:
    monkeypatch.setattr(fleet, "counters", lambda: [{HOST_TOKENS: tokens} for tokens in host])
    monkeypatch.setattr(fleet.master, "usage", lambda: {CAPACITY: store})


def test_memory_as_planned(monkeypatch: pytest.MonkeyPatch, fleet: WorkersAndStore) -> None:
    """A worker that made another pool, or one that did not join the store, would make the arms
    unequal."""
    memory = fleet.config.memory
    tokens = float(memory.pool_pages * 16)
    report(monkeypatch, fleet, [tokens, tokens], memory.store_bytes)
    fleet.check_memory()
    report(monkeypatch, fleet, [tokens, tokens + 16], memory.store_bytes)
    with pytest.raises(RuntimeError, match="host pool"):
        fleet.check_memory()
    report(monkeypatch, fleet, [tokens, tokens], memory.store_bytes / 2)
    with pytest.raises(RuntimeError, match="the store has"):
        fleet.check_memory()


class Clock:
    """Time passes in sleeps alone."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_stages_that_drain_and_that_do_not(
    monkeypatch: pytest.MonkeyPatch, fleet: WorkersAndStore
) -> None:
    """Metrics are a second old: pages that show up late are waited for, and pages that stay end the
    run."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(fleet, "check", lambda timeout_s: None)  # nobody to wait for
    seen: list[float] = [0, 0, 3, 2, 0]

    def counters() -> list[dict[str, float]]:
        used = seen.pop(0) if seen else 0.0
        return [{STAGE_IN_USE[0]: used}, {STAGE_IN_USE[1]: 0.0}]

    monkeypatch.setattr(fleet, "counters", counters)
    fleet.settle()
    assert not seen and clock.now >= 0.8 + module.METRICS_S
    monkeypatch.setattr(fleet, "counters", lambda: [{STAGE_IN_USE[1]: 1.0}])
    with pytest.raises(TimeoutError, match="1 staging pages"):
        fleet.settle(timeout_s=5)

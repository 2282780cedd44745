"""What the arms are started with, and what is made of their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.harness.models import TINY_ARITH
from benchmark.harness.report import plain
from benchmark.hicache_buffer_only.compare import (
    AGENTS,
    ALWAYS,
    ALWAYS_FETCH,
    ARMS,
    BUFFER_ONLY,
    CACHE,
    SMALL,
    Load,
    Outcome,
    Run,
    configurations,
    of_arm,
    same_answers,
    scaled,
)
from benchmark.hicache_buffer_only.master import ALLOCATED, CAPACITY, EVICTED, Master
from benchmark.hicache_buffer_only.memory import Memory
from benchmark.traces.read import write
from benchmark.traces.record import Record, check

pytestmark = pytest.mark.slow


def test_arms_differ_in_memory_alone() -> None:
    """Another pool, chunk or policy in one arm would be measured instead of the mode."""
    arms = configurations(TINY_ARITH, Load())
    cache, small, buffer_only, always = (arms[name] for name in ARMS)
    assert len({config.sizes for config in arms.values()}) == 1
    assert len({config.memory.total_bytes for config in arms.values()}) == 1
    assert buffer_only.memory.pinned_bytes <= 0.05 * cache.memory.pinned_bytes
    assert buffer_only.memory.pinned_bytes < small.memory.pinned_bytes < cache.memory.pinned_bytes
    master = Master(lease_ms=1000)
    told = {name: config.arguments(master) for name, config in arms.items()}
    one, other = told[CACHE], told[BUFFER_ONLY]
    assert set(one) - set(other) == {"--hicache-ratio", "2.0", one[-1]}
    mode = {"--hicache-host-memory-mode", "buffer_only", "--hicache-buffer-pages", "204"}
    assert set(other) - set(one) == {*mode, other[-1]}
    assert set(told[SMALL]) - set(one) == {"1.05", told[SMALL][-1]}
    assert told[ALWAYS] == other and always.env == ALWAYS_FETCH and not buffer_only.env
    stores = [json.loads(arguments[-1]) for arguments in (one, other)]
    segments = [store.pop("global_segment_size") for store in stores]
    assert stores[0] == stores[1]
    assert segments == [cache.memory.segment_bytes, buffer_only.memory.segment_bytes]


def test_the_baseline_is_the_stock_release() -> None:
    """Otherwise all that the patch set does would be ascribed to the mode."""
    arms = configurations(TINY_ARITH, Load())
    switches = {
        name: config.worker(Master(1)).env["SGLANG_PATCHSET"] for name, config in arms.items()
    }
    assert switches == {CACHE: "0", SMALL: "0", BUFFER_ONLY: "1", ALWAYS: "1"}


@pytest.mark.parametrize("given", [True, False])
def test_traces_are_scaled_to_pages(tmp_path: Path, given: bool) -> None:
    """A block must fill a page: smaller ones would never be hit, and no more is read than asked."""
    path = None
    if given:
        path = tmp_path / "trace"
        write(path, [Record(i * 100.0, 1000, 64, (0, i)) for i in range(1, 9)])
    records = list(scaled(AGENTS, path, Load(requests=5, speed=2.0)))
    assert len(records) == 5
    for record in records:
        check(record, 16)
    if given:
        assert records[1] == Record(100.0, 32, 2, (0, 2))


def run(arm: str, round_: int, storage: float, ttft_s: float = 0.5, answer: str = "a") -> Run:
    return Run(
        trace=AGENTS,
        arm=arm,
        round=round_,
        memory=Memory(10, 20, 1_000_000, 2),
        hits={"prompt": 1000, "device": 100, "host": 0, "storage": storage},
        late_s=0.1 * round_,
        store={ALLOCATED: 1e6 * round_, CAPACITY: 4e7, EVICTED: 0.0},
        buffer={},
        outcomes=(
            Outcome(ttft_s, 1.0, 0.01, "store" if storage else "miss", answer),
            Outcome(2 * ttft_s, 1.0, None, "miss", answer),
        ),
    )


def test_rounds_add_up() -> None:
    """All requests of all rounds count once, those that failed not at all."""
    arm = of_arm([run(CACHE, 1, 50, 0.5), run(CACHE, 3, 100, 1.5), run(CACHE, 2, 0, 9, "")])
    assert arm["hits"] == {"prompt": 3000, "device": 300, "host": 0, "storage": 150}
    assert arm["failed"] == 2
    assert arm["times"]["ttft_s"].mean == (0.5 + 1.0 + 1.5 + 3.0) / 4
    assert arm["times"]["ttft_by_class"]["store"].count == 2
    assert arm["times"]["itl_s"].count == 2 and arm["late_s"] == pytest.approx(0.3)
    assert arm["store"][ALLOCATED] == 2e6
    assert plain(arm)["ttft_mean_of_rounds_s"] == [0.75, 2.25, None]


def test_answers_are_compared_over_all_runs() -> None:
    """An arm that answers faster and wrong must not look good."""
    runs = [run(name, 0, 0) for name in ARMS]
    assert same_answers(runs)
    assert not same_answers([*runs, run(CACHE, 1, 0, answer="b")])
    assert not same_answers([*runs, run(CACHE, 1, 0, answer="")])

"""What the arms are started with, and what is made of their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.harness.models import TINY_ARITH
from benchmark.harness.report import summarize
from benchmark.harness.servers import Sizes
from benchmark.hicache_buffer_only.compare import (
    BUFFER_ONLY,
    CACHE,
    PATCHED,
    Load,
    Measured,
    configurations,
    report_of,
    rows,
    scaled,
)
from benchmark.hicache_buffer_only.master import ALLOCATED, CAPACITY, EVICTED, Master
from benchmark.hicache_buffer_only.memory import Memory
from benchmark.hicache_buffer_only.plot import draw
from benchmark.hicache_buffer_only.tiers import Hits
from benchmark.traces.read import write
from benchmark.traces.record import Record, check

pytestmark = pytest.mark.slow


def test_arms_differ_in_memory_alone() -> None:
    """Another pool, chunk or policy in one arm would be measured instead of the mode."""
    arms = configurations(TINY_ARITH, Load())
    cache, buffer_only = arms[CACHE], arms[BUFFER_ONLY]
    assert cache.sizes == buffer_only.sizes
    assert cache.memory.total_bytes == buffer_only.memory.total_bytes
    assert buffer_only.memory.pinned_bytes <= 0.05 * cache.memory.pinned_bytes
    master = Master(lease_ms=1000)
    one, other = cache.arguments(master), buffer_only.arguments(master)
    assert set(one) - set(other) == {"--hicache-ratio", "2.0", one[-1]}
    mode = {"--hicache-host-memory-mode", "buffer_only", "--hicache-buffer-pages", "204"}
    assert set(other) - set(one) == {*mode, other[-1]}
    stores = [json.loads(arguments[-1]) for arguments in (one, other)]
    segments = [store.pop("global_segment_size") for store in stores]
    assert stores[0] == stores[1]
    assert segments == [cache.memory.segment_bytes, buffer_only.memory.segment_bytes]


def test_the_baseline_is_the_stock_release() -> None:
    """SGLang's own mode is measured without the patch set, and with it but without its flags:
    otherwise all that the patch set does would be ascribed to the mode."""
    arms = configurations(TINY_ARITH, Load())
    switches = {
        name: config.worker(Master(1)).env["SGLANG_PATCHSET"] for name, config in arms.items()
    }
    assert switches == {CACHE: "0", PATCHED: "1", BUFFER_ONLY: "1"}
    master = Master(1)
    cache, patched = (arms[name].arguments(master) for name in (CACHE, PATCHED))
    assert cache == patched and arms[CACHE].memory == arms[PATCHED].memory


@pytest.mark.parametrize("given", [True, False])
def test_traces_are_scaled_to_pages(tmp_path: Path, given: bool) -> None:
    """A block must fill a page: smaller ones would never be hit, and no more is read than asked."""
    path = None
    if given:
        path = tmp_path / "trace"
        write(path, [Record(i * 100.0, 1000, 64, (0, i)) for i in range(1, 9)])
    records = list(scaled(path, Load(requests=5, speed=2.0)))
    assert len(records) == 5
    for record in records:
        check(record, 16)
    if given:
        assert records[1] == Record(100.0, 32, 2, (0, 2))


def measured(storage: float) -> Measured:
    return Measured(
        memory=Memory(10, 20, 1_000_000, 2),
        summary=summarize([]),
        hits=Hits(1000, 100, 0, storage),
        late_s=0.0,
        store={ALLOCATED: 1e6, CAPACITY: 4e7, EVICTED: 0.0},
        buffer={},
    )


def test_table_and_plot(tmp_path: Path) -> None:
    """The numbers of each arm stand in its own column, and an arm without answers draws too."""
    arms = [measured(50), measured(200)]
    table = {row[0]: row[1:] for row in rows(arms, same=False)}
    assert table["cache hit rate (prompt tokens)"] == ["15.0%  (150)", "30.0%  (300)"]
    assert table["  from the store"] == ["5.0%  (50)", "20.0%  (200)"]
    assert table["both"] == ["60.0 MB", "60.0 MB"]
    assert table["outputs identical"] == ["NO", "NO"]
    assert report_of(arms[0])["hit_rate"] == 0.15
    draw(tmp_path / "plot.png", {CACHE: arms[0], BUFFER_ONLY: arms[1]})
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_of_the_servers() -> None:
    """A page holds a block of the trace."""
    for config in configurations(TINY_ARITH, Load(block_tokens=32)).values():
        assert config.sizes == Sizes(32_768, 32, 1024, 64)
        assert config.prefetch_threshold == 32

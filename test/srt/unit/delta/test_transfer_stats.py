"""Numbers about transfers: counted, exported, logged, and never in the way."""

from __future__ import annotations

import logging

import prometheus_client
import pytest

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.metrics import (
    METRICS,
    Reason,
)
from sglang.srt.disaggregation.delta.observability import AsyncTransferStats, Histogram
from unit.delta.prefill.fakes import Bench, Clock

GAUGES = [each.name for each in METRICS.values() if (each.kind, each.side) == ("gauge", "prefill")]
HISTOGRAMS = [
    each.name for each in METRICS.values() if (each.kind, each.side) == ("histogram", "prefill")
]


def exported(name: str, labels: dict[str, str]) -> float | None:
    """What a scrape would show."""
    return prometheus_client.REGISTRY.get_sample_value(f"sglang:{name}", labels)


def test_percentiles() -> None:
    """Guards against percentiles below the values that they stand for."""
    histogram = Histogram((1, 2, 5, 10))
    assert histogram.percentile(0.99) == 0
    for value in (0.5, 1, 1.5, 4, 4, 4, 7, 30):
        histogram.add(value)
    assert histogram.percentile(0.25) == 1 and histogram.percentile(0.5) == 5
    assert histogram.percentile(1.0) == 30 and histogram.total == 52
    histogram.clear()
    assert histogram.percentile(0.5) == 0 and histogram.count == 0
    histogram.add(3)
    assert histogram.percentile(0.5) == 3


def test_log_line() -> None:
    """Guards against a line that is late, empty, or tells the numbers of the interval before."""
    clock = Clock()
    stats = AsyncTransferStats(60, clock)
    stats.queued(0.001)
    stats.posted(build_s=0.0002, post_s=0.0001, descriptors=40, moved=2_000_000)
    stats.settled(0.004)
    stats.failed(Reason.TIMEOUT)
    stats.level(0, 3, 2, 1)
    clock.now += 59
    assert stats.take_line() is None
    clock.now += 1
    line = stats.take_line()
    assert line is not None
    for part in (
        "of the last 60 s: 1 posted, 40 descriptors, 2.0 MB",
        "queue 1.00 / 1.00, build 0.20 / 0.20, post 0.10 / 0.10, wire 4.00 / 4.00",
        "now 3 waiting, 2 in flight, 1 overdue; ended early: timeout 1",
    ):
        assert part in line
    clock.now += 60
    assert stats.take_line() is None
    stats.queued(0.1)
    clock.now += 60
    assert "ended early: none" in (stats.take_line() or "")
    assert stats.failures[Reason.TIMEOUT] == 1


def test_no_log_line_when_it_is_off() -> None:
    """Guards against an interval of zero that logs every second."""
    clock = Clock()
    stats = AsyncTransferStats(0, clock)
    stats.queued(0.1)
    clock.now += 1000
    assert stats.take_line() is None


def test_prometheus() -> None:
    """Guards against numbers that a scrape does not show, and against a second pool of a process
    registering the metrics again."""
    for rank in ("0", "1"):
        stats = AsyncTransferStats()
        labels = {"model_name": "test_async_stats", "tp_rank": rank}
        stats.queued(1.0)
        stats.bind(labels)
        stats.queued(0.5)
        stats.settled(0.25)
        stats.posted(build_s=0.5, post_s=0.125, descriptors=7, moved=4096)
        stats.transported(0.0625)
        for name, value in zip(HISTOGRAMS, (0.5, 0.5, 0.125, 0.25, 0.0625, 7, 4096), strict=True):
            assert exported(f"{name}_sum", labels) == value
            assert exported(f"{name}_count", labels) == 1
        stats.level(0, 5, 4, 3)
        stats.level(0, 1, 1, 0)
        stats.level(1, 1, 0, 0)
        stats.tick()
        assert [exported(name, labels) for name in GAUGES] == [6, 4, 0]
        stats.tick()
        assert [exported(name, labels) for name in GAUGES] == [2, 1, 0]


@pytest.mark.hazard("drained-per-request")
def test_a_worker_fills_them() -> None:
    """Guards against times that begin or end at the wrong event (at completion, not at the post),
    and against levels that stay up on an idle worker."""
    bench = Bench(quota=1)
    bench.open(1)
    bench.submit(1)
    bench.submit(1, last=True)
    bench.run(0.2)
    levels = bench.stats._levels
    assert levels == {0: (1, 1, 0)}
    bench.settle()  # sees the first one after 0.2 s, posts the second one, which ran 0.5 s
    bench.settle()
    histograms = bench.stats._histograms
    assert levels == {0: (0, 0, 0)}
    assert histograms["kv_transfer_queue_seconds"].total == pytest.approx(0.2, abs=0.01)
    assert histograms["kv_transfer_wire_seconds"].total == pytest.approx(0.7, abs=0.01)


def test_errors_of_the_telemetry_fail_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a transfer that fails, or a log that fills, because of a broken metric."""

    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    observability._log_once.cache_clear()
    bench = Bench()
    for histogram in bench.stats._histograms.values():
        monkeypatch.setattr(histogram, "add", broken)
    bench.open(1)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            bench.submit(1)
            bench.submit(1, last=True)
            bench.stats.posted(build_s=0, post_s=0, descriptors=0, moved=0)
        bench.run()
        bench.settle()
    assert bench.rooms.of(1)[-1] == "drained" and "failed" not in bench.rooms.of(1)
    assert len(caplog.records) == 3

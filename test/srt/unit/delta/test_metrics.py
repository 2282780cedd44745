"""A scrape's metrics on both sides; the numbers are also counted without a scraper."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import prometheus_client
import pytest

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.metrics import METRICS, REFUSALS, Reason
from sglang.srt.disaggregation.delta.observability import (
    COUNT,
    STATS,
    Telemetry,
    TransferGauges,
    best_effort,
)
from sglang.srt.patchset.metric import Metric
from unit.delta.prefill.rig import Bench

Shown = Callable[..., float | None]


def of_model(name: str, **labels: str) -> Shown:
    """Return the samples with a test's own labels: a metric has one value in all tests of a
    process."""

    def shown(metric: str, **more: str) -> float | None:
        all_labels = {"model_name": name, **labels, **more}
        return prometheus_client.REGISTRY.get_sample_value(f"sglang:{metric}", all_labels)

    return shown


@pytest.mark.parametrize("rank", ["0", "1"])
def test_counters(rank: str) -> None:
    """Guards against counters that need a scraper; against a side that exports the other side's
    counters as zeros; against registering one metric twice, which Prometheus refuses; and against
    failures under another reason, or reasons that appear only with the first failure."""
    stats, shown = Telemetry(), of_model("test_counters", tp_rank=rank)
    stats.count("decode_prefix_hit_tokens", 100)
    stats.count("kv_transfer_failed", reason="timeout")
    stats.bind({"model_name": "test_counters", "tp_rank": rank}, "decode", "both")
    counts = {reason.value: 0 for reason in Reason}
    for failed in (None, "timeout", "peer_lost"):
        if failed is not None:
            stats.count("kv_transfer_failed", reason=failed)
            counts[failed] += 1
        assert counts == {
            reason: shown("kv_transfer_failed_total", reason=reason) for reason in counts
        }
    assert stats.by("kv_transfer_failed") == {("timeout",): 2, ("peer_lost",): 1}
    stats.count("decode_prefix_hit_tokens", 3)
    assert shown("decode_prefix_hit_tokens_total") == 3
    assert shown("kv_transfer_sent_bytes_total") is None
    assert stats.totals["decode_prefix_hit_tokens",] == 103


def test_counters_and_histograms_start_at_zero() -> None:
    """Guards against a first event that ``rate`` and ``increase`` do not see, and against zeros of
    a feature that is off."""
    stats, shown = Telemetry(), of_model("test_zeros", tp_rank="0")
    stats.start("local")  # no effect without a scraper
    stats.bind({"model_name": "test_zeros", "tp_rank": "0"}, "decode", "both")
    assert {shown("decode_admission_refused_total", reason=each) for each in REFUSALS} == {0}
    assert shown("kv_transfer_failed_total", reason="timeout") == 0
    assert shown("decode_local_tokens_total") is None
    stats.start("local")
    assert shown("decode_itl_breaches_total") == 0
    assert shown("decode_itl_seconds_count", chunk="true") == 0
    for where, reason in (("local", "short"), ("local", "no_prefill"), ("remote", "long")):
        assert shown("decode_turns_total", where=where, reason=reason) == 0
    assert shown("decode_turns_total", where="remote", reason="short") is None
    assert shown("kv_transfer_stuck_workers_total") is None


def test_every_counter_has_known_label_values() -> None:
    """Guards against a counter that appears only with its first event."""
    for metric in METRICS.values():
        if metric.labels and metric.kind != "gauge":
            assert metric.values and {len(value) for value in metric.values} == {len(metric.labels)}


def test_gauges() -> None:
    """Guards against gauges that need a scraper, and against a gauge that keeps its first value."""
    stats, shown = Telemetry(), of_model("test_gauges", tp_rank="0")
    stats.set("kv_evictable_tokens", 6)  # no effect without a scraper
    stats.bind({"model_name": "test_gauges", "tp_rank": "0"}, "decode")
    for value in (7, 5):
        stats.set("kv_evictable_tokens", value)
        assert shown("kv_evictable_tokens") == value
    help_of = {metric.name: metric.documentation for metric in prometheus_client.REGISTRY.collect()}
    assert help_of["sglang:kv_evictable_tokens"] == METRICS["kv_evictable_tokens"].help


def test_two_workers_measure_first_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two threads that register one metric: Prometheus refuses the second one, and
    the first value is lost."""
    stats, shown = Telemetry(), of_model("test_two_workers")
    metric = Metric("of_two_workers", "histogram", "prefill", "help", buckets=(1.0,))
    monkeypatch.setitem(METRICS, metric.name, metric)
    stats.bind({"model_name": "test_two_workers"})
    barrier, histogram = threading.Barrier(2), prometheus_client.Histogram

    def register(*args: Any, **options: Any) -> prometheus_client.Histogram:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.3)  # until the other thread registers too, unless a lock prevents it
        return histogram(*args, **options)

    monkeypatch.setattr(prometheus_client, "Histogram", register)
    with ThreadPoolExecutor(2) as workers:
        list(workers.map(lambda size: stats.observe(metric.name, size), (1, 2)))
    assert shown("of_two_workers_count") == 2


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against levels that a scrape misses because they have passed by then."""
    report, stats, shown = TransferGauges(), Telemetry(), of_model("test_levels", tp_rank="0")
    monkeypatch.setattr(observability, "STATS", stats)
    stats.bind({"model_name": "test_levels", "tp_rank": "0"}, "prefill", "both")
    for worker, *levels in ((0, 5, 4, 3), (0, 1, 1, 0), (1, 1, 0, 0)):
        report.level(worker, *levels)
    for levels_shown in (
        [6, 4, 0],
        [2, 1, 0],
    ):  # the maximum since the last scrape, then the current
        report.tick()
        names = ("waiting", "in_flight", "overdue")
        assert [shown(f"kv_transfer_{name}") for name in names] == levels_shown


@pytest.mark.hazard("drained-per-request")
def test_a_worker_times_its_transfers() -> None:
    """Guards against times that begin or end at the wrong event (at completion, not at the
    post)."""
    bench, before = Bench(quota=1), STATS.totals.copy()
    bench.open(1)
    bench.submit(1)
    bench.submit(1, last=True)
    bench.run(0.2)
    bench.settle()  # completes the first after 0.2 s, posts the second, which takes 0.5 s
    bench.settle()
    since = STATS.since(before)
    for name, mean_s in (("queue", 0.1008), ("wire", 0.3504)):
        name = f"kv_transfer_{name}_seconds"
        assert since[name, COUNT] == 2
        assert since[name,] / 2 == pytest.approx(mean_s, rel=1e-3)


def test_errors_of_the_telemetry_fail_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a transfer that fails, or a log that fills, because of a broken metric."""

    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    class Broken(dict[object, float]):
        __getitem__ = __setitem__ = broken  # type: ignore[assignment]

    monkeypatch.setattr(STATS, "totals", Broken())
    bench = Bench()
    bench.open(1)
    bench.submit(1)
    bench.submit(1, last=True)
    bench.run()
    bench.settle()
    assert bench.end(1) == "delivered"
    caplog.clear()
    guarded = best_effort(broken)
    with caplog.at_level(logging.ERROR):
        assert [guarded() for _ in range(5)] == [None] * 5
    assert len(caplog.records) == 1

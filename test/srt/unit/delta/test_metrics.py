"""What a scrape shows of both sides, with the numbers that are counted also without one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from sglang.srt.disaggregation.delta.decode import scheduler
from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.delta.decode.scheduler import DecodeMetrics
from sglang.srt.disaggregation.delta.metrics import (
    DECODE_COUNTERS,
    DECODE_GAUGES,
    FORMERLY,
    METRICS,
    TRANSFER_GAUGES,
    TRANSFER_HISTOGRAMS,
    Reason,
)
from sglang.srt.disaggregation.delta.observability import (
    AsyncTransferStats,
    Counters,
    Histogram,
    best_effort,
)
from unit.delta.fakes import Clock
from unit.delta.prefill.rig import Bench

Shown = Callable[..., float | None]


def of_model(name: str, **labels: str) -> Shown:
    """The samples of a test's own labels: a metric has one value in all tests of a process."""

    def shown(metric: str, **more: str) -> float | None:
        every = {"model_name": name, **labels, **more}
        return prometheus_client.REGISTRY.get_sample_value(f"sglang:{metric}", every)

    return shown


# ---- counters ----


@pytest.mark.parametrize("rank", ["0", "1"])
def test_counters(rank: str) -> None:
    """Guards against counters that need a scraper; against a side that exports the other side's as
    zeros; against registering one metric twice, which Prometheus refuses; and against failures
    under another reason, or reasons that a dashboard sees only when it is too late to compare."""
    stats, shown = Counters(), of_model("test_counters", tp_rank=rank)
    stats.add("decode_prefix_hit_tokens", 100)
    stats.failed(Reason.TIMEOUT)
    stats.bind(DECODE_COUNTERS, {"model_name": "test_counters", "tp_rank": rank})
    counts = dict.fromkeys(Reason, 0)
    for failed in (None, Reason.TIMEOUT, Reason.PEER_LOST):
        if failed is not None:
            stats.failed(failed)
            counts[failed] += 1
        found = {each: shown("kv_transfer_failed_total", reason=each.value) for each in Reason}
        assert found == counts
    assert stats.failures == counts | {Reason.TIMEOUT: 2}
    stats.add("decode_prefix_hit_tokens", 3)
    stats.add("kv_transfer_sent_bytes", 4)
    assert shown("decode_prefix_hit_tokens_total") == 3
    assert shown("kv_transfer_sent_bytes_total") is None
    counted = {name: count for name, count in stats.totals.items() if count}
    assert counted == {"decode_prefix_hit_tokens": 103, "kv_transfer_sent_bytes": 4}


# ---- decode ----


@pytest.fixture
def decode() -> tuple[DecodeMetrics, Clock, Shown]:
    """The metrics of a rank that is scraped, their clock, and what a scrape shows."""
    clock = Clock()
    made = DecodeMetrics(clock)
    made.bind({"model_name": "test_decode", "engine_type": "decode"})
    return made, clock, of_model("test_decode", engine_type="decode")


def test_gauges_follow_once_a_second(
    decode: tuple[DecodeMetrics, Clock, Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against gauges that cost time in every step, or on a server that nobody scrapes,
    against ones that stand still, and against dashboards of the release before that are empty."""
    made, clock, shown = decode
    values = {name: 7 + number for number, name in enumerate(DECODE_GAUGES)}
    reads: list[Any] = []
    monkeypatch.setattr(scheduler, "readings", lambda of: reads.append(of) or values)
    DecodeMetrics().update(SimpleNamespace())
    assert reads == []
    start = clock.now
    for at, count, is_shown in ((0.0, 5, True), (0.5, 6, False), (0.99, 7, False), (1.0, 8, True)):
        clock.now = start + at
        values["decode_prefix_leases"] = count
        made.update(None)
        assert (shown("decode_prefix_leases") == count) is is_shown
    help_of = {each.name: each.documentation for each in prometheus_client.REGISTRY.collect()}
    assert "kv_evictable_tokens" in FORMERLY, "SGLang 0.5.23's name"
    for name in DECODE_GAUGES:
        assert shown(name) == shown(FORMERLY.get(name, name)) == values[name]
        assert help_of[f"sglang:{name}"] == METRICS[name].help
        if name in FORMERLY:
            assert help_of[f"sglang:{FORMERLY[name]}"] == f"Deprecated: use sglang:{name}"


def test_what_is_counted_by_label(decode: tuple[DecodeMetrics, Clock, Shown]) -> None:
    """Guards against one counter for all reasons of a refusal: an operator must see what is short;
    and against drafts that are worse behind prefixes from the tree, where nobody can see it."""
    made, _, shown = decode
    unscraped = DecodeMetrics()
    for metrics in (unscraped, made):
        for reason in ("no_tokens", "no_tokens", "no_request_row"):
            metrics.refused(reason)
        assert metrics.refusals == {"no_tokens": 2, "no_request_row": 1}
    for hit, steps, accepted in ((64, 10, 7), (16, 5, 1), (0, 4, 2), (0, 0, 0)):
        req = SimpleNamespace(spec_verify_ct=steps, spec_accepted_tokens=accepted)
        record_of(req).hit_tokens = hit  # type: ignore[arg-type]
        made.speculated(req)
    for metric, labels, count in (
        ("decode_admission_refused", {"reason": "no_tokens"}, 2),
        ("decode_admission_refused", {"reason": "no_request_row"}, 1),
        ("decode_spec_verify_steps", {"prefix": "hit"}, 15),
        ("decode_spec_accepted_tokens", {"prefix": "hit"}, 8),
        ("decode_spec_verify_steps", {"prefix": "miss"}, 4),
        ("decode_spec_accepted_tokens", {"prefix": "miss"}, 2),
    ):
        assert shown(f"{metric}_total", **labels) == count, (metric, labels)


# ---- transfers ----


@pytest.mark.parametrize("rank", ["0", "1"], ids=["one pool", "a second pool of the process"])
def test_transfers(rank: str) -> None:
    """Guards against numbers that a scrape does not show, and against levels that a scrape misses
    because they are over when it comes."""
    stats, shown = AsyncTransferStats(), of_model("test_async_stats", tp_rank=rank)
    stats.queued(1.0)
    stats.bind({"model_name": "test_async_stats", "tp_rank": rank})
    stats.queued(0.5)
    stats.settled(0.25)
    stats.posted(build_s=0.5, post_s=0.125, descriptors=7, moved=4096)
    stats.transported(0.0625)
    values = (0.5, 0.5, 0.125, 0.25, 0.0625, 7, 4096)
    for name, value in zip(TRANSFER_HISTOGRAMS, values, strict=True):
        assert (shown(f"{name}_sum"), shown(f"{name}_count")) == (value, 1)
    for worker, *levels in ((0, 5, 4, 3), (0, 1, 1, 0), (1, 1, 0, 0)):
        stats.level(worker, *levels)
    for seen in ([6, 4, 0], [2, 1, 0]):  # the most since the last scrape; then what is now
        stats.tick()
        assert [shown(name) for name in TRANSFER_GAUGES] == seen


@pytest.mark.hazard("drained-per-request")
def test_a_worker_times_its_transfers() -> None:
    """Guards against times that begin or end at the wrong event (at completion, not at the post),
    against levels that stay up on an idle worker, and against a log line that is late, empty, or
    tells the numbers of the interval before."""
    bench = Bench(quota=1)
    bench.open(1)
    bench.submit(1)
    bench.submit(1, last=True)
    bench.run(0.2)
    bench.settle()  # sees the first one after 0.2 s, posts the second one, which ran 0.5 s
    bench.settle()
    stats, clock = bench.stats, bench.clock
    stats.posted(build_s=0.0002, post_s=0.0001, descriptors=40, moved=2_000_000)
    stats.level(1, 3, 2, 1)
    stats.failed(Reason.TIMEOUT)
    clock.now += 58
    assert stats.take_line() is None
    clock.now += 0.8
    assert re.search(
        r"of the last 60 s: 2 posted, 40 descriptors, 2.0 MB.*"
        r"queue 0.01 / 201.60, build 0.20 / 0.20, post 0.10 / 0.10, wire 499.20 / 499.20; "
        r"now 3 waiting, 2 in flight, 1 overdue; ended early: timeout 1",
        stats.take_line() or "",
    )
    clock.now += 60
    assert stats.take_line() is None, "nothing happened"
    stats.queued(0.1)
    clock.now += 60
    assert re.search(
        "1 posted, 0 desc.* wire 0.00 / 0.00; .* ended early: none", stats.take_line() or ""
    )
    assert stats.failures[Reason.TIMEOUT] == 1
    off = AsyncTransferStats(0, clock)
    off.queued(0.1)
    clock.now += 1000
    assert off.take_line() is None


def test_errors_of_the_telemetry_fail_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a transfer that fails, or a log that fills, because of a broken metric."""

    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Histogram, "add", broken)
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

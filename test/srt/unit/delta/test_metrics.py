"""The counters: counted with and without Prometheus, each under its own name."""

from __future__ import annotations

import threading

import prometheus_client
import pytest

from sglang.srt.disaggregation.delta.metrics import (
    DECODE_COUNTERS,
    METRICS,
    PREFILL_COUNTERS,
    Reason,
)
from sglang.srt.disaggregation.delta.observability import Counters


def exported(name: str, labels: dict[str, str]) -> float | None:
    """What a scrape would show."""
    return prometheus_client.REGISTRY.get_sample_value(f"sglang:{name}_total", labels)


def test_counting_without_metrics() -> None:
    """Guards against counters that need a scraper; tests and log lines read the totals."""
    stats = Counters()
    assert stats.totals == dict.fromkeys((*DECODE_COUNTERS, *PREFILL_COUNTERS), 0)
    stats.add("kv_transfer_sent_bytes", 5)
    stats.add("kv_transfer_sent_bytes", 7)
    assert stats.totals["kv_transfer_sent_bytes"] == 12
    assert sum(stats.totals.values()) == 12


def test_unknown_counter() -> None:
    """Guards against a misspelt name that is counted where nobody looks."""
    with pytest.raises(KeyError):
        Counters().add("kv_transfer_sent_byte", 1)


def test_bound_counters_reach_prometheus_from_then_on() -> None:
    """Guards against a side that exports the other side's counters as zeros."""
    stats = Counters()
    labels = {"model_name": "test_bound_counters", "tp_rank": "0"}
    stats.add("decode_prefix_hit_tokens", 100)
    stats.bind(DECODE_COUNTERS, labels)
    stats.add("decode_prefix_hit_tokens", 3)
    stats.add("kv_transfer_sent_bytes", 4)
    assert exported("decode_prefix_hit_tokens", labels) == 3
    assert exported("kv_transfer_sent_bytes", labels) is None
    assert stats.totals["decode_prefix_hit_tokens"] == 103


def test_two_schedulers_of_one_process() -> None:
    """Guards against registering one metric twice, which Prometheus refuses."""
    for rank in ("0", "1"):
        stats = Counters()
        labels = {"model_name": "test_two_schedulers", "tp_rank": rank}
        stats.bind(PREFILL_COUNTERS, labels)
        stats.add("kv_transfer_skipped_tokens", 2)
        assert exported("kv_transfer_skipped_tokens", labels) == 2


def failures_exported(labels: dict[str, str], reason: Reason) -> float | None:
    """What a scrape would show of failures of one reason."""
    labels = {**labels, "reason": reason.value}
    return prometheus_client.REGISTRY.get_sample_value(
        METRICS["kv_transfer_failed"].exported_name, labels
    )


def test_failures_have_reasons() -> None:
    """Guards against failures that are counted under another reason, and against reasons that a
    dashboard sees only when it is too late to compare: all are there from the start."""
    stats = Counters()
    labels = {"model_name": "test_failures", "tp_rank": "0"}
    stats.failed(Reason.TIMEOUT)
    stats.bind(DECODE_COUNTERS, labels)
    assert {failures_exported(labels, reason) for reason in Reason} == {0}
    stats.failed(Reason.TIMEOUT)
    stats.failed(Reason.PEER_LOST)
    assert stats.failures == dict.fromkeys(Reason, 0) | {Reason.TIMEOUT: 2, Reason.PEER_LOST: 1}
    assert failures_exported(labels, Reason.TIMEOUT) == 1
    assert failures_exported(labels, Reason.PEER_LOST) == 1
    assert failures_exported(labels, Reason.ABORTED) == 0


def test_failures_of_several_threads() -> None:
    """Rooms fail on the scheduler's, the reader's and the heartbeat's thread. Guards against lost
    counts."""
    stats = Counters()

    def fail() -> None:
        for _ in range(2000):
            stats.failed(Reason.ABORTED)

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.failures[Reason.ABORTED] == 8000

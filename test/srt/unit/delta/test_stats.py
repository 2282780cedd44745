"""The counters: counted with and without Prometheus, each under its own name."""

from __future__ import annotations

import prometheus_client
import pytest

from sglang.srt.disaggregation.delta.stats import (
    COUNTERS,
    DECODE_COUNTERS,
    PREFILL_COUNTERS,
    TransferStats,
)


def exported(name: str, labels: dict[str, str]) -> float | None:
    """What a scrape would show."""
    return prometheus_client.REGISTRY.get_sample_value(f"sglang:{name}_total", labels)


def test_counting_without_metrics() -> None:
    """Guards against counters that need a scraper; tests and log lines read the totals."""
    stats = TransferStats()
    assert set(stats.totals) == set(COUNTERS) and not any(stats.totals.values())
    stats.add("kv_transfer_sent_bytes", 5)
    stats.add("kv_transfer_sent_bytes", 7)
    assert stats.totals["kv_transfer_sent_bytes"] == 12
    assert sum(stats.totals.values()) == 12


def test_unknown_counter() -> None:
    """Guards against a misspelt name that is counted where nobody looks."""
    with pytest.raises(KeyError):
        TransferStats().add("kv_transfer_sent_byte", 1)


def test_bound_counters_reach_prometheus_from_then_on() -> None:
    """Guards against a side that exports the other side's counters as zeros."""
    stats = TransferStats()
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
        stats = TransferStats()
        labels = {"model_name": "test_two_schedulers", "tp_rank": rank}
        stats.bind(PREFILL_COUNTERS, labels)
        stats.add("kv_transfer_skipped_tokens", 2)
        assert exported("kv_transfer_skipped_tokens", labels) == 2

"""Numbers that benchmarks publish: counters and failures."""

from __future__ import annotations

import pytest

from benchmark.harness import metrics
from benchmark.harness.client import Result
from benchmark.harness.fleet import output_ids

SCRAPE = """\
# HELP sglang:kv_transfer_sent_bytes_total Bytes of KV sent to decode.
# TYPE sglang:kv_transfer_sent_bytes_total counter
sglang:kv_transfer_sent_bytes_total{tp_rank="0"} 2048.0
sglang:kv_transfer_sent_bytes_total{tp_rank="1"} 4096.0
# HELP sglang:kv_transfer_total_mb Histogram of KV cache transfer size in MB.
# TYPE sglang:kv_transfer_total_mb histogram
sglang:kv_transfer_total_mb_sum{model_name="m"} 1.5
sglang:kv_transfer_total_mb_bucket{le="1.0",model_name="m"} 2.0
sglang:kv_transfer_total_mb_bucket{le="+Inf",model_name="m"} 3.0
sglang:kv_transfer_total_mb_count{model_name="m"} 3.0
"""


def test_samples_are_summed_over_labels_and_buckets_left_out() -> None:
    """Guards against counting one rank only, or a histogram's buckets as values."""
    assert metrics.parse(SCRAPE) == {
        metrics.SENT_BYTES: 6144.0,
        metrics.STOCK_TRANSFER_MB: 1.5,
        "sglang:kv_transfer_total_mb_count": 3.0,
    }


def test_cached_tokens_are_counted_by_tier() -> None:
    """Guards the page of a store: the label contains the name of its backend."""
    text = "".join(
        f'sglang:cached_tokens_total{{cache_source="{source}",tp_rank="0"}} {count}\n'
        for source, count in (("device", 5), ("host", 3), ("storage_MooncakeStore", 2))
    )
    tiers = {"device": 5.0, "host": 3.0, "storage": 2.0}
    named = {f"{metrics.CACHED_TOKENS} {tier}": count for tier, count in tiers.items()}
    assert metrics.parse(text) == {metrics.CACHED_TOKENS: 10.0, **named}


def test_a_failed_request_has_no_answer() -> None:
    """Guards against tests that compare failed requests."""
    good = Result("a", 0.0, output_ids=[1])
    assert output_ids([good]) == [[1]]
    with pytest.raises(RuntimeError, match="request b: 503"):
        output_ids([good, Result("b", 0.0, error="503")])

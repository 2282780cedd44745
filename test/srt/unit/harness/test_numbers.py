"""Numbers that benchmarks publish: counters, percentiles, failures, loads that all arms share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from benchmark.harness import metrics, report, workload
from benchmark.harness.client import Request, Result
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


def test_a_counter_that_appears_later_counts_from_zero() -> None:
    """Guards against losing the first increments: labelled counters appear with them."""
    assert metrics.gained({"a": 1.0}, {"a": 3.0, "b": 5.0}) == {"a": 2.0, "b": 5.0}


def test_cached_tokens_are_counted_by_tier() -> None:
    """Guards the page of a store: the name of its backend is in the label."""
    text = "".join(
        f'sglang:cached_tokens_total{{cache_source="{source}",tp_rank="0"}} {count}\n'
        for source, count in (("device", 5), ("host", 3), ("storage_MooncakeStore", 2))
    )
    tiers = {"device": 5.0, "host": 3.0, "storage": 2.0}
    named = {f"{metrics.CACHED_TOKENS} {tier}": count for tier, count in tiers.items()}
    assert metrics.parse(text) == {metrics.CACHED_TOKENS: 10.0, **named}


def result(label: str, ids: list[int], start: float, times: list[float]) -> Result:
    return Result(
        label,
        started_at=start,
        token_times=times,
        output_ids=ids,
        completion_tokens=len(ids),
        finished_at=times[-1],
    )


def test_summary_of_two_requests() -> None:
    """Guards the definitions: TTFT from sending, ITL a request's mean gap, time over all."""
    a = result("a", [1, 2, 3], 0.0, [1.0, 1.5, 2.0])
    b = result("b", [4, 5], 1.0, [4.0, 5.0])
    summary = report.summarize([a, b])
    assert (summary.requests, summary.failed, summary.duration_s) == (2, 0, 5.0)
    assert summary.requests_per_s == pytest.approx(0.4)
    assert summary.output_tokens_per_s == pytest.approx(1.0)
    assert summary.ttft_s.p50 == pytest.approx(2.0)
    assert summary.itl_s.p50 == pytest.approx(0.75)  # of 0.5 and 1.0


def test_failed_requests_do_not_count_as_served() -> None:
    """Guards against an arm that looks fast because its requests failed at once."""
    bad = Result("b", started_at=0.0, finished_at=0.1, error="503")
    summary = report.summarize([result("a", [1], 0.0, [2.0]), bad])
    assert (summary.failed, summary.requests_per_s) == (1, 0.5)
    assert not report.same_answers([[bad], [bad]])
    with pytest.raises(RuntimeError, match="request b: 503"):
        output_ids([bad])


def test_answers_are_compared_by_label() -> None:
    """Guards against arms compared in the order in which requests happened to end."""
    a, b = result("a", [1], 0, [1]), result("b", [2], 0, [1])
    assert report.same_answers([[a, b], [b, a]])
    assert not report.same_answers([[a, b], [a, result("b", [3], 0, [1])]])


VOCABULARY = range(16, 688)


def common(a: Sequence[object], b: Sequence[object]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def load(seed: int = 0) -> list[Request]:
    return workload.SharedPrefixes(48, 4, 150, 13, 8, seed).sent(VOCABULARY)


def group(request: Request) -> str:
    return request.label.partition("-")[0]


def test_same_seed_same_prompts() -> None:
    """Guards against arms of a comparison that do different work."""
    assert load() == load()
    assert load(0) != load(1)


def test_prompts_share_exactly_their_groups_prefix() -> None:
    """Guards against a hit that is longer than meant, by chance, and spoils exact byte counts."""
    for a, b in itertools.combinations(load(), 2):
        assert common(a.prompt, b.prompt) == (150 if group(a) == group(b) else 0)

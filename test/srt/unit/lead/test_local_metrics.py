"""Metrics of local turns where no scheduler of ours mirrors the counters."""

from __future__ import annotations

import prometheus_client

from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.disaggregation.lead.metrics import LocalMetrics


def test_gaps_beyond_the_bound_are_counted() -> None:
    """Guards against a counter that only SGLang 0.5.10.post1 shows."""
    # The names of the labels are those of other tests in this process.
    metrics, labels = LocalMetrics(), {"model_name": "a bound", "tp_rank": "0"}
    for seconds, has_chunk, bound in (
        (0.3, True, 0.1),
        (0.3, False, 0.1),
        (0.05, True, 0.1),
        (0.3, True, None),
    ):
        metrics.gap(seconds, has_chunk, bound)  # nobody scrapes
        metrics.bind(labels)
        metrics.gap(seconds, has_chunk, bound)
    name = METRICS["decode_itl_breaches"].exported_name
    assert prometheus_client.REGISTRY.get_sample_value(name, labels) == 1

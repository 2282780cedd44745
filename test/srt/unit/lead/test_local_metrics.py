"""Metrics of local turns on SGLang 0.5.23, where they have no scheduler mixin to mirror."""

from __future__ import annotations

import prometheus_client

from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.disaggregation.delta.observability import Telemetry
from sglang.srt.disaggregation.policy.chunks import observe_gap


def test_gaps_beyond_the_bound_are_counted() -> None:
    """Guards against a counter that only SGLang 0.5.10.post1 shows, and against metrics under names
    that 0.5.23 uses itself: none is registered before it is counted."""
    # The label names equal those of other tests in this process.
    stats, labels = Telemetry(), {"model_name": "a bound", "tp_rank": "0"}
    for scraped in (False, True):
        if scraped:
            stats.bind(labels)
        for seconds, has_chunk, bound in (
            (0.3, True, 0.1),
            (0.3, False, 0.1),
            (0.05, True, 0.1),
            (0.3, True, None),
        ):
            observe_gap(stats, seconds, has_chunk, bound)
    name = METRICS["decode_itl_breaches"].exported_name
    sample = prometheus_client.REGISTRY.get_sample_value
    assert sample(name, labels) == 1 and sample("sglang:kv_evictable_tokens", labels) is None

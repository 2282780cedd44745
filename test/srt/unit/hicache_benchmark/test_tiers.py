"""Cached tokens by tier, from a server's metrics page."""

from __future__ import annotations

import pytest

from benchmark.hicache_buffer_only.fleet import hits
from benchmark.hicache_buffer_only.page import cached

PAGE = """\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 1000.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{model_name="m",cache_source="device"} 100.0
sglang:cached_tokens_total{model_name="m",cache_source="host"} 20.0
sglang:cached_tokens_total{model_name="m",cache_source="storage_MooncakeStore"} 30.0
sglang:cached_tokens_total_created{model_name="m",cache_source="device"} 1.7e9
"""


def test_each_source_is_a_tier() -> None:
    """Tiers that were mixed up would turn host hits into hits of the store."""
    found = hits(PAGE)
    assert found == {"prompt": 1000, "device": 100, "host": 20, "storage": 30}
    assert cached(found) == 0.15


def test_tokens_without_a_source_are_refused() -> None:
    """SGLang counts under "total" when it has no details; leaving them out would lower the rate."""
    with pytest.raises(ValueError, match="unknown source: total"):
        hits(PAGE.replace('"host"', '"total"'))

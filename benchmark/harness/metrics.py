"""SGLang's Prometheus counters, and their increase between two scrapes."""

from __future__ import annotations

import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

HIT_TOKENS = "sglang:decode_prefix_hit_tokens_total"
PROMPT_TOKENS = "sglang:decode_prefix_prompt_tokens_total"
LOCAL_TOKENS = "sglang:decode_local_tokens_total"
SENT_BYTES = "sglang:kv_transfer_sent_bytes_total"
SKIPPED_TOKENS = "sglang:kv_transfer_skipped_tokens_total"
FAILED_ROOMS = "sglang:kv_transfer_failed_total"
STOCK_TRANSFER_MB = "sglang:kv_transfer_total_mb_sum"
"""KV that the stock prefill counts, MiB: pages of the whole prompt times bytes a page."""
TURNS = "sglang:decode_turns_total"
"""Has the label ``where``: ``local`` or ``remote``."""

# Metrics of SGLang itself.
CACHED_TOKENS = "sglang:cached_tokens_total"
"""Has the label ``cache_source``: ``device``, ``host`` or ``storage_BACKEND``; see ``parse``."""
ALL_PROMPT_TOKENS = "sglang:prompt_tokens_total"
POOL_TOKENS = "sglang:max_total_num_tokens"
HOST_TOKENS = "sglang:hicache_host_total_tokens"
"""Absent on a decode server, whose staging buffer only this package counts."""
STAGED_PAGES = "sglang:hicache_buffer_pages"
# Metrics of Mooncake's master.
STORE_BYTES = "master_total_capacity_bytes"
STORE_KEYS = "master_key_count"


def parse(text: str) -> dict[str, float]:
    """Return sample name -> value, summed over label sets; for cached tokens also ``NAME SOURCE``.
    Histogram buckets are left out."""
    values: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                continue
            values[sample.name] += sample.value
            if source := sample.labels.get("cache_source"):
                # Drop the name of the storage backend, which follows.
                tier = "storage" if source.startswith("storage") else source
                values[f"{sample.name} {tier}"] += sample.value
    return dict(values)


def by_labels(text: str, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return values of these labels -> the sample ``name``, summed over its other labels."""
    values: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                values[tuple(sample.labels.get(label, "") for label in labels)] += sample.value
    return dict(values)


def scrape(url: str, timeout_s: float = 30.0) -> dict[str, float]:
    """Return the current counters of the server at ``url``."""
    return parse(page(url, timeout_s))


def page(url: str, timeout_s: float = 30.0) -> str:
    """Return the metrics page of the server at ``url``, with all labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as answer:
        text: str = answer.read().decode()
        return text


def gained(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the increase of each sample; one that is new in ``after`` counts from zero."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def total(servers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return counters of several servers, summed by name."""
    summed: Counter[str] = Counter()
    for values in servers:
        summed.update(values)
    return dict(summed)


def loopback_bytes() -> int:
    """Return bytes that the kernel has carried over the loopback interface since boot (Linux)."""
    import psutil

    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_recv)

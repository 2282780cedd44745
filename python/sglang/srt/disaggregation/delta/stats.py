"""Counters beside the connector: plain integers that Prometheus mirrors where metrics are on.

The connector counts without knowing whether anybody scrapes; a scheduler with ``--enable-metrics``
binds its labels once, and from then on every increment reaches ``/metrics`` as well.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from sglang.srt.disaggregation.delta.failures import Reason

#: Counter name (without ``_total``) -> what it counts. Units are in the names.
DECODE_COUNTERS = {
    "decode_prefix_prompt_tokens": "Prompt tokens of requests admitted by a decode server",
    "decode_prefix_hit_tokens": "Prompt tokens found in the decode radix tree at admission",
    "kv_transfer_requested_bytes": "KV bytes that decode asked prefill to send",
}
PREFILL_COUNTERS = {
    "kv_transfer_sent_bytes": "KV bytes that prefill posted to decode servers",
    "kv_transfer_skipped_tokens": "Prompt tokens not sent because decode already held them",
    "kv_transfer_stuck_workers": "Transfer workers that were found stuck or dead",
}
COUNTERS = {**DECODE_COUNTERS, **PREFILL_COUNTERS}
FAILURES = "kv_transfer_failed"


@cache
def _prometheus_counter(name: str, labelnames: tuple[str, ...]) -> Any:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    from prometheus_client import Counter

    return Counter(f"sglang:{name}", COUNTERS[name], labelnames)


@cache
def _failure_counter(labelnames: tuple[str, ...]) -> Any:
    from prometheus_client import Counter

    return Counter(f"sglang:{FAILURES}", "Rooms that failed on this server, by reason", labelnames)


class TransferStats:
    """This process's counters, by name. Increments come from any thread: a backend may send from
    several at once."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        #: Rooms that failed, by reason.
        self.failures: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._exported: dict[str, Any] = {}
        self._failures_exported: dict[Reason, Any] = {}
        self._lock = threading.Lock()

    def bind(self, names: Mapping[str, str], labels: Mapping[str, Any]) -> None:
        """Mirror the counters ``names``, and failures, to Prometheus under ``labels``."""
        for name in names:
            counter = _prometheus_counter(name, tuple(labels))
            self._exported[name] = counter.labels(**labels)
        failures = _failure_counter((*labels, "reason"))
        self._failures_exported = {
            reason: failures.labels(**labels, reason=reason.value) for reason in Reason
        }

    def add(self, name: str, amount: int) -> None:
        """Count ``amount`` more of ``name``."""
        with self._lock:
            self.totals[name] += amount
            exported = self._exported.get(name)
            if exported is not None:
                exported.inc(amount)

    def failed(self, reason: Reason) -> None:
        """Count one failed room."""
        with self._lock:
            self.failures[reason] += 1
            exported = self._failures_exported.get(reason)
            if exported is not None:
                exported.inc()


#: One for each process: a scheduler process has one transfer manager.
STATS = TransferStats()

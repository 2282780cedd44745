"""The router's Prometheus metrics. Gauges are read off the workers' state when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from benchmark.agentic.router.schedule import Scheduler

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)


class Metrics:
    """Counters and histograms of one router, in a registry of their own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(scheduler))
        self.requests = self._counter(
            "requests", "Requests that left a worker.", "worker", "role", "outcome"
        )
        self.refused = self._counter(
            "refused_requests", "Requests answered without a worker.", "reason"
        )
        self.retries = self._counter(
            "retries", "Requests sent elsewhere as a worker could not be reached.", "worker"
        )
        self.decisions = self._counter("decisions", "Workers chosen.", "role", "policy", "reason")
        self.offloads = self._counter(
            "offload_decisions", "Requests that could have been offloaded.", "outcome"
        )
        self.believed = self._counter(
            "believed_cached_tokens", "Prompt tokens that we took a worker to hold.", "worker"
        )
        self.reported = self._counter(
            "reported_cached_tokens",
            "Prompt tokens that it said it held, for requests where it said so.",
            "worker",
        )
        self.unreadable = self._counter("unreadable_events", "Events passed on but not understood.")
        self.decision_seconds = self._histogram("decision_seconds", "Choosing workers.")
        self.overhead_seconds = self._histogram(
            "overhead_seconds", "From a request's body to its dispatch: reading and choosing."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sglang:router_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"sglang:router_{name}", text, buckets=_SECONDS, registry=self._registry)

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self._registry)


class _State(Collector):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("worker", "role")
        workers = self._scheduler.workers
        for name, text, values in (
            ("worker_up", "Takes part.", [w.up for w in workers]),
            ("in_flight_requests", "Requests on it.", [w.requests for w in workers]),
            ("pending_tokens", "To compute, or receive.", [w.pending_tokens for w in workers]),
            ("ongoing_tokens", "Of requests on it.", [w.ongoing_tokens for w in workers]),
            ("pool_tokens", "Its KV pool.", [w.pool_tokens for w in workers]),
            (
                "believed_held_tokens",
                "Prompt blocks that it is believed to hold.",
                [len(w.index) * w.block_tokens for w in workers],
            ),
        ):
            gauge = GaugeMetricFamily(f"sglang:router_{name}", text, labels=labels)
            for worker, value in zip(workers, values, strict=True):
                gauge.add_metric((worker.url, worker.role), float(value))
            yield gauge
        pins = GaugeMetricFamily(
            "sglang:router_sessions", "Sessions whose worker is remembered.", labels=("role",)
        )
        for role, table in self._scheduler.pins.items():
            pins.add_metric((role,), len(table))
        yield pins

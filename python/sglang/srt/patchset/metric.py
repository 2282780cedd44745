"""How a metric of this package is declared, and the one that every server has."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any  # Any: prometheus_client has no types


@dataclass(frozen=True)
class Metric:
    """One metric: ``sglang:<name>`` on ``/metrics``; a counter's name ends in ``_total`` there."""

    #: Says the unit.
    name: str
    #: "counter", "gauge" or "histogram".
    kind: str
    #: Which servers have it: "decode", "prefill" or "both"; "every": aggregated ones too.
    side: str
    help: str
    #: Labels beside those that SGLang gives all its metrics.
    labels: tuple[str, ...] = ()
    #: Upper ends of a histogram's buckets, rising.
    buckets: tuple[float, ...] = ()
    #: The values of ``labels`` that a scrape shows before the first is counted.
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def exported_name(self) -> str:
        """As a scrape shows it."""
        return f"sglang:{self.name}{'_total' if self.kind == 'counter' else ''}"

    def child(self, labels: Mapping[str, object], **own: str) -> Any:
        """Prometheus' child of this metric (typed by a library without types): ``labels`` are
        SGLang's, ``own`` the values of ``self.labels``. Registered when it is first asked for."""
        return _registered(self, (*labels, *self.labels)).labels(**labels, **own)


@functools.cache
def _registered(metric: Metric, labelnames: tuple[str, ...]) -> Any:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    import prometheus_client

    options: dict[str, dict[str, Any]] = {
        "counter": {},
        "gauge": {"multiprocess_mode": "mostrecent"},
        "histogram": {"buckets": metric.buckets},
    }
    make = getattr(prometheus_client, metric.kind.capitalize())
    return make(f"sglang:{metric.name}", metric.help, labelnames, **options[metric.kind])


def declare(
    kind: str,
    side: str,
    texts: Mapping[str, str],
    *,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    values: tuple[tuple[str, ...], ...] = (),
) -> tuple[Metric, ...]:
    """Metrics of one kind: ``texts`` has the help of each, by name."""
    return tuple(
        Metric(name, kind, side, text, labels, buckets, values) for name, text in texts.items()
    )


#: What a server is (:mod:`sglang.srt.patchset.start_check`).
(INFO,) = declare(
    "gauge",
    "every",
    {"disagg_patchset_info": "1; what this server is, in the labels"},
    labels=("version", "groups", "protocol", "flags"),
)

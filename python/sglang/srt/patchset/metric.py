"""Declaration of a metric, and the metric that every server of both releases has."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any  # Any: prometheus_client has no types


@dataclass(frozen=True)
class Metric:
    """One metric: ``sglang:<name>`` on ``/metrics``; a counter's name ends in ``_total`` there."""

    #: Contains the unit.
    name: str
    #: "counter", "gauge" or "histogram".
    kind: str
    #: Servers that have it: "decode", "prefill" or "both"; "local": decode servers with local
    #: turns, on both releases; "every": aggregated ones too.
    side: str
    help: str
    #: Labels in addition to those of all of SGLang's metrics.
    labels: tuple[str, ...] = ()
    #: Upper bounds of a histogram's buckets, ascending.
    buckets: tuple[float, ...] = ()
    #: Values of ``labels`` that a scrape shows as zero before the first count.
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def exported_name(self) -> str:
        """Name in a scrape."""
        return f"sglang:{self.name}{'_total' if self.kind == 'counter' else ''}"

    def child(self, labels: Mapping[str, object], **own: str) -> Any:
        """Return Prometheus' child of this metric, registering the metric on first use. ``labels``:
        SGLang's; ``own``: the values of ``self.labels``."""
        return _registered(self, (*labels, *self.labels)).labels(**labels, **own)


@functools.cache
def _registered(metric: Metric, labelnames: tuple[str, ...]) -> Any:
    # Imported late, because SGLang must set PROMETHEUS_MULTIPROC_DIR before the first import.
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
    """Return metrics of one kind; ``texts``: name -> help."""
    return tuple(
        Metric(name, kind, side, text, labels, buckets, values) for name, text in texts.items()
    )


#: What a server is (:mod:`sglang.srt.patchset.start_check`, ``disaggregation.lead.identity``).
(INFO,) = declare(
    "gauge",
    "every",
    {"disagg_patchset_info": "1; what this server is, in the labels"},
    labels=("version", "groups", "protocol", "flags"),
)
#: Key of the same in each of the ``internal_states`` of ``/server_info``.
KEY = "disagg_patchset"

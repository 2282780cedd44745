"""Names of metrics in Prometheus 2 and 3, with the relabelling of the examples."""

from __future__ import annotations

import re

import prometheus_client
import pytest
import yaml
from prometheus_client.exposition import choose_encoder

from unit.documents import alert_rules, pages, queries
from unit.documents.test_metrics_pages import DECLARED, series, sglang_metrics, used

#: Version -> the header ``Accept`` of its scrapes.
ACCEPT = {
    "2.42": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
    "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3.0": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
}


def exposed(names: dict[str, str], accept: str) -> set[str]:
    """Return the names of samples that the installed ``prometheus_client`` sends for metrics
    (exported name -> kind)."""
    registry = prometheus_client.CollectorRegistry()
    for name, kind in names.items():
        getattr(prometheus_client, kind.capitalize())(name, "help", registry=registry)
    encode, _ = choose_encoder(accept)
    return set(re.findall(r"^([\w:]+)", encode(registry).decode(), re.MULTILINE))


def relabelled(names: set[str]) -> set[str]:
    """Return the names that Prometheus stores with the example's configuration."""
    (rule,) = queries.example_scrape()["metric_relabel_configs"]
    assert rule["source_labels"] == [rule["target_label"]] == ["__name__"]
    replacement = rule["replacement"].replace("$1", r"\1")
    pattern = re.compile(rule["regex"])
    return {pattern.sub(replacement, n) if pattern.fullmatch(n) else n for n in names}


@pytest.mark.parametrize("version", ACCEPT)
def test_queries_find_the_scraped_names(version: str) -> None:
    """Guards against a dashboard and alerts without data: to a Prometheus that does not ask for
    UTF-8, prometheus-client 0.23.1 and later sends ``sglang_`` for ``sglang:``."""
    ours = {each.exported_name: each.kind for each in DECLARED}
    found = relabelled(exposed(sglang_metrics() | ours, ACCEPT[version]))
    assert series(ours) - found == set()
    expressions = [*queries.dashboard(), *alert_rules.expressions(), *alert_rules.runbook_queries()]
    assert used(expressions) - found == set()
    assert relabelled({"other_sglang_x", "up"}) == {"other_sglang_x", "up"}


def test_the_pod_monitor_has_the_same_relabelling() -> None:
    """Guards against two rules that differ; the operator spells fields in another way."""
    (rule,) = queries.example_scrape()["metric_relabel_configs"]
    monitor = yaml.safe_load((pages.ROOT / "examples/podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    spelled = {re.sub("_([a-z])", lambda part: part[1].upper(), key): rule[key] for key in rule}
    assert endpoint["metricRelabelings"] == [spelled]
    page = (pages.ROOT / "docs/operations/metrics.md").read_text()
    (shown,) = re.findall(r"```yaml\n(metric_relabel_configs:.*?)```", page, re.DOTALL)
    assert yaml.safe_load(shown)["metric_relabel_configs"] == [rule]

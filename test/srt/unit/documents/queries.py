"""Queries of dashboard, alerts and runbook, for the tests of pages and of servers."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from unit.documents.pages import ROOT

DASHBOARD = ROOT / "docs/operations/grafana_dashboard.json"
PROMETHEUS = ROOT / "examples/prometheus.yml"
#: A metric with its matchers.
_SELECTOR = re.compile(r"sglang:\w+(?:\{[^}]*\})?")


def dashboard() -> list[str]:
    """Return the expressions of the dashboard's panels and variables."""
    content = json.loads(DASHBOARD.read_text())
    variables = [str(variable["query"]) for variable in content["templating"]["list"]]
    return variables + [
        target["expr"] for panel in content["panels"] for target in panel.get("targets", ())
    ]


def dashboard_queries() -> list[str]:
    """Return the dashboard's expressions as PromQL, with all servers selected."""
    queries = []
    for expression in dashboard():
        # Grafana's own function; without matchers it would name no metric.
        values = re.search(r"label_values\((.*), (\w+)\)", expression)
        if values is not None:
            expression = f"group by ({values[2]}) ({values[1]})"
        if "sglang:" in expression:
            expression = expression.replace("$__rate_interval", "5m")
            queries.append(re.sub(r"\$\w+", ".*", expression))
    return queries


def selectors(expression: str) -> set[str]:
    """Return the metrics of an expression with their matchers."""
    return set(_SELECTOR.findall(expression))


def metrics(expression: str) -> set[str]:
    """Return the names of the metrics of an expression."""
    return set(re.findall(r"sglang:\w+", expression))


def example_scrape() -> dict[str, Any]:
    """Return the scrape configuration of the example."""
    (config,) = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    return dict(config)

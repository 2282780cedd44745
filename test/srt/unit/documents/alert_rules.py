"""The alert rules and the series that test them, for the tests of pages and of servers."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from unit.documents.pages import ROOT

RULES = ROOT / "docs/operations/prometheus_rules.yaml"
RUNBOOK = ROOT / "docs/operations/runbook.md"
TESTS = ROOT / "docs/operations/prometheus_rules_test.yaml"
#: Labels that Prometheus adds, not the server.
SCRAPED = {"instance", "job"}


def rules() -> dict[str, dict[str, Any]]:
    """Return the alerts by name."""
    content = yaml.safe_load(RULES.read_text())
    return {rule["alert"]: rule for group in content["groups"] for rule in group["rules"]}


def expressions() -> list[str]:
    """Return the expression of each alert."""
    return [rule["expr"] for rule in rules().values()]


def runbook_queries() -> list[str]:
    """Return the queries of the runbook."""
    (block,) = re.findall(r"```promql\n(.*?)```", RUNBOOK.read_text(), re.DOTALL)
    return [line for line in block.splitlines() if not line.startswith("#")]


def cases() -> list[dict[str, Any]]:
    """Return the test cases of promtool."""
    return list(yaml.safe_load(TESTS.read_text())["tests"])


def series() -> set[tuple[str, str, frozenset[str]]]:
    """Return the name, the server's role and the exported labels of each series in the cases."""
    all_series = set()
    for case in cases():
        for series_ in case["input_series"]:
            name, _, text = series_["series"].partition("{")
            labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
            all_series.add((name, labels.get("engine_type", ""), frozenset(labels) - SCRAPED))
    return all_series


def program(name: str) -> str | None:
    """Return ``prometheus`` or ``promtool``, which ``make env`` puts beside the interpreter, or
    None if it is missing."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)

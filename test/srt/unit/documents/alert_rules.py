"""The alert rules and the series that they are tested on, for the tests of pages and of servers."""

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
#: Put there by Prometheus, not by the server.
SCRAPED = {"instance", "job"}


def rules() -> dict[str, dict[str, Any]]:
    """Each alert by its name."""
    content = yaml.safe_load(RULES.read_text())
    return {rule["alert"]: rule for group in content["groups"] for rule in group["rules"]}


def expressions() -> list[str]:
    """What each alert asks."""
    return [rule["expr"] for rule in rules().values()]


def runbook_queries() -> list[str]:
    """What the runbook has its reader ask."""
    (block,) = re.findall(r"```promql\n(.*?)```", RUNBOOK.read_text(), re.DOTALL)
    return [line for line in block.splitlines() if not line.startswith("#")]


def cases() -> list[dict[str, Any]]:
    """The test cases of promtool."""
    return list(yaml.safe_load(TESTS.read_text())["tests"])


def series() -> set[tuple[str, str, frozenset[str]]]:
    """Of each series in the cases: its name, the role of its server, the labels that it exports."""
    found = set()
    for case in cases():
        for each in case["input_series"]:
            name, _, text = each["series"].partition("{")
            labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
            found.add((name, labels.get("engine_type", ""), frozenset(labels) - SCRAPED))
    return found


def promtool() -> str | None:
    """The program, which ``make env`` puts beside the interpreter; None where it is missing."""
    beside = Path(sys.executable).with_name("promtool")
    return str(beside) if beside.exists() else shutil.which("promtool")

"""The alert rules: Prometheus accepts them, and each alert fires in time and links to the
runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import promql_parser
import pytest

from sglang.srt.mem_cache.buffer_only import metrics as buffer_only
from unit.documents import alert_rules, pages, queries
from unit.documents.test_metrics_pages import DECLARED, sglang_metrics

#: Labels of SGLang's scheduler and storage metrics; the former without optional labels.
SCHEDULER = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
STORAGE = {"storage_backend", "tp_rank", "dp_rank", "pp_rank", "pp_size"}


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("check", "rules"), alert_rules.RULES),
        (("test", "rules"), alert_rules.TESTS),
        (("check", "config"), queries.PROMETHEUS),
    ],
    ids=["check rules", "test rules", "check config"],
)
def test_promtool(command: tuple[str, ...], file: Path) -> None:
    """Guards against rules or a configuration that Prometheus refuses, and against an alert that
    stays silent, fires for a healthy server or too early, or lacks the labels that its text
    names."""
    promtool = alert_rules.program("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: package prometheus)")
    done = subprocess.run([promtool, *command, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_some_case() -> None:
    """Guards against a rule without a series that makes it fire."""
    fired, quiet = set(), set()
    for case in alert_rules.cases():
        for test in case["alert_rule_test"]:
            (fired if test.get("exp_alerts") else quiet).add(test["alertname"])
    assert fired == quiet == set(alert_rules.rules())


def test_the_series_have_the_labels_of_servers() -> None:
    """Guards against series that no server exports: a rule would pass its test and stay silent."""
    ours = {metric.exported_name: set(metric.labels) for metric in DECLARED}
    storage = {metric.exported_name for metric in buffer_only.BUFFER_METRICS.values()}
    for name, _, labels in alert_rules.series():
        shared = STORAGE if name in storage else SCHEDULER
        assert labels == shared | ours.get(name, set()), name
        assert name in ours or name in sglang_metrics()


def test_expressions_parse() -> None:
    """Guards against a panel or a query that Prometheus refuses, also if promtool is missing."""
    panels = queries.dashboard_queries()
    for expression in [*panels, *alert_rules.expressions(), *alert_rules.runbook_queries()]:
        promql_parser.parse(expression)
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (instance) (rate(sglang:num_running_reqs[5m])")


def test_every_alert_has_a_severity_and_a_runbook_section() -> None:
    """Guards against an alert without guidance for the person on call."""
    rules = alert_rules.rules()
    severity = {name: rule["labels"]["severity"] for name, rule in rules.items()}
    assert set(severity.values()) == {"critical", "warning", "info"}
    text = alert_rules.RUNBOOK.read_text().split("\n## Alerts\n")[1]
    sections = dict(re.findall(r"^### (\w+)\n\n(\w+)\.", text, re.MULTILINE))
    assert {name: word.lower() for name, word in sections.items()} == severity
    for rule in rules.values():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert pages.ROOT / page == alert_rules.RUNBOOK and anchor == rule["alert"].lower()
        assert anchor in pages.anchors(alert_rules.RUNBOOK)

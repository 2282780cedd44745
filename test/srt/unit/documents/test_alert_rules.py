"""The alert rules: that Prometheus takes them, when each fires, and where it leads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import promql_parser
import pytest

from sglang.srt.mem_cache.buffer_only import metrics as buffer_only
from unit.documents import alert_rules, pages
from unit.documents.test_metrics_pages import (
    DECLARED,
    OPERATIONS,
    dashboard,
    series,
    theirs,
    used,
)

RUNBOOK = OPERATIONS / "runbook.md"
#: What SGLang's scheduler and storage metrics carry; the former without options for more.
SCHEDULER = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
STORAGE = {"storage_backend", "tp_rank", "dp_rank", "pp_rank", "pp_size"}


@pytest.mark.parametrize("command", [("check", alert_rules.RULES), ("test", alert_rules.TESTS)])
def test_promtool(command: tuple[str, object]) -> None:
    """Guards against rules that Prometheus refuses, and an alert that does not fire, or fires too
    early, for a server that is well, or without the labels that its text names."""
    promtool = alert_rules.promtool()
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: package prometheus)")
    verb, file = command
    done = subprocess.run([promtool, verb, "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_some_case() -> None:
    """Guards against a rule that was added without series."""
    fired, quiet = set(), set()
    for case in alert_rules.cases():
        for each in case["alert_rule_test"]:
            (fired if each.get("exp_alerts") else quiet).add(each["alertname"])
    assert fired == quiet == set(alert_rules.rules())


def test_the_series_have_the_labels_of_servers() -> None:
    """Guards against series that no server exports: a rule would pass its test and stay silent."""
    ours = {each.exported_name: set(each.labels) for each in DECLARED}
    storage = {each.exported_name for each in buffer_only.METRICS.values()}
    for name, _, labels in alert_rules.series():
        shared = STORAGE if name in storage else SCHEDULER
        assert labels == shared | ours.get(name, set()), name
        assert name in ours or name in theirs()


def expressions() -> Iterator[str]:
    """Of the rules, of the dashboard and of the runbook."""
    yield from (rule["expr"] for rule in alert_rules.rules().values())
    for each in dashboard():
        if "label_values" not in each and not each.startswith("prometheus"):
            yield each.replace("$__rate_interval", "5m").replace("$", "")
    yield from runbook_queries()


def runbook_queries() -> list[str]:
    (block,) = re.findall(r"```promql\n(.*?)```", RUNBOOK.read_text(), re.DOTALL)
    return [line for line in block.splitlines() if not line.startswith("#")]


def test_expressions_parse() -> None:
    """Guards against a panel or a query that Prometheus refuses, also where promtool is missing."""
    for each in expressions():
        promql_parser.parse(each)
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (instance) (rate(sglang:num_running_reqs[5m])")


def test_the_queries_of_the_runbook_use_metrics_that_exist() -> None:
    """Guards against an empty answer at night."""
    kinds = {each.exported_name: each.kind for each in DECLARED}
    assert len(runbook_queries()) >= 8
    assert used(runbook_queries()) - series(kinds) - series(theirs()) == set()


def test_every_alert_has_a_severity_and_a_part_of_the_runbook() -> None:
    """Guards against an alert that says nothing to the person on call."""
    rules = alert_rules.rules()
    severity = {name: rule["labels"]["severity"] for name, rule in rules.items()}
    assert set(severity.values()) == {"critical", "warning", "info"}
    text = RUNBOOK.read_text().split("\n## Alerts\n")[1]
    parts = dict(re.findall(r"^### (\w+)\n\n(\w+)\.", text, re.MULTILINE))
    assert {name: word.lower() for name, word in parts.items()} == severity
    for rule in rules.values():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert pages.ROOT / page == RUNBOOK and anchor == rule["alert"].lower()
        assert anchor in pages.anchors(RUNBOOK)

"""The operator's page of metrics, against those that exist on SGLang 0.5.23."""

from __future__ import annotations

import json
import re

import pytest

from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.patchset.metric import INFO
from unit.documents import alert_rules, queries
from unit.documents.test_metrics_pages import DECLARED, OPERATIONS, series, sglang_metrics

pytestmark = pytest.mark.server()
PAGE = (OPERATIONS / "metrics.md").read_text()


@pytest.fixture(scope="module")
def origins() -> dict[str, str]:
    """The metrics of the page that exist here -> their origin in its column *0.5.23*."""
    sglang = sglang_metrics()
    names = {metric.exported_name: "SGLang" for metric in DECLARED}
    own = [INFO, *(metric for metric in METRICS.values() if metric.side == "local")]
    return {name: origin for name, origin in names.items() if name in sglang} | {
        metric.exported_name: "package" for metric in own
    }


@pytest.fixture(scope="module")
def has_data(origins: dict[str, str]) -> set[str]:
    """The names of all series that a server can have here."""
    kinds = {metric.exported_name: metric.kind for metric in DECLARED}
    return series(sglang_metrics()) | series({name: kinds[name] for name in origins})


def test_the_page_says_which_metrics_exist(origins: dict[str, str]) -> None:
    """Guards against a column that names a metric without samples. Tables without the column have
    their only metric in the text above them."""
    marked = re.findall(r"^\| `(sglang:\w+)` \|[^|]*\|[^|]*\| (SGLang|package) \|", PAGE, re.M)
    named = re.findall(r"^On 0\.5\.23 SGLang itself has `(sglang:\w+)`", PAGE, re.M)
    assert len(marked) > len(named) == 1
    assert dict(marked) | dict.fromkeys(named, "SGLang") == origins


def test_the_page_lists_panels_without_data(has_data: set[str]) -> None:
    """Guards against an operator who takes an empty panel for a healthy server."""
    rows: dict[str, dict[str, bool]] = {}
    for panel in json.loads(queries.DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            shown = rows[panel["title"]] = {}
        else:
            expressions = [queries.metrics(target["expr"]) for target in panel["targets"]]
            shown[panel["title"]] = any(names <= has_data for names in expressions)
    expected = {}
    for row, panels in rows.items():
        empty = [f"*{title}*" for title, is_shown in panels.items() if not is_shown]
        full = [f"*{title}*" for title, is_shown in panels.items() if is_shown]
        if len(empty) > len(full):
            expected[row] = "all" + " but " * bool(full) + "; ".join(full)
        elif empty:
            expected[row] = "; ".join(empty)
    (table,) = re.findall(r"^\| row of the dashboard .*\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.M)
    assert dict(re.findall(r"^\| (.*?) \| (.*?) \|$", table, re.M)) == expected


def test_the_page_lists_alerts_that_can_fire(has_data: set[str]) -> None:
    """Guards against a fleet that relies on an alert without data."""
    (listed,) = re.findall(r"^Alerts that can fire there: ((?:`\w+`(?:, )?)+)\.", PAGE, re.M)
    can_fire = {
        name
        for name, rule in alert_rules.rules().items()
        if queries.metrics(rule["expr"]) <= has_data
    }
    assert set(re.findall(r"\w+", listed)) == can_fire

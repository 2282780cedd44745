"""The operator's page of metrics, dashboard and alerts, against the registered metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from sglang.srt.disaggregation.delta.metrics import METRICS, REASONS, REFUSALS
from sglang.srt.mem_cache.buffer_only import metrics as buffer_only
from unit.documents import alert_rules, pages, queries
from unit.documents.pages import ROOT, SITE_PACKAGES

OPERATIONS = ROOT / "docs" / "operations"
_ROW = re.compile(r"^\| `(sglang:\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


#: Both feature groups' metrics.
DECLARED = (*METRICS.values(), *buffer_only.BUFFER_METRICS.values())


@pytest.fixture(scope="module")
def ours() -> dict[str, tuple[str, list[str]]]:
    """The metrics of the patch set: exported name -> type and labels."""
    return {metric.exported_name: (metric.kind, list(metric.labels)) for metric in DECLARED}


def sglang_metrics() -> dict[str, str]:
    """Return SGLang's metrics, from its source: name -> type."""
    source = (SITE_PACKAGES / "sglang/srt/observability/metrics_collector.py").read_text()
    pattern = r'(Gauge|Counter|Histogram|Summary)\(\s*(?:#[^\n]*\s*)?name="(sglang:\w+)"'
    return {name: kind.lower() for kind, name in re.findall(pattern, source)}


def series(metrics: dict[str, str]) -> set[str]:
    """Return the names under which ``metrics`` (name -> type) are scraped."""
    names = set()
    for name, kind in metrics.items():
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names.update(name + part for part in parts)
    return names


def used(expressions: Iterable[str]) -> set[str]:
    return {name for expression in expressions for name in queries.metrics(expression)}


def test_the_page_lists_the_metrics(ours) -> None:
    """Guards against an undocumented metric, and a documented one that no longer exists."""
    rows = _ROW.findall((OPERATIONS / "metrics.md").read_text())
    listed = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}
    assert len(rows) == len(listed)
    assert listed == ours
    assert {*ours} & {*sglang_metrics()} == set(), "Prometheus refuses a duplicate"


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_metrics_as_they_are_scraped(ours, page) -> None:
    """Guards against a name without samples in Prometheus, such as a counter's without _total."""
    known = series({name: kind for name, (kind, _) in ours.items()}) | series(sglang_metrics())
    known |= set(ours) | set(sglang_metrics())  # histograms under their base name
    names = set(re.findall(r"sglang:[a-z]\w*[a-z0-9](?![\w*])", page.read_text()))
    assert names - known == set()


@pytest.mark.parametrize(
    ("expressions", "min_expressions"),
    [
        pytest.param(queries.dashboard, 20, id="dashboard"),
        pytest.param(alert_rules.expressions, 8, id="alerts"),
        pytest.param(alert_rules.runbook_queries, 8, id="runbook"),
    ],
)
def test_queries_use_metrics_that_exist(ours, expressions, min_expressions) -> None:
    """Guards against an empty panel, an alert that never fires, and a runbook query without
    result."""
    known = series({name: kind for name, (kind, _) in ours.items()}) | series(sglang_metrics())
    assert len(expressions()) >= min_expressions
    assert used(expressions()) - known == set()


def test_the_dashboard_shows_every_metric_of_the_patch_set(ours) -> None:
    """Guards against a metric that is scraped but not shown."""
    shown = used(queries.dashboard())
    shown |= {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert set(ours) - shown == set()


def test_the_reasons_of_refused_memory_are_explained() -> None:
    """Guards against an unexplained label of ``decode_admission_refused``."""
    page = (ROOT / "docs/operations/metrics.md").read_text()
    (row,) = [line for line in page.splitlines() if ":decode_admission_refused_total`" in line]
    assert [reason for reason in REFUSALS if f"`{reason}`" not in row] == []


def test_the_reasons_of_local_turns_are_explained() -> None:
    """Guards against an unexplained label of ``decode_turns``: the page has a row for each
    meaning."""
    labels: dict[str, list[str]] = {}
    for label, meaning in REASONS.items():
        labels.setdefault(meaning, []).append(f"`{label}`")
    rows = [f"| {', '.join(names)} | {meaning} |" for meaning, names in labels.items()]
    page = (ROOT / "docs/advanced_features/pd_local_turns.md").read_text()
    assert "\n".join(["| reason | meaning |", "|---|---|", *rows, ""]) in page

"""The table of a summary: printed after a run, and in README.md from the committed results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: of JSON

from benchmark.harness.report import markdown

COLUMNS = ("page", "running", "in line", "admits", "stock", "ours", "ours over stock", "matches")


def rows(cases: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One a case: microseconds of CPU, median / p99."""
    found = []
    for case in cases:
        stock, ours = case["stock"], case["ours"]
        found.append(
            [
                *(str(case["page"]), str(case["running"])),
                *(f"{case['queued']:,}", str(case["admits"])),
                *(f"{of['cpu_median_us']:,.0f} / {of['cpu_p99_us']:,.0f}" for of in (stock, ours)),
                f"{ours['cpu_median_us'] - stock['cpu_median_us']:,.0f}",
                f"{ours['matches_median']:.0f}",
            ]
        )
    return found


def table() -> str:
    """README.md: of the committed result."""
    summary = json.loads((Path(__file__).parent / "results" / "admission.json").read_text())
    machine = summary["machine"]
    intro = f"{machine['machine']}; {machine['date']}, commit {machine['commit']}:\n\n"
    return intro + markdown(COLUMNS, rows(summary["cases"]))

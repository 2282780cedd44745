"""The table of a summary: printed after a run, and in README.md from the committed results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: JSON values

from benchmark.harness.report import markdown

COLUMNS = ("page", "running", "queued", "admits", "stock", "ours", "ours over stock", "matches")
WRITES_COLUMNS = ("page", "running", "without", "with", "with over without", "bound")
#: Microseconds that decode's writes may add to a step, at the mean.
WRITES_BOUND = 100


def rows(cases: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return one row a case: microseconds of CPU, median / p99."""
    table_rows = []
    for case in cases:
        stock, ours = case["stock"], case["ours"]
        table_rows.append(
            [
                *(str(case["page"]), str(case["running"])),
                *(f"{case['queued']:,}", str(case["admits"])),
                *(
                    f"{arm['cpu_median_us']:,.0f} / {arm['cpu_p99_us']:,.0f}"
                    for arm in (stock, ours)
                ),
                f"{ours['cpu_median_us'] - stock['cpu_median_us']:,.0f}",
                f"{ours['matches_median']:.0f}",
            ]
        )
    return table_rows


def writes_rows(cases: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return one row a case: microseconds of CPU, mean / median / p99."""
    table_rows = []
    for case in cases:
        arms = (case["without"], case["with"])
        pairs = [[arm[f"cpu_{name}_us"] for arm in arms] for name in ("mean", "median", "p99")]
        without, with_writes = zip(*pairs, strict=True)
        added = [after - before for before, after in pairs]
        holds = "holds" if added[0] <= WRITES_BOUND else "does not hold"
        times = [" / ".join(f"{us:,.0f}" for us in arm) for arm in (without, with_writes, added)]
        table_rows.append([str(case["page"]), str(case["running"]), *times, holds])
    return table_rows


def table() -> str:
    """Return README.md's table of the committed result."""
    return _committed("admission.json", COLUMNS, rows)


def writes() -> str:
    """Return README.md's table of what decode's writes cost."""
    return _committed("writes.json", WRITES_COLUMNS, writes_rows)


def _committed(file: str, columns: Sequence[str], rows_of: Any) -> str:
    summary = json.loads((Path(__file__).parent / "results" / file).read_text())
    machine = summary["machine"]
    intro = f"{machine['machine']}; {machine['date']}, commit {machine['commit']}:\n\n"
    return intro + markdown(columns, rows_of(summary["cases"]))

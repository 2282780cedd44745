"""``summary.json``: the numbers of the page, for programs. Times in seconds; ``[value, low, high]``
where a number has an interval."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmark.agentic.report.numbers import (
    AGAINST,
    Numbers,
    described,
    interval,
    numbers,
)
from benchmark.agentic.report.verdict import (
    answer,
    answers,
    claims,
    grid_sure,
    holds,
    measured,
    warnings,
)
from benchmark.agentic.studies.record import Run


def summary(run: Run) -> dict[str, Any]:
    """The file's content."""
    of = numbers(run)
    where = dict(run.environment)
    if not run.fleet["rig"]:  # it is the sender's: what the servers are is not known
        where = {"date": where.pop("date"), "sent_from": where}
    arms = {point.name: measured(run, of, point.name) for point in run.points}
    return {
        **where,
        "command": run.command,
        "study": msgspec.to_builtins(run.study),
        "unit": run.study.load.unit,
        "titles": run.titles,
        "fleet": run.fleet,
        "servers": run.servers,
        "trace": run.trace,
        "answer": answer(run, of),
        "holds": list(holds(run, of)),
        "warnings": list(warnings(run, of)),
        "claims": claims(run, of),
        "answers": answers(run),
        "loads": {
            point: {arm: _arm(run, of, point, arm, there[0]) for arm in there}
            for point, there in arms.items()
        },
    }


def _arm(run: Run, of: Numbers, point: str, arm: str, base: str) -> dict[str, Any]:
    cells = of.cells.loc[point, arm]
    mine = of.requests[(of.requests["point"] == point) & (of.requests["arm"] == arm)]
    sure = grid_sure(run) if run.study.grid else 0.95
    kinds = described(mine.groupby("kind")).join(mine["kind"].value_counts().rename("requests"))
    return {
        "requests": len(mine),
        "failed": int(mine["error"].notna().sum()),
        "numbers": {name: interval(cells[name]) for name in cells if cells[name].notna().any()},
        "of_first_arm": None
        if arm == base
        else {name: of.ratio(point, (arm, base), name, sure=sure) for name in AGAINST},
        "rounds": list(cells[f"{run.study.by}_mean"]),
        "classes": kinds.to_dict("index"),
        "reached": next(cell.via for cell in run.cells if cell.arm == arm),
    }

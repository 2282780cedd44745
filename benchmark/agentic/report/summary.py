"""``summary.json``: the numbers of the page, for programs. Times in seconds; a number that has an
interval is ``[value, low, high]``."""

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
    """Return the file's content."""
    run_numbers = numbers(run)
    environment = dict(run.environment)
    if not run.fleet["rig"]:  # describes the sending machine; the servers' machines are unknown
        environment = {"date": environment.pop("date"), "sent_from": environment}
    arms = {point.name: measured(run, run_numbers, point.name) for point in run.points}
    return {
        **environment,
        "command": run.command,
        "study": msgspec.to_builtins(run.study),
        "unit": run.study.load.unit,
        "titles": run.titles,
        "fleet": run.fleet,
        "servers": run.servers,
        "trace": run.trace,
        "answer": answer(run, run_numbers),
        "holds": list(holds(run, run_numbers)),
        "warnings": list(warnings(run, run_numbers)),
        "claims": claims(run, run_numbers),
        "answers": answers(run),
        "loads": {
            point: {arm: _arm(run, run_numbers, point, arm, there[0]) for arm in there}
            for point, there in arms.items()
        },
    }


def _arm(run: Run, run_numbers: Numbers, point: str, arm: str, base: str) -> dict[str, Any]:
    cells = run_numbers.cells.loc[point, arm]
    mine = run_numbers.requests[
        (run_numbers.requests["point"] == point) & (run_numbers.requests["arm"] == arm)
    ]
    sure = grid_sure(run) if run.study.grid else 0.95
    kinds = described(mine.groupby("kind")).join(mine["kind"].value_counts().rename("requests"))
    return {
        "requests": len(mine),
        "failed": int(mine["error"].notna().sum()),
        "numbers": {name: interval(cells[name]) for name in cells if cells[name].notna().any()},
        "of_first_arm": None
        if arm == base
        else {name: run_numbers.ratio(point, (arm, base), name, sure=sure) for name in AGAINST},
        "rounds": list(cells[f"{run.study.by}_mean"]),
        "classes": kinds.to_dict("index"),
        "reached": next(cell.via for cell in run.cells if cell.arm == arm),
    }

"""Figures of the page. One colour an arm, the same in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.agentic.report import grid
from benchmark.agentic.report.numbers import NAMES, QUANTITIES, STAGES, STATISTICS, Level, plain
from benchmark.agentic.studies.record import Run
from benchmark.harness import plot


def draw(run: Run, levels: Sequence[Level], folder: Path) -> dict[str, str]:
    """Writes PNG files; title to file name. At most six arms in a picture: a seventh would not be
    told apart."""
    colors = dict(zip(run.titles, plot.COLORS, strict=False))
    last, at = levels[-1], f"at {levels[-1].said}"
    drawn = {}

    @contextmanager
    def figure(title: str, name: str, *size: Any) -> Iterator[Any]:
        with plot.panels(folder / name, *size) as axes:
            yield axes
            axes[0].legend(fontsize=7, frameon=False)
        drawn[title] = name

    if run.study.grid:
        drawn["Where which arm is better: a cell a load"] = grid.draw(run, levels, folder)
        return drawn
    title = "Mean times and goodput over load, with 95 % intervals; dashed: the SLO"
    with figure(title, "load.png", 4, (3.75, 3.6)) as axes:
        for axis, quantity in zip(axes, QUANTITIES, strict=False):
            _over_load(axis, run, levels, quantity, colors)
        _goodput(axes[3], run, levels, colors)
    with figure(
        f"Latency by class {at}: bar p50, line to p90", "classes.png", 2, (5.5, 3.6)
    ) as axes:
        for axis, quantity in zip(axes, ("ttft", "tpot"), strict=True):
            _by_class(axis, run, last, quantity, colors)
        axes[1].sharey(axes[0])
    if any(level.usage(arm) for level in levels for arm in level.cells):
        with figure(f"KV pools over time {at}", "pools.png", 1, (9, 3.4)) as (axis,):
            for arm, color in colors.items():
                for cell in last.cells.get(arm, [])[:1]:
                    _occupancy(axis, cell.samples, run.titles[arm], color)
            axis.set_xlabel("s of the load, first round")
            axis.set_ylabel("KV pool in use by requests, %")
            axis.set_ylim(0, 105)
    of = {arm: stages for arm in last.cells if (stages := last.stages(arm)) is not None}
    if of:
        with figure(f"Stages of a transfer {at}", "stages.png", 1, (6, 3.4)) as (axis,):
            names = [run.titles[arm].replace(", ", ",\n") for arm in of]
            parts = {stage: [each[stage] * 1e3 for each in of.values()] for stage in STAGES}
            plot.stacked(axis, "mean of a transfer, ms", names, parts)
    return drawn


def _over_load(
    axis: Any, run: Run, levels: Sequence[Level], quantity: str, colors: dict[str, str]
) -> None:
    for arm, color in colors.items():
        there = [level for level in levels if arm in level.cells]
        of = [level.interval(level.values(arm, quantity)) for level in there]
        middle = [each.value * 1e3 for each in of]
        low = [max(0.0, (each.value - each.low) * 1e3) for each in of]
        high = [max(0.0, (each.high - each.value) * 1e3) for each in of]
        loads = [level.load for level in there]
        axis.errorbar(
            loads, middle, (low, high), label=run.titles[arm], color=color, marker="o", capsize=3
        )
    slo = {"ttft": run.study.slo.ttft_s, "tpot": run.study.slo.tpot_s}.get(quantity)
    if slo is not None:
        axis.axhline(slo * 1e3, color="black", linestyle="--", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_ylabel(f"mean {NAMES[quantity]}, ms")
    axis.set_xlabel(run.unit)


def _goodput(axis: Any, run: Run, levels: Sequence[Level], colors: dict[str, str]) -> None:
    for arm, color in colors.items():
        there = [level for level in levels if arm in level.cells]
        rates = [level.goodput(arm) for level in there]
        axis.plot([level.load for level in there], rates, color=color, marker="o")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("requests/s within the SLO")
    axis.set_xlabel(run.unit)


def _by_class(axis: Any, run: Run, level: Level, quantity: str, colors: dict[str, str]) -> None:
    classes = level.kinds
    width = 0.8 / max(1, len(colors))
    for number, (arm, color) in enumerate(colors.items()):
        if arm not in level.cells:
            continue
        places = [i + number * width for i in range(len(classes))]
        values = [level.values(arm, quantity, name) for name in classes]
        middle, upper = ([plain(v, STATISTICS[s]) * 1e3 for v in values] for s in ("p50", "p90"))
        upper = [high - m for high, m in zip(upper, middle, strict=True)]
        axis.bar(places, middle, width, color=color, label=run.titles[arm])
        axis.errorbar(places, middle, ([0.0] * len(upper), upper), fmt="none", ecolor="black")
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(classes))], classes)
    axis.set_yscale("log")
    axis.set_ylabel(f"{NAMES[quantity]}, ms")


def _occupancy(axis: Any, rows: Sequence[dict[str, float]], title: str, color: str) -> None:
    for number, server in enumerate(sorted({row["server"] for row in rows})):
        mine = [row for row in rows if row["server"] == server and "usage" in row]
        label = title if number == 0 else None
        usage = [row["usage"] * 100 for row in mine]
        axis.step([row["at"] for row in mine], usage, where="post", color=color, label=label)

"""Figures of the page. One colour an arm, the same in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.agentic.replay.classes import NAMES as CLASSES
from benchmark.agentic.studies.numbers import NAMES, QUANTITIES, STAGES, STATISTICS, Level, plain
from benchmark.agentic.studies.record import Run

COLORS = ("#6b6b6b", "#d1495b", "#edae49", "#2a7fb8", "#3c9d6b", "#8d5a97")
"""At most six arms in a picture; a seventh would not be told apart."""


def draw(run: Run, levels: Sequence[Level], folder: Path) -> dict[str, str]:
    """Writes PNG files; title to file name. Needs matplotlib (the ``bench`` extra)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot
    from PIL import Image  # comes with it

    folder.mkdir(parents=True, exist_ok=True)
    colors = dict(zip(run.titles, COLORS, strict=False))
    drawn = {}

    def save(figure: Any, title: str, name: str) -> None:
        figure.tight_layout()
        figure.savefig(folder / name, dpi=100)
        pyplot.close(figure)
        with Image.open(folder / name) as image:  # a third of the bytes
            image.convert("RGB").quantize(64).save(folder / name, optimize=True)
        drawn[title] = name

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.6))
    for axis, quantity in zip(axes, QUANTITIES, strict=False):
        _over_load(axis, run, levels, quantity, colors)
    _goodput(axes[3], run, levels, colors)
    axes[0].legend(fontsize=7, frameon=False)
    save(
        figure, "Mean times and goodput over load, with 95 % intervals; dashed: the SLO", "load.png"
    )

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), sharey=True)
    for axis, quantity in zip(axes, ("ttft", "tpot"), strict=True):
        _by_class(axis, run, levels[-1], quantity, colors)
    axes[0].legend(fontsize=7, frameon=False)
    title = f"Latency by class at {levels[-1].load:g} {run.unit}: bar p50, line to p90"
    save(figure, title, "classes.png")

    if any(level.gauges(arm, "usage") for level in levels for arm in level.cells):
        figure, axis = pyplot.subplots(figsize=(9, 3.4))
        for arm, color in colors.items():
            for cell in levels[-1].cells.get(arm, [])[:1]:
                _occupancy(axis, cell.samples, run.titles[arm], color)
        axis.set_xlabel("s of the load, first round")
        axis.set_ylabel("KV pool in use by requests, %")
        axis.set_ylim(0, 105)
        axis.legend(fontsize=7, frameon=False)
        save(figure, f"KV pools over time at {levels[-1].load:g} {run.unit}", "pools.png")
    stages = {arm: of for arm in colors if (of := _stages(levels[-1], arm)) is not None}
    if stages:
        figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(stages)))
        _stacked(axis, {run.titles[arm]: of for arm, of in stages.items()})
        axis.legend(fontsize=7, frameon=False, ncols=len(STAGES))
        save(figure, f"Stages of a transfer at {levels[-1].load:g} {run.unit}", "stages.png")
    return drawn


def _stages(level: Level, arm: str) -> dict[str, float] | None:
    return level.stages(arm) if arm in level.cells else None


def _stacked(axis: Any, stages: dict[str, dict[str, float]]) -> None:
    """A bar an arm; here colours are stages."""
    left = [0.0] * len(stages)
    for stage, color in zip(STAGES, COLORS, strict=False):
        widths = [of[stage] * 1e3 for of in stages.values()]
        axis.barh(list(stages), widths, left=left, color=color, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("mean of a transfer, ms")
    axis.set_ylim(len(stages) + 0.2, -0.6)  # the first arm on top


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
    classes = [name for name in CLASSES if name in level.classes]
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

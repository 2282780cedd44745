"""The picture of a grid: for which load which arm is better than the first one, and in what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmark.agentic.report.numbers import Level
from benchmark.agentic.report.verdict import AGAINST, CELL, SHOWN, compared, standing
from benchmark.agentic.studies.record import Run
from benchmark.harness import plot

COLORS = {1: "#55a868", -1: "#c0504d", 0: "#e8e8e8"}
FILE = "grid.svg"


def draw(run: Run, levels: Sequence[Level], folder: Path) -> str:
    """A row of panels a quantity, a column an arm: the last field of the grid and the load across,
    the others down. Green is better than the first arm beyond a cell's interval, red worse, grey no
    verdict. Returns the file's name."""
    base, *others = run.titles
    levels = [level for level in levels if level.cells.keys() == run.titles.keys()]
    across = list(dict.fromkeys((level.load, level.point.over[-1:]) for level in levels))
    down = list(dict.fromkeys(level.point.over[:-1] for level in levels))
    found = {(of.point, arm): compared(of, arm, base, CELL) for of in levels for arm in others}
    size = (0.8 * len(across) + 1.5, 0.45 * len(down) + 1.1)
    with plot.panels(folder / FILE, len(others), size, len(SHOWN)) as axes:
        panels = [(arm, quantity) for quantity in SHOWN for arm in others]
        for axis, (arm, quantity) in zip(axes, panels, strict=True):
            fields = ", ".join(name for name, _ in across[0][1])
            axis.set_title(f"{run.titles[arm]}: {AGAINST[quantity]} over {run.titles[base]}")
            axis.set_xlabel(fields and f"sessions at once; {fields}", fontsize=8)
            for level in levels:
                x = across.index((level.load, level.point.over[-1:]))
                y = down.index(level.point.over[:-1])
                ratio = found[level.point, arm][quantity]
                axis.add_patch(_cell(x, y, COLORS[standing(quantity, ratio)]))
                text = f"{ratio.value:.2f}\n[{ratio.low:.2f}, {ratio.high:.2f}]"
                axis.text(x, y, text, ha="center", va="center", fontsize=6)
            axis.set_xlim(-0.5, len(across) - 0.5)
            axis.set_ylim(len(down) - 0.5, -0.5)
            axis.set_xticks(range(len(across)), [_names(*each) for each in across])
            axis.set_yticks(range(len(down)), ["\n".join(map(_field, of)) for of in down])
            axis.tick_params(length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
    return FILE


def _cell(x: int, y: int, color: str) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white")


def _field(of: tuple[str, float]) -> str:
    return f"{of[0]} {of[1]:g}"


def _names(load: float, over: Sequence[tuple[str, float]]) -> str:
    return "\n".join((f"{load:g} sess.", *(f"{value:g}" for _, value in over)))

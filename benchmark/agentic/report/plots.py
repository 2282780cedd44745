"""Figures of the page, from a run's summary. Each arm has one colour in all figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.agentic.report.numbers import AGAINST, Interval
from benchmark.agentic.report.page import Json, three
from benchmark.agentic.report.verdict import SHOWN, better, share

#: The first colour is that of the base arm.
COLORS = ("#9a9a9a", "#2a7fb8", "#c0504d", "#c9b37e", "#8cc0de", "#55a868")
BETTER = {1: "#55a868", -1: "#c0504d", 0: "#e8e8e8"}
DRAWN = {"ttft_mean": "ttft_s", "tpot_mean": "tpot_s", "e2e_mean": None, "goodput": None}
"""Quantities drawn over load, each with the name of its SLO."""


def draw(summary: Json, folder: Path) -> dict[str, str]:
    """Write the figures as SVG. Return title -> file name."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    # Keep text as text, and make the file reproducible.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "page"})
    if summary["study"]["grid"] and len(summary["titles"]) > 1:
        _grid(summary, folder / "grid.svg")
        return {"Which arm is better at each load": "grid.svg"}
    _over_load(summary, folder / "load.svg")
    return {"Mean times and goodput over load, with 95 % intervals; dashed: the SLO": "load.svg"}


def _over_load(summary: Json, path: Path) -> None:
    loads = summary["loads"]
    positions: Mapping[str, float] = {name: float(name.split(",")[0]) for name in loads}
    if len(set(positions.values())) < len(loads):
        positions = {name: number for number, name in enumerate(loads)}
    with panels(path, len(DRAWN), (3.75, 3.6)) as axes:
        for axis, (name, bound) in zip(axes, DRAWN.items(), strict=True):
            scale = 1.0 if name == "goodput" else 1e3
            for (arm, title), color in zip(summary["titles"].items(), COLORS * 2, strict=False):
                there = [load for load in loads if arm in loads[load]]
                numbers = [three(loads[load][arm]["numbers"].get(name)) for load in there]
                middle = [value * scale for value, _, _ in numbers]
                below = [max(0.0, value - low) * scale for value, low, _ in numbers]
                above = [max(0.0, high - value) * scale for value, _, high in numbers]
                x = [positions[load] for load in there]
                style: dict[str, Any] = {"color": color, "marker": "o", "capsize": 3}
                axis.errorbar(x, middle, (below, above), label=title, **style)
            if bound is not None:
                slo = summary["study"]["slo"][bound] * scale
                axis.axhline(slo, color="black", linestyle="--", linewidth=0.8)
            if name == "goodput":
                axis.set_ylim(bottom=0)
            else:
                axis.set_yscale("log")
            axis.set_ylabel("requests/s within the SLO" if scale == 1 else f"{AGAINST[name]}, ms")
            axis.set_xlabel(summary["unit"])
        axes[0].legend(fontsize=7, frameon=False)


def _grid(summary: Json, path: Path) -> None:
    """Draw one row of panels a quantity, and one column an arm. In a panel, the last field of the
    grid and the load run across, the other fields down. Green: better than the first arm beyond the
    interval; red: worse; grey: no verdict."""
    from matplotlib.patches import Rectangle

    base, *compared = summary["titles"]
    # "4, turns 2, cold_share 0.1" -> across (4, cold_share 0.1), down (turns 2).
    split = {load: load.split(", ") for load in summary["loads"]}
    across = list(dict.fromkeys((parts[0], *parts[-1:]) for parts in split.values()))
    down = list(dict.fromkeys(tuple(parts[1:-1]) for parts in split.values()))
    size = (0.8 * len(across) + 1.5, 0.45 * len(down) + 1.1)
    with panels(path, len(compared), size, len(SHOWN)) as axes:
        shown = [(arm, quantity) for quantity in SHOWN for arm in compared]
        for axis, (arm, quantity) in zip(axes, shown, strict=True):
            title = f"{summary['titles'][arm]}: {AGAINST[quantity]} over {summary['titles'][base]}"
            axis.set_title(title)
            for load, parts in split.items():
                if not (ratios := summary["loads"][load].get(arm, {}).get("of_first_arm")):
                    continue
                ratio = Interval(*three(ratios[quantity]))
                x, y = across.index((parts[0], *parts[-1:])), down.index(tuple(parts[1:-1]))
                color = BETTER[better(quantity, ratio)]
                cell = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white")
                axis.add_patch(cell)
                text = share(ratio).replace(" [", "\n[")
                axis.text(x, y, text, ha="center", va="center", fontsize=6)
            axis.set_xlim(-0.5, len(across) - 0.5)
            axis.set_ylim(len(down) - 0.5, -0.5)
            axis.set_xticks(
                range(len(across)), ["\n".join(parts).replace("_", " ") for parts in across]
            )
            axis.set_yticks(
                range(len(down)), ["\n".join(parts).replace("_", " ") for parts in down]
            )
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)


@contextmanager
def panels(
    path: Path, count: int = 1, size: tuple[float, float] = (7.0, 4.0), rows: int = 1
) -> Iterator[Any]:
    """Provide the axes of ``count`` panels side by side, in ``rows`` rows, and write them to
    ``path`` afterwards.

    ``size``: inches of one panel. The suffix of ``path`` selects the format.
    """
    from matplotlib import pyplot

    inches = (size[0] * count, size[1] * rows)
    axes = pyplot.subplots(rows, count, figsize=inches, squeeze=False)[1].ravel()
    figure = axes[0].figure
    yield axes
    for axis in axes:
        axis.title.set_fontsize(9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Date": None})
    pyplot.close(figure)

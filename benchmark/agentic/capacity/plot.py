"""The pictures. Needs matplotlib (the ``bench`` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GREY, BLUE, LIGHT, RED = "#9a9a9a", "#2a7fb8", "#8cc0de", "#c0504d"


def bars(path: Path, title: str, values: Mapping[str, float]) -> None:
    """One bar a name, the first one grey."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 0.5 * len(values) + 1.2))
    colors = [GREY, *[BLUE] * (len(values) - 1)]
    drawn = axis.barh(list(values), list(values.values()), color=colors)
    axis.bar_label(drawn, fmt="%.2f", padding=3)
    axis.invert_yaxis()
    axis.set_title(title)
    _save(figure, path)


def lines(
    path: Path,
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    marks: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Curves over ``x``; ``marks`` are drawn as dots."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for (name, values), color in zip(
        series.items(), (BLUE, RED, GREY, LIGHT, "#55a868", "#8172b2"), strict=False
    ):
        axis.plot(x, values, label=name, color=color)
    for (name, values), color in zip((marks or {}).items(), (BLUE, RED), strict=False):
        axis.plot(x, values, "o", label=name, color=color, markersize=4)
    axis.set_title(title)
    axis.set_xlabel(labels[0])
    axis.set_ylabel(labels[1])
    axis.set_ylim(bottom=0)
    axis.legend()
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)

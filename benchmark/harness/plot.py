"""Pictures of comparisons: a colour an arm, labelled axes. Needs matplotlib (``bench`` extra)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The first one is what the others are compared with.
COLORS = ("#9a9a9a", "#2a7fb8", "#c0504d", "#c9b37e", "#8cc0de", "#55a868")

#: Name of a line or bar -> x -> y.
Curves = Mapping[str, Mapping[float, float]]


@contextmanager
def panels(
    path: Path, count: int = 1, size: tuple[float, float] = (7.0, 4.0), rows: int = 1
) -> Iterator[Any]:
    """The axes of ``count`` panels side by side, in ``rows``, which are written to ``path``
    afterwards.

    ``size``: inches of one panel. The format is that of the path's suffix, ``.png`` or ``.svg``.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot
    from PIL import Image  # comes with it

    path.parent.mkdir(parents=True, exist_ok=True)
    inches = (size[0] * count, size[1] * rows)
    axes = pyplot.subplots(rows, count, figsize=inches, squeeze=False)[1].ravel()
    figure = axes[0].figure
    yield axes
    for axis in axes:
        axis.title.set_fontsize(9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    if path.suffix != ".png":
        return
    with Image.open(path) as image:  # a third of the bytes
        image.convert("RGB").quantize(64).save(path, optimize=True)


def lines(
    path: Path, title: str, curves: Curves, labels: tuple[str, str], *, log: bool = False
) -> None:
    """Curves in one panel; ``labels``: of the axes, with units; ``log``: both axes."""
    with panels(path) as (axis,):
        for (name, points), color in zip(curves.items(), COLORS * len(curves), strict=False):
            axis.plot(list(points), list(points.values()), "o-", ms=3, color=color, label=name)
        axis.set_title(title)
        axis.set_xlabel(labels[0])
        axis.set_ylabel(labels[1])
        if log:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, frameon=False)


def bars(path: Path, quantities: Mapping[str, Mapping[str, float]]) -> None:
    """A panel a quantity, a bar an arm. ``quantities``: title -> arm -> value."""
    with panels(path, len(quantities), (3.6, 3.2)) as axes:
        for axis, (title, values) in zip(axes, quantities.items(), strict=True):
            names = [name.replace(" ", "\n") for name in values]
            bars = axis.bar(names, list(values.values()), color=COLORS[: len(values)])
            axis.bar_label(bars, fmt="%.3g", fontsize=8)
            axis.set_title(title)
            axis.margins(y=0.15)


def grouped(axis: Any, title: str, arms: Sequence[str], parts: Mapping[str, list[float]]) -> None:
    """For each arm a bar of each part, side by side."""
    width = 0.8 / len(parts)
    for i, ((part, values), color) in enumerate(zip(parts.items(), COLORS, strict=False)):
        places = [j + i * width for j in range(len(arms))]
        bars = axis.bar(places, values, width, color=color, label=part)
        axis.bar_label(bars, fmt="%.3g", fontsize=7)
    middle = width * (len(parts) - 1) / 2
    axis.set_xticks([j + middle for j in range(len(arms))], arms)
    axis.set_title(title)
    axis.margins(y=0.2)
    axis.legend(fontsize=7, frameon=False)


def stacked(axis: Any, title: str, arms: Sequence[str], parts: Mapping[str, list[float]]) -> None:
    """For each arm its parts, one upon the other, and their sum."""
    base = [0.0] * len(arms)
    for (part, values), color in zip(parts.items(), COLORS, strict=False):
        axis.bar(arms, values, bottom=base, label=part, color=color)
        base = [below + value for below, value in zip(base, values, strict=True)]
    for i, height in enumerate(base):
        axis.annotate(f"{height:.3g}", (i, height), ha="center", va="bottom", fontsize=8)
    axis.set_title(title)
    axis.margins(y=0.2)
    axis.legend(fontsize=7, frameon=False)

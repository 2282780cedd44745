"""One picture of the comparison: hit rate by tier, TTFT, E2E, host memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmark.hicache_buffer_only.compare import Arm

COLORS = ("#9a9a9a", "#8cc0de", "#2a7fb8")


def draw(path: Path, arms: Mapping[str, Arm]) -> None:
    """Writes a PNG. Needs matplotlib (the ``bench`` extra)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 4, figsize=(18, 3.4))
    names, measured = list(arms), list(arms.values())
    _stacked(
        axes[0],
        "cached prompt tokens, % (more is better)",
        names,
        {
            tier: [100 * m.hits.rate(getattr(m.hits, tier)) for m in measured]
            for tier in ("device", "host", "storage")
        },
    )
    for axis, title, of in ((axes[1], "TTFT", "ttft_s"), (axes[2], "E2E", "latency_s")):
        spreads = [getattr(m.times, of) for m in measured]
        _side_by_side(
            axis,
            f"{title}, ms (less is better)",
            names,
            {p: [1e3 * getattr(s, p) for s in spreads] for p in ("mean", "p50", "p90")},
        )
    _stacked(
        axes[3],
        "host memory, MB",
        names,
        {
            "pinned by workers": [m.memory.pinned_bytes / 1e6 for m in measured],
            "store": [m.memory.store_bytes / 1e6 for m in measured],
        },
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _stacked(axis: Any, title: str, names: list[str], parts: Mapping[str, list[float]]) -> None:
    base = [0.0] * len(names)
    for (part, values), color in zip(parts.items(), COLORS, strict=False):
        axis.bar(names, values, bottom=base, label=part, color=color)
        base = [b + v for b, v in zip(base, values, strict=True)]
    for i, height in enumerate(base):
        axis.annotate(f"{height:.3g}", (i, height), ha="center", va="bottom", fontsize=8)
    _finish(axis, title)


def _side_by_side(
    axis: Any, title: str, names: list[str], parts: Mapping[str, list[float]]
) -> None:
    width = 0.8 / len(parts)
    for i, ((part, values), color) in enumerate(zip(parts.items(), COLORS, strict=False)):
        bars = axis.bar([j + i * width for j in range(len(names))], values, width, color=color)
        bars.set_label(part)
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
    middle = width * (len(parts) - 1) / 2
    axis.set_xticks([j + middle for j in range(len(names))], names)
    _finish(axis, title)


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.2)
    axis.legend(fontsize=7, frameon=False)

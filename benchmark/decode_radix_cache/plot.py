"""One picture of the comparison: requests/s, TTFT and ITL, an arm a bar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmark.harness.arm import Measured


def draw(path: Path, arms: Mapping[str, Measured]) -> None:
    """Writes a PNG. Needs matplotlib (the ``bench`` extra)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    panels = {
        "requests/s (more is better)": [m.summary.requests_per_s for m in arms.values()],
        "requests running together": [float(m.peak_running) for m in arms.values()],
        "TTFT p50, s (less is better)": [m.summary.ttft_s.p50 for m in arms.values()],
        "ITL p50, ms (less is better)": [m.summary.itl_s.p50 * 1e3 for m in arms.values()],
        "KV moved, MB (less is better)": [m.traffic.bytes_moved / 1e6 for m in arms.values()],
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2))
    colors = ["#9a9a9a", "#c9b37e", "#2a7fb8", "#8cc0de", "#5b6ea8"]
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        bars = axis.bar(list(arms), values, color=colors[: len(arms)])
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

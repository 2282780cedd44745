"""Two pictures of a sweep: time against size, and bandwidth against size, an arm a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmark.kv_transfer.summary import Summary

_COLORS = {"stock": "#9a9a9a", "ours": "#2a7fb8", "bare": "#3a3a3a", "bare-stock": "#c88a2a"}


def draw(folder: Path, stem: str, lines: Mapping[str, Sequence[tuple[int, Summary]]]) -> list[Path]:
    """Writes ``<stem>-time.png`` and ``<stem>-bandwidth.png``. ``lines``: label (starting with the
    arm) -> (tokens, numbers) by size. Needs matplotlib (the ``bench`` extra)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    paths = []
    for kind, title in (
        ("time", "a room's transfer, ms: p50, and p99 as the upper edge"),
        ("bandwidth", "bandwidth, GB/s"),
    ):
        figure, axis = pyplot.subplots(figsize=(6.4, 4.2))
        for label, points in lines.items():
            tokens = [size for size, _ in points]
            color = _COLORS[label.split()[0]]
            style = "--" if "contiguous" in label else "-"
            if kind == "time":
                p50 = [summary.total.p50 * 1e3 for _, summary in points]
                p99 = [summary.total.p99 * 1e3 for _, summary in points]
                axis.plot(tokens, p50, style, marker="o", ms=3, color=color, label=label)
                axis.fill_between(tokens, p50, p99, color=color, alpha=0.15, linewidth=0)
            else:
                rates = [summary.gb_per_s for _, summary in points]
                axis.plot(tokens, rates, style, marker="o", ms=3, color=color, label=label)
        axis.set_xscale("log", base=2)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8, rotation=30)
        if kind == "time":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens of a room")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, framealpha=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        paths.append(folder / f"{stem}-{kind}.png")
        figure.savefig(paths[-1], dpi=130)
        pyplot.close(figure)
    return paths

"""Figures of the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display

import matplotlib.pyplot as plt  # noqa: E402

from benchmark.agentic.replay.report import open_over_time  # noqa: E402
from benchmark.agentic.report.measure import Measured  # noqa: E402


def draw(arms: Sequence[Measured], folder: Path) -> dict[str, str]:
    """Writes PNG files; title to file name."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "KV moved from prefill to decode, by arm": _moved(arms, folder / "moved.png"),
        "Time to first token, share of requests": _ttft(arms, folder / "ttft.png"),
        "Requests under way": _open(arms, folder / "open.png"),
    }
    return {title: path.name for title, path in drawn.items() if path is not None}


def _moved(arms: Sequence[Measured], path: Path) -> Path | None:
    pools = [measured for measured in arms if measured.arm.decodes]
    if not pools:
        return None
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(pools) + 1.2))
    labels = [
        f"{m.arm.name} ({m.arm.policy})" if ":" in m.arm.policy else m.arm.name for m in pools
    ]
    axes.barh(labels, [m.traffic.bytes_moved / 1e6 for m in pools])
    axes.invert_yaxis()
    axes.set_xlabel("MB")
    return _save(figure, path)


def _ttft(arms: Sequence[Measured], path: Path) -> Path:
    groups = [list(members) for _, members in groupby(arms, key=lambda m: m.arm.group)]
    figure, all_axes = plt.subplots(
        1, len(groups), figsize=(5 * len(groups), 3.6), sharey=True, squeeze=False
    )
    for axes, group in zip(all_axes[0], groups, strict=True):
        for measured in group:
            times = sorted(o.ttft_s * 1e3 for o in measured.outcomes if o.ttft_s is not None)
            shares = [(i + 1) / len(times) for i in range(len(times))]
            axes.step(times, shares, where="post", label=measured.arm.name)
        axes.set_xscale("log")
        axes.set_xlabel("ms")
        axes.set_title(group[0].arm.group, fontsize=9)
        axes.legend(fontsize=6)
    return _save(figure, path)


def _open(arms: Sequence[Measured], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for measured in arms:
        steps = open_over_time(measured.outcomes)
        axes.step([at for at, _ in steps], [n for _, n in steps], where="post", linewidth=0.8)
    axes.set_xlabel("s of the replay")
    axes.set_ylabel("requests")
    axes.legend([measured.arm.name for measured in arms], fontsize=5, ncol=2)
    return _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path

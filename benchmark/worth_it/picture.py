"""The picture of an estimate: requests that fit, and TTFT by the length of a turn."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.agentic.report.plots import COLORS, panels
from benchmark.worth_it.estimate import Estimate

POINTS = 80
LABELS = ("stock PD", "PD, radix", "PD, local turn")


def draw(estimate: Estimate, path: Path) -> None:
    """Write the picture; without rates only its first panel."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    # Keep text as text, and make the file reproducible.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "worth-it"})
    path.parent.mkdir(parents=True, exist_ok=True)
    with panels(path, 2 if estimate.rates else 1, (4.5, 3.4)) as axes:
        _fits(estimate, axes[0])
        if estimate.rates:
            _times(estimate, axes[1])
        for axis in axes:
            axis.legend(fontsize=7, frameon=False)


def _fits(estimate: Estimate, axis: Any) -> None:
    """Draw the requests that fit by the length of the shared prefix."""
    work = estimate.work
    longest = max(2 * work.shared, work.prompt)
    prefixes = [longest * i / POINTS for i in range(POINTS + 1)]
    fits = [replace(estimate, work=replace(work, shared=length)) for length in prefixes]
    axis.plot(prefixes, [each.without for each in fits], color=COLORS[0], label=LABELS[0])
    axis.plot(prefixes, [each.fit for each in fits], color=COLORS[1], label=LABELS[1])
    axis.axvline(work.shared, color="black", linestyle="--", linewidth=0.8)
    axis.set_xlabel("tokens of a shared prefix (dashed: this workload)")
    axis.set_ylabel("requests that fit")
    axis.set_ylim(bottom=0)


def _times(estimate: Estimate, axis: Any) -> None:
    """Draw TTFT without queues by the new tokens of a turn, and where local turns stop winning."""
    new, longest = estimate.work.new, estimate.longest_local - estimate.lost
    end = max(4 * new, 2 * longest if math.isfinite(longest) else 0)
    lengths = [end * i / POINTS for i in range(1, POINTS + 1)]
    times = zip(*(estimate.ttft(length) for length in lengths), strict=True)
    for label, color, seconds in zip(LABELS, COLORS, times, strict=False):
        axis.plot(lengths, [s * 1e3 for s in seconds], color=color, label=label)
    axis.axvline(new, color="black", linestyle="--", linewidth=0.8)
    if 0 < longest <= end:
        axis.axvline(longest, color=COLORS[2], linestyle=":", linewidth=0.8)
    axis.set_xlabel("new tokens of a turn (dashed: this workload; dotted: m*)")
    axis.set_ylabel("TTFT without queues, ms")

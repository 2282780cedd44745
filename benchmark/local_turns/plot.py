"""TTFT, gap and requests/s over the load of cold prompts, a line an arm."""

from __future__ import annotations

from pathlib import Path

from benchmark.local_turns.page import Json, medians

PANELS = {
    "TTFT p50 of later turns, ms": lambda m: m["ttft_later_s"]["p50"] * 1e3,
    "from one token to the next, p99, ms": lambda m: m["gap_s"]["p99"] * 1e3,
    "requests/s of the talks": lambda m: m["requests_per_s"],
    "cold prompts, tokens a second": lambda m: m["cold_tokens_per_s"],
}
COLORS = ("#9a9a9a", "#c9b37e", "#d1495b", "#8cc0de", "#2a7fb8")


def draw(path: Path, summary: Json) -> None:
    """Writes a PNG; bars are the smallest and the largest of the rounds. Needs matplotlib (the
    ``bench`` extra)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    loads = summary["load"]["cold_clients"]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(3.6 * len(PANELS), 3.4))
    for axis, (title, value) in zip(axes, PANELS.items(), strict=True):
        for (arm, runs), color in zip(summary["runs"].items(), COLORS, strict=False):
            middle = [value(medians(summary, clients)[arm]) for clients in loads]
            rounds = [[value(m) for m in runs[str(clients)]] for clients in loads]
            low = [m - min(of) for m, of in zip(middle, rounds, strict=True)]
            high = [max(of) - m for m, of in zip(middle, rounds, strict=True)]
            axis.errorbar(loads, middle, (low, high), label=arm, color=color, marker="o", capsize=3)
        axis.set_title(title, fontsize=9)
        axis.set_xticks(loads)
        axis.set_xlabel("clients with cold prompts", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        if "ms" in title:
            axis.set_yscale("log")
    axes[0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

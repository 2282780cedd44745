"""The summary of a comparison as a table and a picture; shared by the command and the README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.harness import plot
from benchmark.harness.report import megabytes

Json = Mapping[str, Any]

TIERS = {"device": "the device", "host": "the host pool", "storage": "the store"}


def table(trace: Json) -> tuple[list[str], list[list[str]]]:
    """Head and rows: a quantity a row, an arm a column."""
    columns = [_column(arm) for arm in trace["arms"].values()]
    head = ["", *(name if "buffer" in name else f"stock, {name}" for name in trace["arms"])]
    return head, [[title, *(column[title] for column in columns)] for title in columns[0]]


def cached(hits: Mapping[str, float]) -> float:
    """Share of the prompt tokens; 0 of none."""
    return sum(hits[tier] for tier in TIERS) / (hits["prompt"] or 1.0)


def _column(arm: Json) -> dict[str, str]:
    """An arm's cells, by the titles of their rows."""
    hits, times, memory = arm["hits"], arm["times"], arm["memory"]
    cells = {"cached prompt tokens": f"{cached(hits):.1%}"}
    for tier, place in TIERS.items():
        cells[f"from {place}"] = f"{hits[tier] / hits['prompt']:.1%}"
    for of, title in (("ttft_s", "TTFT"), ("latency_s", "E2E"), ("itl_s", "ITL")):
        spread = (_milliseconds(times[of][p]) for p in ("mean", "p50", "p90", "p99"))
        cells[f"{title}: mean, p50, p90, p99, ms"] = ", ".join(spread)
    rounds = [_milliseconds(mean) for mean in arm["ttft_mean_of_rounds_s"]]
    cells["TTFT: mean of each round, ms"] = ", ".join(rounds)
    for of, title in (("ttft_by_class", "TTFT"), ("latency_by_class", "E2E")):
        for name, some in times[of].items():
            mean = f"{_milliseconds(some['mean'])} ({some['count']:,})" if some["count"] else "-"
            what = "that miss" if name == "miss" else f"with a {name} hit"
            cells[f"{title} mean of requests {what}, ms (requests)"] = mean
    page = memory["workers"] * memory["page_bytes"]
    cells["host memory pinned by the workers"] = megabytes(page * memory["pool_pages"])
    cells["store"] = megabytes(page * memory["segment_pages"])
    cells["latest request, behind its time, ms"] = _milliseconds(arm["late_s"])
    cells["failed requests"] = str(arm["failed"])
    return cells


def against_stock(trace: Json) -> str:
    """What ``buffer_only`` changes, as a sentence; none where one of the two was not run."""
    stock, ours = (trace["arms"].get(name) for name in ("cache", "buffer_only"))
    if stock is None or ours is None:
        return ""

    def rate(arm: Json) -> float:
        return sum(arm["hits"][tier] for tier in TIERS) / float(arm["hits"]["prompt"])

    def change(of: str, at: str) -> str:
        before, after = (arm["times"][of][at] for arm in (stock, ours))
        return f"{after / before - 1:+.1%}" if before and after else "-"

    hits = ""
    if rate(stock):
        hits = f"{rate(ours) / rate(stock):.2f} times as many cached prompt tokens; "
    ttft = ", ".join(change("ttft_s", at) for at in ("mean", "p50", "p90"))
    return (
        f"`buffer_only` compared with stock's `cache`: {hits}TTFT {ttft} (mean, p50, p90); E2E "
        f"{change('latency_s', 'mean')} (mean); ITL {change('itl_s', 'mean')} (mean)."
    )


def measured(trace: Json, commit: str) -> str:
    """Where its runs are not all of ``commit``, that of the last command, a sentence that says so;
    earlier versions kept none."""
    commits = trace.get("commits") or [commit]
    return "" if commits == [commit] else f" Measured at commits {', '.join(commits)}."


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f}"


def draw(path: Path, trace: Json) -> None:
    """Hit rate by tier, TTFT, E2E and host memory, a bar an arm."""
    arms = trace["arms"]
    names, of = list(arms), list(arms.values())
    with plot.panels(path, 4, (4.5, 3.4)) as axes:
        title = "cached prompt tokens, % (more is better)"
        hits = {tier: [100 * a["hits"][tier] / a["hits"]["prompt"] for a in of] for tier in TIERS}
        plot.stacked(axes[0], title, names, hits)
        for axis, title, key in ((axes[1], "TTFT", "ttft_s"), (axes[2], "E2E", "latency_s")):
            times = {
                p: [1e3 * (a["times"][key][p] or 0.0) for a in of] for p in ("mean", "p50", "p90")
            }
            plot.grouped(axis, f"{title}, ms (less is better)", names, times)
        pages = [a["memory"]["workers"] * a["memory"]["page_bytes"] / 1e6 for a in of]
        memory = {
            part: [mb * a["memory"][key] for mb, a in zip(pages, of, strict=True)]
            for part, key in (("pinned by workers", "pool_pages"), ("store", "segment_pages"))
        }
        plot.stacked(axes[3], "host memory, MB", names, memory)

"""Summaries of runs as tables; shared by the commands and the READMEs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmark.harness.report import megabytes

Json = Mapping[str, Any]
Cell = Callable[[Json], str]
Table = tuple[list[str], list[list[str]]]


def median_run(runs: Sequence[Json]) -> Json:
    """The run with the median requests/s (of two, the slower one)."""
    ordered = sorted(runs, key=lambda run: run["summary"]["requests_per_s"])
    return ordered[(len(ordered) - 1) // 2]


def medians(summary: Json) -> dict[str, Json]:
    """Of each arm the run with the median requests/s."""
    return {name: median_run(of) for name, of in summary["runs"].items()}


def rate(run: Json) -> str:
    return f"{run['summary']['requests_per_s']:.2f}"


def time(of: str, p: str) -> Cell:
    return lambda run: f"{run['summary'][of][p] * 1e3:,.0f} ms"


def moved(run: Json) -> str:
    return megabytes(run["traffic"]["bytes_moved"])


def throughput(summary: Json) -> Table:
    """Head and rows: a quantity a row, the median run of an arm a column."""
    arms = medians(summary)
    base = arms["stock"]["summary"]["requests_per_s"]
    cells: dict[str, Cell] = {
        "requests/s": rate,
        "against stock": lambda run: f"{run['summary']['requests_per_s'] / base:.2f}x",
        "peak running requests": lambda run: str(run["peak_running"]),
        "TTFT p50": time("ttft_s", "p50"),
        "TTFT p99": time("ttft_s", "p99"),
        "ITL p50": time("itl_s", "p50"),
        "ITL p99": time("itl_s", "p99"),
        "KV moved": moved,
        "failed requests": lambda run: str(run["summary"]["failed"]),
    }
    rows = [[name, *map(cell, arms.values())] for name, cell in cells.items()]
    each = [", ".join(map(rate, of)) for of in summary["runs"].values()]
    rows.insert(1, ["requests/s, each run", *each])
    return ["", *arms], rows


def wire(summary: Json) -> Table:
    """Bytes as the kernel counts them."""
    arms = summary["arms"]
    cells: dict[str, Cell] = {
        "bytes on the loopback interface, less HTTP": lambda arm: megabytes(arm["carried"]),
        "bytes of the pages that decode did not hold": lambda arm: megabytes(arm["unsent"]),
        "ratio": lambda arm: f"{arm['ratio']:.3f}",
    }
    return ["", *arms], [[name, *map(cell, arms.values())] for name, cell in cells.items()]


def speculation(summary: Json) -> Table:
    """Hits, bytes and accept lengths with a draft model and without one."""
    arms = summary["arms"]

    def length(name: str) -> Cell:
        return lambda arm: "" if arm[name] is None else f"{arm[name]:.2f}"

    cells: dict[str, Cell] = {
        f"hit tokens of {arms['plain']['prompt_tokens']:,}": lambda a: f"{a['hit_tokens']:,.0f}",
        "KV moved": lambda arm: megabytes(arm["moved_bytes"]),
        "tokens a step, over all requests": length("accept_length"),
        "`sglang:spec_accept_length`, as last reported": length("accept_length_gauge"),
    }
    steps = summary["load"]["steps"]
    titles = {"plain": "without speculation", "EAGLE": f"EAGLE, {steps} steps"}
    head = ["", *(titles[name] for name in arms)]
    return head, [[name, *map(cell, arms.values())] for name, cell in cells.items()]


def accepted(summary: Json) -> Table:
    """Drafts accepted with one step, of prompts with equal answers."""
    whose = {"kept": "as it is", "zeroed": "zeroed in each shared prefix, a control"}
    rows = [
        [whose[name], *(f"{of[each] * 100:.1f} %" for each in ("turns", "again", "misses"))]
        for name, of in summary["accept_rates"].items()
    ]
    return ["draft KV", "later turns", "their prompts again", "the same without hits"], rows
